"""Whatever tabpfn 9.2.0 stumbles over is refused by us in words that name the column, or answered; faults stay faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from common.errors import (
    Invalid,
    InvalidRequest,
    InvalidRows,
    InvalidTable,
    InvalidTarget,
    ModelNotReady,
    TabrelayError,
    TooLarge,
)
from common.models.protocol import PredictOptions, TrainingTable
from common.models.registry import Registry, validate_options
from common.models.tabpfn import fit as fitting_module
from common.models.tabpfn.adapter import ADAPTER
from common.settings import Settings
from common.tables.features import Features
from tests.models import fitting
from tests.support import numeric
from tests.unit.fitting import training


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def fitted(folder: Path) -> fitting.Fitted:
    weights = fitting.weights(folder, "v2", "classification")
    return fitting.fit(folder / "data", weights, fitting.table("classification", "mixed"))


def fit(folder: Path, table: TrainingTable, version: str = "v2", **options: int) -> Any:
    backbone = ADAPTER.load(fitting.weights(folder, version, table.target.task), "cpu")
    return ADAPTER.fit(table, backbone, fitting.OPTIONS | options, lambda fraction: None)


def classes(table: pa.Table) -> TrainingTable:
    return training(table, "y", "classification")


def with_column(values: list[Any], name: str = "c2", rows: int = 40) -> TrainingTable:
    return classes(numeric(rows=rows).set_column(2, name, pa.array(values)))


def with_cells(values: np.ndarray[Any, Any]) -> TrainingTable:
    """As if the schema had let these numbers through."""
    table = classes(numeric(rows=len(values)))
    features = table.features
    changed = Features(features.names, (*features.values[:2], values, *features.values[3:]), len(values))
    return replace(table, features=changed)


def with_target(values: list[Any]) -> TrainingTable:
    table = numeric(rows=len(values)).drop_columns(["y"]).append_column("z", pa.array(values))
    return training(table, "z", "regression")


def short_target() -> TrainingTable:
    table = classes(numeric(rows=40))
    return replace(table, y=table.y[:-1])


def without_features() -> TrainingTable:
    return replace(classes(numeric(rows=40)), features=Features((), (), 40))


REFUSED_FITS: dict[str, tuple[Callable[[], TrainingTable], type[TabrelayError], str | None, str]] = {
    "infinity": (lambda: with_column([np.inf] + [1.0] * 39), InvalidTable, "c2", "infinite"),
    "infinity behind the schema": (lambda: with_cells(np.full(40, np.inf)), InvalidTable, "c2", "infinity"),
    "beyond float32": (lambda: with_cells(np.linspace(1, 1e300, 40)), InvalidTable, "c2", "rescale"),
    "a label missing": (
        lambda: classes(numeric(rows=40).set_column(6, "y", pa.array(["a", None] * 20))), InvalidTarget, "y", "no label",
    ),
    "fractions as classes": (
        lambda: classes(numeric(rows=40).set_column(6, "y", pa.array([i + 0.5 for i in range(40)]))),
        InvalidTarget, "y", "regression",
    ),
    "eleven classes": (lambda: classes(numeric(rows=60, classes=11)), InvalidTarget, "y", "10 is the most"),
    "one row": (lambda: classes(numeric(rows=1)), InvalidTable, None, "two rows"),
    "no features": (without_features, InvalidTable, None, "one feature"),
    "fewer labels than rows": (short_target, InvalidTarget, None, "39 labels for 40 rows"),
    "all columns constant": (
        lambda: classes(pa.table({"a": [1.0] * 40, "b": ["x"] * 40, "y": ["p", "q"] * 20})), InvalidTable, "b", "one value",
    ),
    "text as numbers": (lambda: with_target(["1", "2"] * 20), InvalidTarget, "z", "not a number"),
    "an infinite number to learn": (lambda: with_target([np.inf] + [1.0] * 39), InvalidTarget, "z", "infinite"),
    "numbers to learn beyond float32": (lambda: with_target([1e300] + [1.0] * 39), InvalidTarget, "z", "rescale"),
    "no number to learn": (lambda: with_target([None] + [1.0] * 39), InvalidTarget, "z", "no label"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED_FITS)
def test_a_fit_that_the_library_stumbles_over_is_refused_by_name(kind: str, folder: Path) -> None:
    make, error, field, says = REFUSED_FITS[kind]
    with pytest.raises(error, match=says) as refused:
        fit(folder, make())
    assert refused.value.status == 422
    if field is not None:
        assert field in [fault.field for fault in refused.value.errors]


ACCEPTED_FITS: dict[str, Callable[[], TrainingTable]] = {
    "gaps": lambda: with_column([None, 1.0] * 20),
    "an empty column": lambda: with_column([None] * 39 + [None]),
    "a constant column": lambda: with_column([7.0] * 40),
    "one class": lambda: classes(numeric(rows=40).set_column(6, "y", pa.array(["a"] * 40))),
    "a class seen once": lambda: classes(numeric(rows=40).set_column(6, "y", pa.array(["a"] * 39 + ["b"]))),
    "two rows": lambda: classes(pa.table({"a": [1.0, 2.0], "y": ["p", "q"]})),
    "text that spells numbers": lambda: with_column([f"{i}e3" for i in range(40)]),
    "dates": lambda: with_column([date(2024, 1, 1) + timedelta(days=i) for i in range(40)]),
    "booleans": lambda: with_column([True, False] * 20),
    "whole numbers beyond 2^53": lambda: with_column([2**60 + i for i in range(40)]),
    "a constant number to learn": lambda: with_target([2.0] * 40),
    "numbers of 1e37": lambda: with_cells(np.linspace(-1e37, 1e37, 40)),
    "numbers to learn of 1e37": lambda: with_target(np.linspace(1, 1e37, 40).tolist()),
}


@pytest.mark.parametrize("kind", ACCEPTED_FITS)
@pytest.mark.parametrize("version", ["v2", "v3.5"])
def test_odd_tables_are_fitted_and_answered(kind: str, version: str, folder: Path, tmp_path: Path) -> None:
    table = ACCEPTED_FITS[kind]()
    weights = fitting.weights(folder, version, table.target.task)
    each = fitting.fit(tmp_path, weights, table, n_estimators=2)
    for values in fitting.arrays(each.predictor.predict(table.features, PredictOptions())):
        assert np.isfinite(values).all()


def test_more_rows_than_the_library_lets_a_cpu_take_are_fitted(folder: Path) -> None:
    assert (
        fit(folder, classes(numeric(rows=1100, columns=3)), n_estimators=1).estimator.n_train_samples_ == 1100
    )


def test_more_rows_or_columns_than_the_weights_take_are_413_with_the_numbers(folder: Path) -> None:
    table = classes(numeric(rows=2, columns=3))
    rows = Features(table.features.names, (np.zeros(10_001),) * 3, 10_001)
    with pytest.raises(TooLarge, match=r"10,001 rows; 10,000") as refused:
        fit(folder, replace(table, features=rows, y=np.zeros(10_001, dtype=np.int64)))
    assert (refused.value.facts["limit"], refused.value.facts["size"]) == (10_000, 10_001)
    wide = Features(tuple(f"c{i}" for i in range(501)), (np.arange(2.0),) * 501, 2)
    with pytest.raises(TooLarge, match="501 features; 500"):
        fit(folder, replace(table, features=wide))


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (torch.OutOfMemoryError("out of memory"), TooLarge),
        (MemoryError(), TooLarge),
        (ValueError("of the library"), InvalidTable),
        (TypeError("of the library"), InvalidTable),
        (AssertionError(), InvalidTable),
        (ZeroDivisionError(), InvalidTable),
        (fitting_module.ArpackError(-9), InvalidTable),
        (RuntimeError("CUDA error: device-side assert triggered"), RuntimeError),
    ],
)
def test_what_the_library_raises_is_the_table_s_fault_and_a_device_s_is_not(
    raised: Exception, expected: type[Exception], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr(fitting_module.TabPFNClassifier, "fit", stumble)
    with pytest.raises(expected) as refused:
        fit(folder, with_cells(np.linspace(1, 1e30, 40)))
    if expected is InvalidTable:
        assert [fault.field for fault in refused.value.errors] == ["c2"]  # type: ignore[attr-defined]
    assert isinstance(refused.value, TabrelayError) is (expected is not RuntimeError)


def test_no_members_or_an_unknown_option_is_refused_before_the_library_sees_it(tmp_path: Path) -> None:
    spec = Registry(Settings(data_dir=tmp_path)).spec("tabpfn-v2")
    for given in ({"n_estimators": 0}, {"FINGERPRINT_FEATURE": 0}):
        with pytest.raises(InvalidRequest):
            validate_options(spec, given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_a_device_that_is_not_there_is_a_503_in_words(folder: Path) -> None:
    with pytest.raises(ModelNotReady, match="'cuda:0' can't be used"):
        ADAPTER.load(fitting.weights(folder, "v2", "classification"), "cuda:0")


def ask(fitted: fitting.Fitted, **changes: Any) -> Any:
    from tests.support import mixed

    rows = mixed(rows=3, seed=8).drop_columns(["y", "z"])
    for name, values in changes.items():
        if values is None:
            rows = rows.drop_columns([name])
        elif name in rows.column_names:
            rows = rows.set_column(rows.column_names.index(name), name, pa.array(values))
        else:
            rows = rows.append_column(name, pa.array(values))
    return fitted.predictor.predict(fitted.table.schema.features(rows), PredictOptions()).probabilities


REFUSED_ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "infinity": ({"amount": [np.inf, 1.0, 2.0]}, "amount", "infinite"),
    "a number beyond float32": ({"amount": [1e300, 1.0, 2.0]}, "amount", "rescale"),
    "a missing column": ({"plan": None}, "plan", "missing"),
    "text in a column of numbers": ({"amount": ["1", "oops", "2"]}, "amount", "oops"),
    "text that is no date": ({"since": ["2024-01-01", "soon", "2024-01-02"]}, "since", "soon"),
}


@pytest.mark.parametrize("kind", REFUSED_ROWS)
def test_rows_that_the_library_stumbles_over_are_refused_by_name(kind: str, fitted: fitting.Fitted) -> None:
    changes, field, says = REFUSED_ROWS[kind]
    with pytest.raises(InvalidRows, match=says) as refused:
        ask(fitted, **changes)
    assert field in [fault.field for fault in refused.value.errors]


ACCEPTED_ROWS: dict[str, dict[str, Any]] = {
    "an unseen category": {"plan": ["never", "pro", None]},
    "only gaps": {"amount": [None] * 3, "plan": [None] * 3, "count": [None] * 3},
    "numbers as text": {"amount": ["1", "2.5", None]},
    "an extra column": {"more": [{"a": 1}] * 3},
    "numbers in a text column": {"plan": [1, 2, 3]},
}


@pytest.mark.parametrize("kind", ACCEPTED_ROWS)
def test_odd_rows_are_answered(kind: str, fitted: fitting.Fitted) -> None:
    answer = ask(fitted, **ACCEPTED_ROWS[kind])
    np.testing.assert_allclose(answer.sum(axis=1), 1, atol=1e-6)


def test_a_device_short_of_memory_at_a_predict_says_so(
    fitted: fitting.Fitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    estimator = fitted.predictor._estimator  # type: ignore[attr-defined]
    monkeypatch.setattr(estimator.executor_, "_call_model", short)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        ask(fitted)


def test_every_refusal_is_one_that_clients_know() -> None:
    assert {InvalidTable.status, InvalidTarget.status, InvalidRows.status, Invalid.status} == {422}
    assert (TooLarge.status, ModelNotReady.status) == (413, 503)
