"""A TabPFN context answers as the library does, for every kind of table, and only with what it was made with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
import torch

from common.errors import (
    Cancelled,
    ContextIncompatible,
    InternalError,
    InvalidRequest,
    InvalidRows,
    ModelNotReady,
)
from common.models.protocol import PredictOptions
from common.models.tabpfn import state as states
from common.models.tabpfn.adapter import ADAPTER
from common.models.tabpfn.codec import Encoder
from common.models.tabpfn.inputs import clean
from common.models.tabpfn.rows import BLOCK
from common.tables.features import Features
from tests.models import checkpoints, fitting
from tests.support import mixed, numeric
from tests.unit.fitting import training

N = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def column(name: str, values: Any) -> pa.Table:
    return numeric(rows=N).append_column(name, pa.array(values))


LABELS = numeric(rows=N).column("y")
TABLES: dict[str, pa.Table] = {
    "a text column of numbers": column("zip", [f"0{i % 7}" for i in range(N)]),
    "a text column of many values": column("name", [f"n{i}" for i in range(N)]),
    "many values with gaps": column("name", [None if i % 9 == 0 else f"n{i}" for i in range(N)]),
    "few numbers": column("count", [float(i % 3) for i in range(N)]),
    "few numbers with gaps": column("count", [None if i % 9 == 0 else float(i % 3) for i in range(N)]),
    "a constant column": column("k", [3.0] * N),
    "a constant text": column("k", ["same"] * N),
    "an empty column": column("e", pa.nulls(N, pa.float64())),
    "only text": pa.table({"plan": ["abc"[i % 3] for i in range(N)], "y": LABELS}),
    "one feature": numeric(rows=N).select(["c0", "y"]),
    "two rows": pa.table({"a": [1.0, 2.0], "b": [0.5, 0.1], "y": ["no", "yes"]}),
    "one class": numeric(rows=N).drop_columns(["y"]).append_column("y", pa.array(["a"] * N)),
    "ten classes": numeric(rows=N, classes=10),
    "duplicate rows": pa.concat_tables([numeric(rows=30)] * 4),
}


def strange(features: Features) -> Features:
    """Training rows, then a row of gaps, one of texts and numbers never seen, and one of huge numbers."""

    def cells(values: Any) -> Any:
        if isinstance(values, np.ndarray):
            return np.concatenate([values[:20], [np.nan, 0.123456, 1e30]])
        return pa.array([*values[:20].to_pylist(), None, "never seen", "__MISSING__"], pa.string())

    return Features(features.names, tuple(map(cells, features.values)), min(features.rows, 20) + 3)


@pytest.mark.parametrize("name", TABLES)
def test_a_context_answers_as_the_library_bit_for_bit(name: str, folder: Path, tmp_path: Path) -> None:
    table = training(TABLES[name], "y", "classification")
    fitted = fitting.fit(tmp_path, fitting.weights(folder, "v2", "classification"), table)
    rows = table.features.take(slice(0, BLOCK))
    answer = fitted.predictor.predict(rows, PredictOptions()).probabilities
    assert answer is not None
    assert np.array_equal(answer, fitted.state.predict(rows).probabilities)
    assert answer.shape == (rows.rows, len(table.target.classes))
    np.testing.assert_allclose(answer.sum(axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("name", TABLES)
def test_cells_become_the_numbers_that_the_library_makes_of_them(name: str, folder: Path) -> None:
    table = training(TABLES[name], "y", "classification")
    backbone = ADAPTER.load(fitting.weights(folder, "v2", "classification"), "cpu")
    fitted = ADAPTER.fit(table, backbone, fitting.OPTIONS, lambda fraction: None)
    asked = strange(table.features)
    found, expected = fitted.inputs(asked), clean(fitted.estimator, asked)
    assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("version", ["v2", "v3.5"])
def test_a_constant_target_is_answered(version: str, folder: Path, tmp_path: Path) -> None:
    table = training(
        numeric(rows=40).drop_columns(["y"]).append_column("z", pa.array([2.5] * 40)), "z", "regression"
    )
    fitted = fitting.fit(tmp_path, fitting.weights(folder, version, "regression"), table)
    answer = fitted.predictor.predict(table.features, PredictOptions((0.1, 0.9)))
    assert answer.mean is not None
    assert answer.quantiles is not None
    assert answer.mean.tolist() == [2.5] * 40
    assert answer.quantiles.tolist() == [[2.5, 2.5]] * 40


@pytest.mark.parametrize("task", fitting.TASKS)
def test_no_rows_have_no_answers(task: str, folder: Path, tmp_path: Path) -> None:
    table = fitting.table(task, "numeric")
    fitted = fitting.fit(tmp_path, fitting.weights(folder, "v2", task), table)
    answer = fitted.predictor.predict(table.features.take(slice(0, 0)), fitting.asked(task))
    assert [values.shape[0] for values in fitting.arrays(answer)] == [0] * (
        1 if task == "classification" else 2
    )


def test_both_tasks_and_all_contexts_of_one_file_share_one_module(folder: Path, tmp_path: Path) -> None:
    fitted = [
        fitting.fit(tmp_path, fitting.weights(folder, "v3.5", task), fitting.table(task, "numeric"))
        for task in fitting.TASKS
    ]
    modules = {id(each.backbone.loaded.module) for each in fitted}
    modules |= {id(each.predictor._estimator.executor_.model_caches[0].get_any()) for each in fitted}
    assert len(modules) == 1


def test_progress_only_grows_and_a_cancel_leaves_the_fit(folder: Path) -> None:
    backbone = ADAPTER.load(fitting.weights(folder, "v3", "classification"), "cpu")
    table = fitting.table("classification", "numeric")
    told: list[float] = []
    ADAPTER.fit(table, backbone, fitting.OPTIONS, told.append)
    assert told == sorted(told)
    assert (told[0], told[-1]) == (0.0, 1.0)
    assert len(set(told)) > 3

    def cancel(fraction: float) -> None:
        if fraction > 0.3:
            raise Cancelled

    with pytest.raises(Cancelled):
        ADAPTER.fit(table, backbone, fitting.OPTIONS, cancel)
    assert not backbone.loaded.module._forward_pre_hooks


@pytest.fixture(scope="module")
def small(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> fitting.Fitted:
    weights = fitting.weights(folder, "v2", "classification")
    return fitting.fit(tmp_path_factory.mktemp("small"), weights, fitting.table("classification", "mixed"))


def thaw(small: fitting.Fitted, tensors: Mapping[str, Any], **changes: Any) -> Any:
    mapped = small.store.open("default", small.digest)
    state = dict(mapped.manifest.state) | changes
    return ADAPTER.thaw({**mapped.tensors, **tensors}, state, small.backbone, small.table.target)


def tree(small: fitting.Fitted) -> Any:
    return orjson.loads(small.store.open("default", small.digest).tensors["tree"].numpy().tobytes())


def as_tensor(tree: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(orjson.dumps(tree)), dtype=torch.uint8)


CRAFTED: dict[str, Any] = {
    "a function of the system": {"is": "function", "of": "os.system"},
    "a class of another library": {"is": "object", "of": "subprocess.Popen", "attributes": []},
    "a way through an allowed module": {"is": "function", "of": "tabpfn.preprocessing.steps.utils.np.load"},
    "an enum that is none": {"is": "enum", "of": "builtins.eval", "name": "x"},
    "an array of objects": {"is": "array", "of": "tree", "shape": [1], "dtype": "|O", "by_columns": False},
    "a tensor that is not there": {"is": "tensor", "of": "t999999"},
    "something that has no kind": {"of": 1},
    "a kind of no list": {"is": "pickle", "of": "gASVBg=="},
    "a reference ahead": {"is": "again", "of": 10**6},
    "a name that is a list": {"is": "object", "of": ["os.system"], "attributes": []},
}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_state_is_refused_and_runs_nothing(name: str, small: fitting.Fitted) -> None:
    stored = tree(small)
    stored["of"].append(["more", CRAFTED[name]])
    with pytest.raises(ContextIncompatible):
        thaw(small, {"tree": as_tensor(stored)})


def test_a_state_nested_without_end_is_refused(small: fitting.Fitted) -> None:
    deep = b'{"is":"list","of":[' * 900 + b"1" + b"]}" * 900
    with pytest.raises(ContextIncompatible):
        thaw(small, {"tree": torch.frombuffer(bytearray(deep), dtype=torch.uint8)})


def test_a_context_of_other_library_versions_is_refused(
    small: fitting.Fitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert thaw(small, {}) is not None
    monkeypatch.setattr(states, "version", lambda name: "9.2.1" if name == "tabpfn" else "0")
    with pytest.raises(ContextIncompatible, match=r"tabpfn 9\.2\.0, here is 9\.2\.1"):
        thaw(small, {})


def test_what_a_context_may_not_hold_fails_the_fit_not_a_predict() -> None:
    for held in (np.random.default_rng(0), Path("x"), np.array(["2024-01-01"], dtype="M8[D]"), print):
        with pytest.raises(InternalError, match="can't be kept"):
            Encoder()({"state": held})


def test_rows_of_another_schema_are_refused(small: fitting.Fitted) -> None:
    features = small.table.features
    fewer = Features(features.names[1:], features.values[1:], features.rows)
    with pytest.raises(InvalidRows, match="10 features"):
        small.predictor.predict(fewer, PredictOptions())
    swapped = Features(features.names, (features.values[1], features.values[0], *features.values[2:]), N)
    with pytest.raises(InvalidRows, match="another kind"):
        small.predictor.predict(swapped, PredictOptions())


def test_quantiles_are_refused_where_there_are_none(
    small: fitting.Fitted, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match="regression"):
        small.predictor.predict(small.table.features, PredictOptions((0.5,)))
    fitted = fitting.fit(
        tmp_path, fitting.weights(folder, "v2", "regression"), fitting.table("regression", "numeric")
    )
    with pytest.raises(InvalidRequest, match="between 0 and 1"):
        fitted.predictor.predict(fitted.table.features, PredictOptions((1.5,)))


def test_a_file_that_is_not_these_weights_is_never_used(folder: Path, tmp_path: Path) -> None:
    weights = fitting.weights(folder, "v2", "regression")
    copy = tmp_path / "tabpfn-v2-regressor.ckpt"
    copy.write_bytes(weights.path.read_bytes() + b"x")
    with pytest.raises(ModelNotReady, match="changed"):
        ADAPTER.load(type(weights)(weights.model, weights.task, copy, weights.digest[:-1] + "0"), "cpu")
    with pytest.raises(ModelNotReady, match="for regression"):
        ADAPTER.load(type(weights)(weights.model, "classification", weights.path, weights.digest), "cpu")
    with pytest.raises(InvalidRequest, match=r"tabpfn_v2 checkpoint, but tabpfn-v2\.5"):
        ADAPTER.inspect(weights.path, "tabpfn-v2.5")
    broken = tmp_path / "broken.ckpt"
    broken.write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(InvalidRequest, match="loaded safely"):
        ADAPTER.inspect(broken, "tabpfn-v2")
    content = checkpoints.build("v2", "classification")
    content["state_dict"].popitem()
    torch.save(content, broken)
    with pytest.raises(InvalidRequest, match="does not hold the tensors"):
        ADAPTER.inspect(broken, "tabpfn-v2")


def test_a_text_never_seen_is_one_value_and_no_gap(small: fitting.Fitted) -> None:
    def answers(plans: list[str | None]) -> Any:
        rows = mixed().slice(0, 6).set_column(0, "plan", pa.array(plans))
        features = small.table.schema.features(rows)
        found = small.predictor.predict(features, PredictOptions()).probabilities
        assert np.array_equal(found, small.state.predict(features).probabilities)
        return found

    unseen = answers([None, "never", "basic", "pro", None, "?"])
    gaps = answers([None, None, "basic", "pro", None, None])
    assert np.array_equal(unseen, answers([None, "other", "basic", "pro", None, "never"]))
    same = (unseen == gaps).all(axis=1)
    assert same.tolist() == [True, False, True, True, True, False]
