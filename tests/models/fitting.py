"""A TabPFN fit in the test's own process, from a table to a published context."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.contexts.build import build_context
from common.contexts.store import ContextStore
from common.models.protocol import (
    Prediction,
    PredictOptions,
    Predictor,
    Progress,
    TrainingTable,
    Weights,
    no_progress,
)
from common.models.tabpfn.adapter import ADAPTER
from common.models.tabpfn.rows import BLOCK
from common.names import new_id
from common.settings import Settings
from common.tables.canonical import file_digest
from common.tables.features import Features
from tests.models import checkpoints
from tests.support import mixed, numeric
from tests.unit.fitting import training

VERSIONS = tuple(checkpoints.SIZES)
TASKS = ("classification", "regression")
KINDS = ("numeric", "mixed")
OPTIONS = {"n_estimators": 4, "seed": 42}
LEVELS = (0.05, 0.5, 0.95)


def weights(folder: Path, version: str, task: str) -> Weights:
    """A random checkpoint of the folder, made when it is not there."""
    path = folder / checkpoints.file_name(version, task)
    if not path.exists():
        checkpoints.make(folder, version, task)
    return Weights(f"tabpfn-{version}", task, path, file_digest(path))


def table(task: str, kind: str) -> TrainingTable:
    """A training table of 120 or 140 rows."""
    if kind == "mixed":
        return training(mixed().drop_columns(["z" if task == "classification" else "y"]), _target(task), task)
    if task == "classification":
        return training(numeric(), "y", task)
    numbers = numeric(seed=7).drop_columns(["y"])
    return training(numbers.append_column("z", mixed(rows=120).column("z")), "z", task)


def _target(task: str) -> str:
    return "y" if task == "classification" else "z"


def asked(task: str) -> PredictOptions:
    """What tests ask for: quantiles where there are any."""
    return PredictOptions(LEVELS if task == "regression" else ())


def arrays(prediction: Prediction) -> list[Any]:
    """What a prediction holds."""
    found = (prediction.probabilities, prediction.mean, prediction.quantiles)
    return [values for values in found if values is not None]


def both_sizes(predictor: Any, rows: Features, task: str) -> list[Any]:
    """The answers to the first block of rows, and those to all rows."""
    parts = (rows.take(slice(0, BLOCK)), rows)
    return [values for part in parts for values in arrays(predictor.predict(part, asked(task)))]


@dataclass(frozen=True)
class Fitted:
    """A published context and what it came from."""

    table: TrainingTable
    backbone: Any
    state: Any
    store: ContextStore
    digest: str
    path: Path
    predictor: Predictor


def fit(
    data: Path,
    checkpoint: Weights,
    trained: TrainingTable,
    *,
    progress: Progress = no_progress,
    **options: int,
) -> Fitted:
    """Fit, write, verify, publish, open and thaw."""
    chosen = OPTIONS | options
    backbone = ADAPTER.load(checkpoint, "cpu")
    state = ADAPTER.fit(trained, backbone, chosen, progress)
    store = stored(data)
    built = build_context(
        store, "default", new_id(), ADAPTER, backbone, state, trained,
        table_digest="0" * 64, key="k", options=chosen, timings_ms={},
    )  # fmt: skip
    with built:
        path = built.publish()
    mapped = store.open("default", built.digest)
    predictor = ADAPTER.thaw(mapped.tensors, mapped.manifest.state, backbone, trained.target)
    return Fitted(trained, backbone, state, store, built.digest, path, predictor)


def stored(data: Path) -> ContextStore:
    """The contexts of a test's data folder."""
    return ContextStore(Settings(data_dir=data, host_dir=data / "host", host_tier_bytes=2**30))
