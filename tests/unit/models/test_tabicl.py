"""A context answers as the library does, bit for bit, alone and in company."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tabicl import TabICLClassifier, TabICLRegressor

from common.errors import Cancelled, InvalidRequest, InvalidTable, InvalidTarget, ModelNotReady, TabrelayError
from common.models.protocol import PredictOptions
from common.models.registry import Registry
from common.settings import Settings
from tests.support import mixed, numeric
from tests.unit import fitting

SIZES = (1, 2, 3, 4, 5, 20, 64, 100)
LEVELS = (0.05, 0.5, 0.95)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def library(table: Any, n_estimators: int = 8) -> Any:
    """The library's own estimator with its own module, as a user calls it."""
    task = table.target.task
    cls = TabICLClassifier if task == "classification" else TabICLRegressor
    weights = Registry(Settings()).weights(fitting.MODEL, task)
    estimator = cls(
        n_estimators=n_estimators, kv_cache="kv", device="cpu", random_state=42,
        model_path=weights.path, allow_auto_download=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return estimator.fit(table.features.to_frame(), table.y)


def quiet(call: Any, *args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args, **options)


def column(values: list[Any], labels: list[Any]) -> pa.Table:
    return pa.table({"a": values, "y": labels})


KINDS: dict[str, tuple[pa.Table, str]] = {
    "numeric": (numeric(), "y"),
    "mixed": (mixed().drop_columns(["z"]), "y"),
    "mixed regression": (mixed().drop_columns(["y"]), "z"),
    "numeric regression": (
        numeric(seed=7).drop_columns(["y"]).append_column("z", mixed(rows=120).column("z")),
        "z",
    ),
    "ten classes": (numeric(rows=200, classes=10), "y"),
    "only text": (mixed().select(["plan", "y"]), "y"),
    "one feature": (numeric().select(["c0", "y"]), "y"),
    "two rows": (
        numeric(rows=2, columns=3).drop_columns(["y"]).append_column("y", pa.array(["a", "b"])),
        "y",
    ),
    "single class": (numeric().drop_columns(["y"]).append_column("y", pa.array(["a"] * 120)), "y"),
    "constant columns": (
        numeric().append_column("k", pa.array([3.0] * 120)).append_column("e", pa.nulls(120)),
        "y",
    ),
    "constant target": (column([float(i) for i in range(30)], [2.5] * 30), "y"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_context_answers_as_the_library_bit_for_bit(kind: str, tmp_path: Path) -> None:
    table, target = KINDS[kind]
    task = "regression" if target == "z" or kind == "constant target" else "classification"
    training = fitting.training(table, target, task)
    fitted = fitting.fit(training, tmp_path)
    oracle = library(training)
    for size in SIZES:
        rows = training.features.take(slice(0, size))
        frame = rows.to_frame()
        if task == "classification":
            answer = fitted.predictor.predict(rows, PredictOptions()).probabilities
            assert np.array_equal(answer, quiet(oracle.predict_proba, frame)), f"{size} rows"
            continue
        prediction = fitted.predictor.predict(rows, PredictOptions(LEVELS, "median"))
        told = quiet(oracle.predict, frame, output_type=["mean", "median", "quantiles"], alphas=list(LEVELS))
        for name, expected in told.items():
            assert np.array_equal(getattr(prediction, name), expected), f"{name} of {size} rows"
    if task == "regression":
        with pytest.raises(InvalidRequest, match="no mode"):
            fitted.predictor.predict(training.features, PredictOptions(point="mode"))


@pytest.mark.parametrize("n_estimators", [1, 3, 16])
def test_any_ensemble_size_answers_as_the_library(n_estimators: int, tmp_path: Path) -> None:
    training = fitting.training(mixed().drop_columns(["z"]))
    fitted = fitting.fit(training, tmp_path, n_estimators=n_estimators)
    rows = training.features.take(slice(0, 9))
    expected = quiet(library(training, n_estimators).predict_proba, rows.to_frame())
    assert np.array_equal(fitted.predictor.predict(rows, PredictOptions()).probabilities, expected)


def test_unseen_and_missing_categories_answer_as_the_library(tmp_path: Path) -> None:
    table = mixed().drop_columns(["z"])
    training = fitting.training(table)
    fitted = fitting.fit(training, tmp_path)
    odd = table.slice(0, 6).set_column(0, "plan", pa.array([None, "never", "basic", "pro", None, "?"]))
    rows = training.schema.features(odd)
    expected = quiet(library(training).predict_proba, rows.to_frame())
    assert np.array_equal(fitted.predictor.predict(rows, PredictOptions()).probabilities, expected)


def test_a_row_s_answer_does_not_depend_on_its_company(tmp_path: Path) -> None:
    training = fitting.training(numeric())
    fitted = fitting.fit(training, tmp_path)
    alone = fitted.predictor.predict(training.features.take(slice(0, 8)), PredictOptions()).probabilities
    hostile = numeric(rows=60, seed=99).drop_columns(["y"]).to_pandas() * 1e4
    hostile.iloc[:8] = numeric().drop_columns(["y"]).to_pandas().iloc[:8]
    hostile.iloc[40:] = np.nan
    rows = training.schema.features(pa.Table.from_pandas(hostile))
    together = fitted.predictor.predict(rows, PredictOptions()).probabilities
    assert alone is not None
    assert together is not None
    assert np.array_equal(together[:8], alone)


def test_contexts_on_one_backbone_never_answer_for_each_other(tmp_path: Path) -> None:
    tables = [fitting.training(numeric(rows=60 + 10 * i, seed=40 + i)) for i in range(4)]
    fitted = [fitting.fit(table, tmp_path / str(i)) for i, table in enumerate(tables)]
    rows = [table.features.take(slice(0, 5)) for table in tables]
    expected = [
        f.predictor.predict(r, PredictOptions()).probabilities for f, r in zip(fitted, rows, strict=True)
    ]
    wrong: list[int] = []

    def client(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(100):
            i = int(rng.integers(4))
            if not np.array_equal(
                fitted[i].predictor.predict(rows[i], PredictOptions()).probabilities, expected[i]
            ):
                wrong.append(i)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert fitting.backbone("classification").module._cache is None


def test_a_fit_reports_rising_fractions_up_to_1() -> None:
    seen: list[float] = []
    training = fitting.training(numeric())
    fitting.adapter().fit(
        training, fitting.backbone("classification"), {"n_estimators": 8, "seed": 42}, seen.append
    )
    assert seen[0] == 0.0
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(1.0)
    assert len(set(seen)) > 5


def test_a_cancelled_fit_leaves_the_backbone_clean() -> None:
    training = fitting.training(numeric())
    weights = fitting.backbone("classification")

    def cancel(fraction: float) -> None:
        if fraction > 0.3:
            raise Cancelled

    with pytest.raises(Cancelled):
        fitting.adapter().fit(training, weights, {"n_estimators": 8, "seed": 42}, cancel)
    assert weights.module._cache is None
    assert not any(module._forward_hooks for module in weights.module.modules())


FRESH = """
import sys, numpy as np, torch
torch.set_num_threads(1)
from pathlib import Path
from common.models.protocol import PredictOptions
from common.tables.target import Target
from tests.unit import fitting
from common.contexts.reader import open_context
path = Path(sys.argv[1])
mapped = open_context(path, path.stem, "disk")
target = Target.decode(mapped.manifest.target)
predictor = fitting.adapter().thaw(mapped.tensors, mapped.manifest.state, fitting.backbone(target.task), target)
answer = predictor.predict(mapped.manifest.probes.features(), PredictOptions()).probabilities
assert np.array_equal(answer, np.array(mapped.manifest.probes.answers)), np.abs(answer - mapped.manifest.probes.answers).max()
"""


def test_another_process_with_another_hash_seed_answers_bit_for_bit(tmp_path: Path) -> None:
    fitted = fitting.fit(fitting.training(mixed().drop_columns(["z"])), tmp_path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FRESH, str(fitted.path)],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        check=False,
        cwd=Path(__file__).resolve().parents[3],
    )
    assert done.returncode == 0, done.stderr.decode()


def test_unusable_tables_are_refused_in_words() -> None:
    training = fitting.training(numeric())
    fit = fitting.adapter().fit
    weights = fitting.backbone("classification")
    options = {"n_estimators": 2, "seed": 1}
    with pytest.raises(InvalidRequest, match="not for"):
        fit(fitting.training(mixed().drop_columns(["y"]), "z"), weights, options, lambda _: None)
    infinite = replace(training.features, values=(np.full(120, np.inf), *training.features.values[1:]))
    with pytest.raises(InvalidTable, match="infinity"):
        fit(replace(training, features=infinite), weights, options, lambda _: None)
    with pytest.raises(InvalidTarget, match="11 classes"):
        fit(replace(training, y=np.arange(120) % 11), weights, options, lambda _: None)
    with pytest.raises(TabrelayError):
        fit(replace(training, y=training.y[:5]), weights, options, lambda _: None)


def test_weights_are_what_they_are_said_to_be(tmp_path: Path) -> None:
    weights = Registry(Settings()).weights(fitting.MODEL, "regression")
    with pytest.raises(ModelNotReady, match="changed"):
        fitting.adapter().load(replace(weights, digest="0" * 64), "cpu")
    with pytest.raises(ModelNotReady, match="regressor"):
        fitting.adapter().load(replace(weights, task="classification"), "cpu")
    broken = tmp_path / "broken.ckpt"
    broken.write_bytes(b"not a checkpoint")
    with pytest.raises(InvalidRequest):
        fitting.adapter().inspect(broken, fitting.MODEL)
    assert fitting.adapter().inspect(weights.path, fitting.MODEL) == ("regression",)
