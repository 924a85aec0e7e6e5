"""Answers over HTTP are the library's own: bit for bit at the same row count, and wherever rows go through the same kernels."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from tests.integration.oracle import Oracle
from tests.support import ARROW, Service, as_arrow, as_csv, as_json, as_parquet, mixed, numeric

pytestmark = pytest.mark.integration

SIZES = (1, 2, 3, 4, 5, 20, 33, 64)
#: Rows beyond a multiple of 32 that CPU kernels round in another way than the rest: the library's own answers differ there in
#: the last bit from its answers to the same rows in a forward of another size.
UNEVEN = (1, 2, 3)
TOLERANCE = 1e-6


def with_labels(labels: list[object]) -> pa.Table:
    table = numeric(rows=90, seed=3, classes=2)
    codes = [0 if label == "k0" else 1 for label in table.column("y").to_pylist()]
    return table.set_column(table.column_names.index("y"), "y", pa.array([labels[code] for code in codes]))


def with_gaps_and_an_empty_column() -> pa.Table:
    table = numeric(seed=14)
    rng = np.random.default_rng(14)
    holes = pa.array(np.where(rng.random(size=120) < 0.5, np.nan, rng.normal(size=120)), from_pandas=True)
    return table.append_column("holes", holes).append_column("empty", pa.nulls(120, pa.float64()))


def whole_numbers() -> pa.Table:
    """Small ones, identifiers beyond float32, and ones beyond float64."""
    rng = np.random.default_rng(15)
    small = rng.integers(-50, 50, size=120)
    return pa.table(
        {
            "small": small,
            "with_gaps": pa.array([None if i % 11 == 0 else int(v) for i, v in enumerate(small * 3)]),
            "ids": 2**40 + rng.integers(0, 10_000, size=120),
            "huge": 2**60 + rng.integers(0, 10**6, size=120),
            "y": np.where(small + rng.normal(size=120) > 0, "more", "less"),
        }
    )


TABLES = {
    "whole_numbers": whole_numbers(),
    "gaps": with_gaps_and_an_empty_column(),
    "booleans": mixed(seed=16).select(["auto", "amount", "y"]),
    "only_booleans": mixed(seed=17).select(["auto", "y"]),
    "dates": mixed(seed=18).select(["since", "seen", "y"]),
    "numeric": numeric(),
    "three_classes": numeric(seed=5, classes=3),
    "ten_classes": numeric(rows=200, seed=6, classes=10),
    "mixed": mixed().drop_columns(["z"]),
    "only_text": mixed().select(["plan", "y"]),
    "int_labels": with_labels([3, 7]),
    "bool_labels": with_labels([False, True]),
    "float_labels": with_labels([0.5, 1.5]),
    "text_number_labels": with_labels(["007", "7"]),
}


@pytest.mark.parametrize("kind", TABLES)
def test_probabilities_equal_the_library_bit_for_bit(service: Service, oracle: Oracle, kind: str) -> None:
    table = TABLES[kind]
    service.fit(table, f"parity-{kind}", task="classification")
    rows = table.drop_columns(["y"])
    expected = oracle.ask(table, "y", "classification", [slice(0, size) for size in SIZES])
    for size, wanted in zip(SIZES, expected, strict=True):
        answer = service.predict(f"parity-{kind}", rows.slice(0, size))
        assert np.array_equal(answer["probabilities"], wanted["probabilities"]), f"{size} rows"
    assert answer["classes"] == sorted(set(table.column("y").to_pylist()))
    assert {type(label) for label in answer["predictions"]} == {type(table.column("y")[0].as_py())}


@pytest.mark.parametrize("kind", ["numeric", "mixed"])
def test_means_and_quantiles_equal_the_library_bit_for_bit(
    service: Service, oracle: Oracle, kind: str
) -> None:
    table = mixed().drop_columns(["y"])
    if kind == "numeric":
        table = numeric(seed=9).drop_columns(["y"]).append_column("z", mixed(rows=120).column("z"))
    levels = (0.05, 0.5, 0.95)
    service.fit(table, f"parity-reg-{kind}", "z")
    rows = table.drop_columns(["z"])
    slices = [slice(0, size) for size in SIZES]
    expected = oracle.ask(table, "z", "regression", slices, quantiles=levels)
    for size, wanted in zip(SIZES, expected, strict=True):
        mean = service.predict(f"parity-reg-{kind}", rows.slice(0, size))
        assert np.array_equal(mean["mean"], wanted["mean"]), f"{size} rows"
        answer = service.predict(f"parity-reg-{kind}", rows.slice(0, size), quantiles="0.05,0.5,0.95")
        assert np.array_equal(answer["quantiles"], wanted["quantiles"]), f"{size} rows"
        assert answer["levels"] == list(levels)


@pytest.fixture(scope="module")
def large(service: Service) -> tuple[pa.Table, pa.Table]:
    """A fitted table, and rows that no single forward takes."""
    table = numeric(rows=100, seed=11)
    service.fit(table, "parity-large")
    return table, numeric(rows=700, seed=12).drop_columns(["y"])


@pytest.mark.parametrize("size", [290, 600, 601])
def test_a_request_larger_than_one_forward_equals_the_library(
    service: Service, oracle: Oracle, large: tuple[pa.Table, pa.Table], size: int
) -> None:
    table, rows = large
    (expected,) = oracle.ask(table, "y", "classification", [slice(0, size)], rows=rows)
    answer = service.predict("parity-large", rows.slice(0, size))
    assert np.array_equal(answer["probabilities"], expected["probabilities"])


@pytest.mark.parametrize("size", [257, 258, 259])
def test_a_size_that_the_library_itself_rounds_unevenly_is_within_the_tolerance(
    service: Service, oracle: Oracle, large: tuple[pa.Table, pa.Table], size: int
) -> None:
    table, rows = large
    (expected,) = oracle.ask(table, "y", "classification", [slice(0, size)], rows=rows)
    answer = service.predict("parity-large", rows.slice(0, size))
    assert np.abs(np.array(answer["probabilities"]) - expected["probabilities"]).max() <= TOLERANCE


def test_rows_answer_alike_in_any_company(service: Service, oracle: Oracle) -> None:
    table = mixed(seed=19).drop_columns(["z"])
    service.fit(table, "parity-company")
    rows = table.drop_columns(["y"])
    (whole,) = oracle.ask(table, "y", "classification", [slice(0, 64)])
    for start, size in [(0, 4), (7, 5), (30, 32), (20, 36), (60, 4), (0, 1), (5, 2), (61, 3), (30, 34)]:
        answer = np.array(service.predict("parity-company", rows.slice(start, size))["probabilities"])
        expected = whole["probabilities"][start : start + size]
        if size % 32 in UNEVEN:
            assert np.abs(answer - expected).max() <= TOLERANCE, f"{size} rows from {start}"
        else:
            assert np.array_equal(answer, expected), f"{size} rows from {start}"


def test_a_regression_larger_than_one_forward_equals_the_library(service: Service, oracle: Oracle) -> None:
    table = numeric(seed=9).drop_columns(["y"]).append_column("z", mixed(rows=120).column("z"))
    rows = numeric(rows=600, seed=21).drop_columns(["y"])
    service.fit(table, "parity-large-reg", "z")
    levels = (0.1, 0.9)
    (expected,) = oracle.ask(table, "z", "regression", [slice(0, 600)], rows=rows, quantiles=levels)
    answer = service.predict("parity-large-reg", rows, quantiles="0.1,0.9")
    assert np.array_equal(answer["mean"], expected["mean"])
    assert np.array_equal(answer["quantiles"], expected["quantiles"])


def test_every_body_format_gives_the_same_answer(service: Service) -> None:
    table = mixed().drop_columns(["z"])
    service.fit(table, "formats")
    rows = table.drop_columns(["y"]).slice(0, 9)
    path = "/v1/datasets/formats/predict"
    expected = service.predict("formats", rows)["probabilities"]
    shown = rows.to_pylist()
    for row in shown:
        row["since"], row["seen"] = row["since"].isoformat(), row["seen"].isoformat()
    bodies = {
        "application/vnd.apache.parquet": as_parquet(rows),
        "text/csv": as_csv(rows),
        ARROW: as_arrow(rows),
    }
    answers = {
        kind: service.http.post(path, content=body, headers={"content-type": kind}).json()
        for kind, body in bodies.items()
    }
    answers["records"] = service.http.post(path, json={"records": shown}).json()
    columns = {"columns": rows.column_names, "rows": [list(row.values()) for row in shown]}
    answers["columns"] = service.http.post(path, json=columns).json()
    for kind, answer in answers.items():
        assert answer.get("probabilities") == expected, (kind, answer)


def test_an_arrow_answer_holds_what_the_json_answer_does(service: Service) -> None:
    table = numeric(seed=13)
    service.fit(table, "arrow-answer")
    rows = table.drop_columns(["y"]).slice(0, 6)
    shown = service.predict("arrow-answer", as_json(rows))
    path = "/v1/datasets/arrow-answer/predict"
    response = service.http.post(path, json=as_json(rows), headers={"Accept": ARROW})
    answer = pa.ipc.open_stream(response.content).read_all()
    assert answer.column("prediction").to_pylist() == shown["predictions"]
    columns = [answer.column(f"probability:{label}").to_numpy() for label in shown["classes"]]
    assert np.array_equal(np.stack(columns, axis=1), shown["probabilities"])


def test_an_arrow_answer_of_a_regression_holds_what_the_json_answer_does(service: Service) -> None:
    table = mixed(seed=22).drop_columns(["y"])
    service.fit(table, "arrow-answer-reg", "z")
    rows = table.drop_columns(["z"]).slice(0, 6)
    shown = service.predict("arrow-answer-reg", rows, quantiles="0.1,0.5")
    response = service.http.post(
        "/v1/datasets/arrow-answer-reg/predict",
        content=as_arrow(rows),
        headers={"Accept": ARROW, "content-type": ARROW},
        params={"quantiles": "0.1,0.5"},
    )
    answer = pa.ipc.open_stream(response.content).read_all()
    assert answer.column("mean").to_pylist() == shown["mean"]
    columns = [answer.column(f"quantile:{level}").to_numpy() for level in (0.1, 0.5)]
    assert np.array_equal(np.stack(columns, axis=1), shown["quantiles"])


def test_columns_match_by_name_extras_are_ignored_and_unseen_categories_are_gaps(service: Service) -> None:
    table = mixed().drop_columns(["z"])
    service.fit(table, "by-name")
    rows = table.drop_columns(["y"]).slice(0, 5)
    expected = service.predict("by-name", rows)["probabilities"]
    turned = rows.select(rows.column_names[::-1]).append_column("extra", pa.array(["?"] * 5))
    assert service.predict("by-name", turned)["probabilities"] == expected
    unseen = rows.set_column(0, "plan", pa.array(["never seen"] * 5))
    gaps = rows.set_column(0, "plan", pa.array([None] * 5, pa.string()))
    assert (
        service.predict("by-name", unseen)["probabilities"]
        == service.predict("by-name", gaps)["probabilities"]
    )
