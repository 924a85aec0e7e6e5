"""Contexts in fewer bytes: as large as estimated, as near as stated, and chosen by a rule."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tabicl import TabICLClassifier, TabICLRegressor

from common.admission import settle
from common.errors import VerificationFailed
from common.models.protocol import PredictOptions
from common.models.registry import Registry, validate_options
from common.models.tabicl.adapter import TOLERANCES
from common.models.tabicl.precision import CHANNELS, POSITIONS, Layers, restored, scales, stored
from common.settings import Settings
from tests.support import mixed, numeric
from tests.unit import fitting

ONE_ROW = PredictOptions()
KINDS: dict[str, tuple[pa.Table, str]] = {
    "numeric": (numeric(), "y"),
    "mixed": (mixed().drop_columns(["z"]), "y"),
    "mixed regression": (mixed().drop_columns(["y"]), "z"),
    "one feature": (numeric().select(["c0", "y"]), "y"),
    "two rows": (
        numeric(rows=2, columns=3).drop_columns(["y"]).append_column("y", pa.array(["a", "b"])),
        "y",
    ),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def library(table: Any, cache: str) -> Any:
    """The library's own estimator with its own module and this kind of cache."""
    task = table.target.task
    cls = TabICLClassifier if task == "classification" else TabICLRegressor
    weights = Registry(Settings()).weights(fitting.MODEL, task)
    estimator = cls(
        kv_cache=cache, device="cpu", random_state=42, model_path=weights.path, allow_auto_download=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return estimator.fit(table.features.to_frame(), table.y)


def answers(predictor: Any, rows: Any) -> Any:
    prediction = predictor.predict(rows, ONE_ROW)
    return prediction.mean if prediction.probabilities is None else prediction.probabilities


@pytest.mark.parametrize("kind", KINDS)
def test_a_context_of_representations_answers_as_the_library_bit_for_bit(kind: str, tmp_path: Path) -> None:
    table, target = KINDS[kind]
    training = fitting.training(table, target, "regression" if target == "z" else "classification")
    fitted = fitting.fit(training, tmp_path, cache="repr")
    oracle = library(training, "repr")
    ask = oracle.predict if target == "z" else oracle.predict_proba
    for size in (1, 2, 3, 4, 5, 20, 64):
        rows = training.features.take(slice(0, size))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = ask(rows.to_frame())
        assert np.array_equal(answers(fitted.predictor, rows), expected), f"{size} rows"
    assert fitted.largest_difference == 0.0
    assert fitted.manifest.cache == "repr"


@pytest.mark.parametrize("cache", ["kv", "repr"])
@pytest.mark.parametrize("precision", ["fp16", "int8"])
@pytest.mark.parametrize("kind", ["mixed", "mixed regression"])
def test_fewer_bytes_answer_within_the_stated_tolerance(
    kind: str, precision: str, cache: str, tmp_path: Path
) -> None:
    table, target = KINDS[kind]
    training = fitting.training(table, target, "regression" if target == "z" else "classification")
    native = fitting.fit(training, tmp_path / "native")
    fewer = fitting.fit(training, tmp_path / "fewer", precision=precision, cache=cache)
    unit = 1.0 if target == "y" else float(np.std(training.y))
    difference = (
        np.abs(
            answers(native.predictor, training.features) - answers(fewer.predictor, training.features)
        ).max()
        / unit
    )
    assert 0 < fewer.largest_difference <= difference <= TOLERANCES[precision]
    assert (fewer.manifest.precision, fewer.manifest.cache) == (precision, cache)


def test_a_context_that_answers_beyond_its_tolerance_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = fitting.training(mixed().drop_columns(["z"]))
    monkeypatch.setitem(TOLERANCES, "int8", 1e-9)
    with pytest.raises(VerificationFailed, match="differently"):
        fitting.fit(training, tmp_path, precision="int8")


@pytest.mark.parametrize("axis", [POSITIONS, CHANNELS])
def test_int8_rounds_each_number_by_half_a_scale_at_most(axis: int) -> None:
    values = torch.randn(3, 2, 50, 8, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 8)
    values[0, 0] = 0.0
    scale = scales(values, axis)
    again = restored(stored(values, "int8", axis), scale, "cpu")
    assert bool(((again - values).abs() <= scale / 2 * 1.001).all())
    assert again[0, 0].count_nonzero() == 0
    half = restored(stored(values, "fp16", axis), None, "cpu")
    assert bool(((half - values).abs() <= values.abs() * 2**-11 + 2**-25).all())


@pytest.mark.parametrize("cache", ["kv", "repr"])
@pytest.mark.parametrize("precision", ["native", "fp16", "int8"])
@pytest.mark.parametrize(("rows", "columns", "classes"), [(90, 6, 3), (40, 2, 2), (60, 17, 10)])
def test_estimated_bytes_are_those_of_the_tensors(
    rows: int, columns: int, classes: int, precision: str, cache: str
) -> None:
    training = fitting.training(numeric(rows=rows, columns=columns, classes=classes))
    options = {"n_estimators": 4, "seed": 42, "precision": precision, "cache": cache}
    weights = fitting.backbone("classification")
    frozen = fitting.adapter().freeze(fitting.adapter().fit(training, weights, options, lambda _: None))
    sizes = Registry(Settings()).spec(fitting.MODEL).sizes
    assert sizes is not None
    members = {**options, "n_estimators": _members(frozen)}
    assert sum(t.nbytes for t in frozen.tensors) == sizes.context_bytes(rows, columns, classes, members)


def _members(frozen: Any) -> int:
    """Few columns have fewer different shuffles than members were asked for."""
    return int(next(t for t in frozen.tensors if t.name == "pre.features").shape[0])


def test_regression_s_estimated_bytes_are_those_of_the_tensors() -> None:
    table = numeric(columns=7)
    target = pa.array([float(i) for i in range(table.num_rows)])
    training = fitting.training(table.drop_columns(["y"]).append_column("z", target), "z", "regression")
    options = {"n_estimators": 8, "seed": 42, "precision": "native", "cache": "kv"}
    weights = fitting.backbone("regression")
    frozen = fitting.adapter().freeze(fitting.adapter().fit(training, weights, options, lambda _: None))
    sizes = Registry(Settings()).spec(fitting.MODEL).sizes
    assert sizes is not None
    assert sum(t.nbytes for t in frozen.tensors) == sizes.context_bytes(training.features.rows, 7, 0, options)


def test_a_layer_is_restored_when_it_is_asked_for_and_not_before() -> None:
    tensors = {}
    for block in range(6):
        for half in "kv":
            values = torch.randn(2, 4, 256, 32)
            tensors[f"icl.{block}.{half}"] = stored(values, "int8", POSITIONS)
            tensors[f"icl.{block}.{half}.scale"] = scales(values, POSITIONS)
    layers = Layers(tensors, "icl", 6, slice(0, 1), "cpu")
    seen = [layers[block].key.data_ptr() for block in range(6)]
    assert layers[3].key.dtype == torch.float32
    assert layers[3].key.shape == (1, 4, 256, 32)
    assert len(set(seen)) < 6  # freed memory is used again


def settled(
    rows: int, columns: int, *, model: str = "tabicl-v2", tmp_path: Path, options: Any = None, **room: int
) -> tuple[str, str]:
    settings = Settings(data_dir=tmp_path, **room)
    spec = Registry(settings).spec(model)
    asked = validate_options(spec, options)
    chosen = settle(spec, asked, rows=rows, columns=columns, classes=2, settings=settings)
    assert {name: chosen[name] for name in ("n_estimators", "seed")} == {"n_estimators": 8, "seed": 42}
    return chosen["precision"], chosen["cache"]


def test_auto_gives_up_precision_for_room_and_keys_and_values_last(tmp_path: Path) -> None:
    room = {"tmp_path": tmp_path, "device_budget_bytes": 4 * 2**30, "disk_budget_bytes": 40 * 2**30}
    assert settled(1_000, 20, **room) == ("native", "kv")
    assert settled(8_000, 20, **room) == ("fp16", "kv")
    assert settled(16_000, 20, **room) == ("int8", "kv")
    assert settled(24_000, 20, **room) == ("int8", "kv")  # more than half of the device
    assert settled(100_000, 20, **room) == ("native", "repr")
    assert settled(100_000, 20, **{**room, "disk_budget_bytes": 2 * 2**30}) == ("fp16", "repr")
    assert settled(100_000, 20, **{**room, "disk_budget_bytes": 2**20}) == ("int8", "repr")


def test_what_a_fit_asks_for_is_never_changed(tmp_path: Path) -> None:
    small = {"tmp_path": tmp_path, "device_budget_bytes": 2**20, "disk_budget_bytes": 2**20}
    assert settled(5_000, 20, options={"precision": "native", "cache": "kv"}, **small) == ("native", "kv")
    assert settled(5_000, 20, options={"precision": "fp16"}, **small) == ("fp16", "repr")
    assert settled(5_000, 20, options={"cache": "kv"}, **small) == ("int8", "kv")
