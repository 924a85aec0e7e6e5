"""The three members of a one-shot: every form, every fault by the name of its member."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import Invalid, InvalidRequest, InvalidRows, InvalidTable, InvalidTarget, TooLarge
from common.tables.one_shot import OneShotLimits, read_one_shot

LIMITS = OneShotLimits(max_rows=12, max_columns=3, max_cells=30)
ROWS = [[1, "x"], [2, "y"], [3, None]]
RECORDS = [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}, {"a": 3, "b": None}]


def body(**changes: Any) -> dict[str, Any]:
    return {
        "train_features": ROWS,
        "train_labels": ["no", "yes", "no"],
        "eval_features": [[2, "x"]],
        "columns": ["a", "b"],
        **changes,
    }


@pytest.mark.parametrize(
    "features",
    [
        ROWS,
        RECORDS,
        {"a": [1, 2, 3], "b": ["x", "y", None]},
        {"columns": ["a", "b"], "rows": ROWS},
        {"records": RECORDS},
    ],
    ids=["rows", "records", "columns", "table", "record-table"],
)
def test_every_form_makes_the_same_table(features: Any) -> None:
    read = read_one_shot(body(train_features=features), None, LIMITS)
    expected = read_one_shot(body(), None, LIMITS)
    assert read.train.equals(expected.train)
    assert read.train.column_names == ["a", "b", "train_labels"]
    assert read.schema == expected.schema
    assert read.total_rows == 4


def test_rows_without_names_match_by_place() -> None:
    read = read_one_shot(body(columns=None), None, LIMITS)
    assert read.schema.feature_names == ("0", "1")


@pytest.mark.parametrize(
    ("labels", "task", "classes"),
    [
        (["no", "yes", "no"], "classification", ("no", "yes")),
        ([3, 7, 3], "classification", (3, 7)),
        ([True, False, True], "classification", (False, True)),
        (["2024-01-01", "2024-01-02", "2024-01-01"], "classification", ("2024-01-01", "2024-01-02")),
        ([0.5, 1.25, 2.5], "regression", ()),
    ],
)
def test_labels_of_every_type_keep_it(labels: list[Any], task: str, classes: tuple[Any, ...]) -> None:
    target = read_one_shot(body(train_labels=labels), None, LIMITS).target
    assert (target.task, target.classes) == (task, classes)
    assert [type(label) for label in target.classes] == [type(label) for label in classes]


def test_a_feature_may_be_called_as_the_labels_are() -> None:
    read = read_one_shot(body(columns=["train_labels", "b"]), None, LIMITS)
    assert read.schema.feature_names == ("train_labels", "b")
    assert read.train.column(2).to_pylist() == ["no", "yes", "no"]


@pytest.mark.parametrize(
    ("changes", "error", "member"),
    [
        ({"train_features": None}, InvalidRequest, "train_features"),
        ({"train_labels": None}, InvalidRequest, "train_labels"),
        ({"eval_features": None}, InvalidRequest, "eval_features"),
        ({"train_labels": "no"}, InvalidRequest, "train_labels"),
        ({"train_labels": ["no", "yes"]}, InvalidRequest, "train_labels"),
        ({"train_labels": ["no", None, "yes"]}, InvalidTarget, "train_labels"),
        ({"train_labels": ["no", 1, "yes"]}, InvalidTable, "train_labels"),
        ({"train_features": 3}, InvalidRequest, "train_features"),
        ({"train_features": []}, InvalidTable, "train_features"),
        ({"train_features": {}}, InvalidTable, "train_features"),
        ({"train_features": {"a": [1], "b": ["x", "y"]}}, InvalidRequest, "train_features"),
        ({"train_features": {"a": 1}}, InvalidRequest, "train_features"),
        ({"train_features": [[1, "x"], [2], [3, "y"]]}, InvalidTable, "train_features"),
        ({"eval_features": [[2]]}, InvalidTable, "eval_features"),
        ({"eval_features": []}, InvalidTable, "eval_features"),
        ({"eval_features": [{"a": 2}]}, InvalidRows, "eval_features"),
        ({"eval_features": [["text", "x"]]}, InvalidRows, "eval_features"),
        ({"train_features": ROWS * 5}, InvalidRequest, "train_features"),
        ({"eval_features": [[2, "x"]] * 10}, InvalidRequest, "train_features"),
        (
            {"columns": list("abcd"), "train_features": [[1, 2, 3, 4]] * 3, "eval_features": [[1, 2, 3, 4]]},
            InvalidRequest,
            "train_features",
        ),
    ],
)
def test_a_fault_names_its_member(changes: dict[str, Any], error: type[Invalid], member: str) -> None:
    with pytest.raises(error) as caught:
        read_one_shot(body(**changes), None, LIMITS)
    assert member in [fault.field for fault in caught.value.errors]


def test_too_many_cells_are_too_large() -> None:
    columns = {"a": [1.0] * 10, "b": [2.0] * 10, "c": [3.0] * 10}
    changes = {"train_features": columns, "train_labels": [0, 1] * 5, "eval_features": [[1.0, 2.0, 3.0]]}
    with pytest.raises(TooLarge) as caught:
        read_one_shot(body(**changes, columns=["a", "b", "c"]), None, LIMITS)
    assert caught.value.facts == {"what": "cells", "limit": 30, "size": 33}
