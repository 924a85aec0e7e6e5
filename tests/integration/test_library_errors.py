"""Every input that TabICL stumbles over: used by a documented rule, or a 422 that names the column; never a 500."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.support import ARROW, Service, as_parquet, check_problem

pytestmark = pytest.mark.integration

JSON = {"content-type": "application/json"}
ROWS = 24
NUMBERS = [round(float(np.sin(i)), 3) for i in range(ROWS)]
LABELS = ["no", "yes"] * (ROWS // 2)
AMOUNTS = [float(i % 7) + 0.5 for i in range(ROWS)]


def table(y: Any = None, **columns: Any) -> pa.Table:
    return pa.table({**(columns or {"a": NUMBERS}), "y": LABELS if y is None else y})


USED: dict[str, tuple[pa.Table, str]] = {
    "missing cells and a row of nothing else": (
        table(a=[None, *NUMBERS[1:]], b=[None, None, *NUMBERS[2:]]),
        "classification",
    ),
    "a column without values": (table(a=NUMBERS, empty=pa.nulls(ROWS)), "classification"),
    "numbers as text": (table(a=[str(n) for n in NUMBERS]), "classification"),
    "two rows": (table().slice(0, 2), "classification"),
    "one row": (table().slice(0, 1), "classification"),
    "one row of a regression": (table(AMOUNTS).slice(0, 1), "regression"),
    "values up to 1e300": (table(a=[1e39, 1e300, *NUMBERS[2:]]), "classification"),
    "a constant column": (table(a=NUMBERS, k=[7] * ROWS), "classification"),
    "nothing but constant columns": (table(k=[7] * ROWS, l=["x"] * ROWS), "classification"),
    "one class": (table(["only"] * ROWS), "classification"),
    "a constant target": (table([3.5] * ROWS), "regression"),
    "nothing but booleans": (table(flag=[label == "yes" for label in LABELS]), "classification"),
    "nothing but dates": (
        table(day=[dt.date(2024, 1, 1) + dt.timedelta(days=i) for i in range(ROWS)]),
        "classification",
    ),
    "durations": (table(span=[dt.timedelta(minutes=i) for i in range(ROWS)]), "classification"),
    "text with gaps": (table(t=pa.array(["x", None] * (ROWS // 2))), "classification"),
}


@pytest.mark.parametrize("kind", USED)
def test_what_can_be_used_answers(service: Service, kind: str) -> None:
    training, task = USED[kind]
    dataset = "used-" + kind.replace(" ", "-")
    job = service.fit(training, dataset, task=task)
    used = training.column_names[:-1]
    assert [column["name"] for column in job["schema"]["columns"]] == used
    answer = service.predict(dataset, training.drop_columns(["y"]))
    values = answer["probabilities"] if task == "classification" else [[v] for v in answer["mean"]]
    assert np.isfinite(values).all()
    assert len(values) == training.num_rows


def test_booleans_dates_and_durations_change_the_answer(service: Service) -> None:
    """The library drops such columns of a frame without a word."""
    for kind, column in [
        ("nothing but booleans", "flag"),
        ("nothing but dates", "day"),
        ("durations", "span"),
    ]:
        training, task = USED[kind]
        dataset = "used-" + kind.replace(" ", "-")
        service.fit(training, dataset, task=task)
        first, *others = service.predict(dataset, training.select([column]))["probabilities"]
        assert any(other != first for other in others), kind


def inline(y: Any = None, **more: Any) -> dict[str, Any]:
    rows = [list(pair) for pair in zip(NUMBERS, LABELS if y is None else y, strict=True)]
    return {"dataset": "unusable", "target": "y", "columns": ["a", "y"], "rows": rows, **more}


def with_first(value: Any, rest: Any) -> list[Any]:
    return [value, *list(rest)[1:]]


REFUSED: dict[str, tuple[Any, str, str | None, str]] = {
    "infinity": (table(a=with_first(float("inf"), NUMBERS)), "invalid_table", "a", "row 1"),
    "no rows": (inline(rows=[]), "invalid_table", None, "no rows"),
    "no columns": (inline(columns=[], rows=[[]] * ROWS), "invalid_table", None, "no columns"),
    "no feature": (table().select(["y"]), "invalid_table", None, "no feature"),
    "rows that are no lists": (inline(rows=NUMBERS), "invalid_table", "rows[0]", "list"),
    "a row that is too short": (inline(rows=[[1, "no"], [2]]), "invalid_table", "rows[1]", "1 cells"),
    "words and numbers": (inline(columns=["a", "y"], rows=[[1, "no"], ["x", "yes"]]), "invalid_table", "a", "mixes"),
    "a list in a cell": (inline(rows=[[[1, 2], "no"], [[3, 4], "yes"]]), "invalid_table", "a", "lists"),
    "complex numbers as structs": (
        table(c=[{"re": 1.0, "im": 2.0}] * ROWS), "invalid_table", "c", "struct",
    ),
    "eleven classes": (table([f"k{i % 11}" for i in range(ROWS)]), "invalid_target", "y", "10"),
    "quantities as classes": (inline([i + 0.5 for i in range(ROWS)], task="classification"), "invalid_target", "y", "regression"),
    "a label that is NaN": (table(with_first(float("nan"), AMOUNTS)), "invalid_target", "y", "row 1"),
    "a label that is missing": (inline(with_first(None, LABELS)), "invalid_target", "y", "row 1"),
    "labels of two types": (inline(with_first(1, LABELS)), "invalid_table", "y", "mixes"),
    "two values in a label": (inline([[1, 2]] * ROWS), "invalid_table", "y", "lists"),
    "an infinite label": (table(with_first(float("inf"), AMOUNTS)), "invalid_target", "y", "row 1"),
    "a missing amount": (table(with_first(None, AMOUNTS)), "invalid_target", "y", "row 1"),
    "words as amounts": (inline(task="regression"), "invalid_target", "y", "classification"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_can_not_be_used_is_a_422_that_names_the_column(service: Service, kind: str) -> None:
    content, code, field, says = REFUSED[kind]
    if isinstance(content, pa.Table):
        response = service.submit(content, "unusable")
    else:
        response = service.http.post("/v1/fits", content=json.dumps(content), headers=JSON)
    check_problem(response, 422, code, field, says)
    assert service.http.get("/v1/datasets/unusable").status_code == 404


def test_a_target_beyond_the_model_s_numbers_fails_in_words(service: Service) -> None:
    response = service.submit(table(with_first(1e39, AMOUNTS)), "unusable-scale", task="regression")
    job = service.end_of(response.json()["id"])
    assert (job["state"], job["error"]["code"]) == ("failed", "invalid_target")
    assert [fault["field"] for fault in job["error"]["errors"]] == ["y"]


@pytest.fixture(scope="module")
def asked(service: Service) -> Service:
    words = [["red", "blue", "green"][i % 3] for i in range(ROWS)]
    service.fit(table(a=NUMBERS, t=words), "asked")
    service.fit(table(AMOUNTS, a=NUMBERS, t=words), "asked-amount", task="regression")
    return service


def rows(**columns: Any) -> pa.Table:
    return pa.table({"a": NUMBERS[:3], "t": ["red", "blue", "green"], **columns})


ASKED: dict[str, tuple[pa.Table | dict[str, Any], dict[str, Any], str | None, str]] = {
    "infinity": (rows(a=[1.0, float("-inf"), 0.0]), {}, "a", "row 2"),
    "words in a number column": (rows(a=["1", "two", "3"]), {}, "a", "row 2"),
    "a column too few": (rows().drop_columns(["t"]), {}, "t", "missing"),
    "dates in a number column": (rows(a=[dt.date(2024, 1, 1)] * 3), {}, "a", "dates"),
    "no rows": ({"columns": ["a", "t"], "rows": []}, {}, None, "no rows"),
    "rows that are no lists": ({"columns": ["a", "t"], "rows": [1, 2]}, {}, "rows[0]", "list"),
    "rows without names": ({"rows": [[1, "red"]]}, {}, "columns", "missing"),
    "a list in a cell": ({"columns": ["a", "t"], "rows": [[[1], "red"]]}, {}, "a", "lists"),
    "an output that is none": (rows(), {"output": "everything"}, "output", "median"),
    "a level of one": (rows(), {"quantiles": "0.5,1"}, "quantiles", "below 1"),
    "a level below none": (rows(), {"quantiles": "-0.1"}, "quantiles", "above 0"),
    "a variance": (rows(), {"output": "variance"}, "output", "not right"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ASKED)
def test_rows_that_can_not_be_used_are_a_422_that_names_the_column(asked: Service, kind: str) -> None:
    content, query, field, says = ASKED[kind]
    response = asked.ask("asked-amount", content, **query)
    assert response.status_code == 422, response.text
    check_problem(response, 422, response.json()["code"], field, says)
    if not query:
        assert asked.ask("asked", content).status_code == 422


def test_rows_that_the_library_would_refuse_or_warn_of_are_answered(asked: Service) -> None:
    expected = asked.predict("asked", rows())["probabilities"]
    turned = rows(extra=[1, 2, 3]).select(["extra", "t", "a"])
    assert asked.predict("asked", turned)["probabilities"] == expected
    assert asked.predict("asked", rows(a=[str(n) for n in NUMBERS[:3]]))["probabilities"] == expected
    unseen = asked.predict("asked", rows(t=["never", None, "?"]))["probabilities"]
    gaps = asked.predict("asked", rows(t=pa.array([None] * 3, pa.string())))["probabilities"]
    assert unseen == gaps
    nothing = asked.predict("asked", rows(a=pa.nulls(3), t=pa.nulls(3)))
    assert np.isfinite(nothing["probabilities"]).all()


def test_a_complex_or_empty_arrow_body_is_refused_in_words(asked: Service) -> None:
    path = "/v1/datasets/asked/predict"
    empty = as_parquet(rows().slice(0, 0))
    parquet = {"content-type": "application/vnd.apache.parquet"}
    check_problem(asked.http.post(path, content=empty, headers=parquet), 422, "invalid_table", says="no rows")
    check_problem(asked.http.post(path, content=b"", headers={"content-type": ARROW}), 422, "invalid_request")
