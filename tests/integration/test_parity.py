"""Answers over HTTP are the library's own, bit for bit where one forward holds the rows, else within 1e-6 (decision 0003)."""

from __future__ import annotations

import datetime as dt
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.integration.oracle import Oracle
from tests.support import (
    ARROW,
    Service,
    as_arrow,
    as_csv,
    as_json,
    as_parquet,
    check_problem,
    mixed,
    numeric,
)

pytestmark = pytest.mark.integration

SIZES = (1, 2, 3, 4, 5, 20, 64)


def with_labels(labels: list[Any]) -> pa.Table:
    table = numeric(rows=90, seed=3, classes=2)
    codes = [0 if label == "k0" else 1 for label in table.column("y").to_pylist()]
    column = pa.array([labels[code] for code in codes], pa.uint64() if 2**64 - 1 in labels else None)
    if labels == LABELS["dictionary"]:
        column = column.dictionary_encode()
    return table.set_column(table.column_names.index("y"), "y", column)


LABELS: dict[str, list[Any]] = {
    "int": [-3, 2**62],
    "unsigned": [0, 2**64 - 1],
    "float": [0.0, 1.0],
    "bool": [False, True],
    "text": ["007", "7"],
    "dictionary": ["no", "yes"],
    "date": [dt.date(2023, 1, 1), dt.date(2024, 3, 1)],
}
TABLES = {
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
def test_means_medians_and_quantiles_equal_the_library_bit_for_bit(
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
        asked = service.predict(f"parity-reg-{kind}", rows.slice(0, size), output="median")
        assert np.array_equal(asked["median"], wanted["median"]), f"{size} rows"
        assert (asked["predictions"], asked["mean"]) == (asked["median"], mean["mean"])


def test_a_request_larger_than_one_forward_equals_the_library_within_the_last_bits(
    service: Service, oracle: Oracle
) -> None:
    table = numeric(rows=100, seed=11)
    rows = numeric(rows=601, seed=12).drop_columns(["y"])
    service.fit(table, "parity-large")
    sizes = (256, 257, 290, 515, 601)
    wanted = oracle.ask(table, "y", "classification", [slice(0, size) for size in sizes], rows=rows)
    for size, expected in zip(sizes, wanted, strict=True):
        answer = service.predict("parity-large", rows.slice(0, size))
        difference = np.abs(np.subtract(answer["probabilities"], expected["probabilities"]))
        assert difference.max() <= (0 if size <= 256 else 1e-6), f"{size} rows"


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


def test_a_regression_s_arrow_answer_holds_the_point_that_was_asked_for(service: Service) -> None:
    table = mixed().drop_columns(["y"])
    service.fit(table, "arrow-regression", "z")
    rows = table.drop_columns(["z"]).slice(0, 6)
    path = "/v1/datasets/arrow-regression/predict"
    for query in ({"output": "median"}, {"quantiles": "0.1,0.9"}):
        shown = service.predict("arrow-regression", rows, **query)
        response = service.http.post(
            path, content=as_arrow(rows), headers={"content-type": ARROW, "accept": ARROW}, params=query
        )
        answer = pa.ipc.open_stream(response.content).read_all()
        assert answer.column("prediction").to_pylist() == shown["predictions"]
        points = [name for name in ("mean", "median") if name in shown]
        assert {name: answer.column(name).to_pylist() for name in points} == {n: shown[n] for n in points}
        levels = shown.get("levels", [])
        assert answer.column_names == ["prediction", *points, *(f"quantile:{level!r}" for level in levels)]
        for i, level in enumerate(levels):
            assert answer.column(f"quantile:{level!r}").to_pylist() == [row[i] for row in shown["quantiles"]]


@pytest.mark.parametrize("kind", LABELS)
def test_labels_come_back_with_their_type_in_json_and_arrow(service: Service, kind: str) -> None:
    labels = LABELS[kind]
    table = with_labels(labels)
    service.fit(table, f"labels-{kind}", task="classification")
    rows = table.drop_columns(["y"]).slice(0, 30)
    path = f"/v1/datasets/labels-{kind}/predict"
    headers = {"content-type": ARROW, "accept": ARROW}
    answer = pa.ipc.open_stream(service.http.post(path, content=as_arrow(rows), headers=headers).content)
    arrow = answer.read_all().column("prediction")
    shown = service.predict(f"labels-{kind}", rows)
    as_json = [label.isoformat() if isinstance(label, dt.date) else label for label in labels]
    assert shown["classes"] == as_json
    assert set(shown["predictions"]) == set(as_json)
    assert {type(label) for label in shown["predictions"]} == {type(label) for label in as_json}
    assert set(arrow.to_pylist()) == set(labels)
    assert {type(label) for label in arrow.to_pylist()} == {type(labels[0])}


def test_a_threshold_moves_the_label_of_two_classes(service: Service) -> None:
    table = numeric(seed=21)
    service.fit(table, "threshold")
    rows = table.drop_columns(["y"])
    shown = service.predict("threshold", rows)
    for threshold in (0.0, 0.2, 0.9, 1.0):
        told = service.predict("threshold", rows, threshold=threshold)
        expected = [shown["classes"][int(p[1] >= threshold)] for p in shown["probabilities"]]
        assert (told["predictions"], told["threshold"]) == (expected, threshold)
    service.fit(numeric(seed=22, classes=3), "threshold-3")
    refused = service.ask("threshold-3", rows, threshold=0.5)
    check_problem(refused, 422, "invalid_request", "threshold", "3")


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
