"""A fit in the test's own process, from a table to a published context; shared by tests of models and contexts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from common.contexts.build import build_context
from common.contexts.manifest import Manifest
from common.contexts.store import ContextStore
from common.models.protocol import Backbone, Predictor, Progress, TrainingTable, no_progress
from common.models.registry import Registry, load_adapter
from common.names import new_id
from common.settings import Settings
from common.tables.features import Features
from common.tables.schema import TableSchema
from common.tables.target import Target, take_target

MODEL = "tabicl-mini"
_backbones: dict[str, Backbone] = {}


def adapter() -> Any:
    """TabICL's."""
    return load_adapter(Registry(Settings()).spec(MODEL))


def backbone(task: str) -> Any:
    """The mini model's weights, loaded once for all tests."""
    if task not in _backbones:
        _backbones[task] = adapter().load(Registry(Settings()).weights(MODEL, task), "cpu")
    return _backbones[task]


def training(table: pa.Table, target: str = "y", task: str | None = None) -> TrainingTable:
    """What an adapter fits."""
    column = take_target(table, target)
    inferred = Target.infer(column, target, task)
    schema = TableSchema.infer(table, target)
    return TrainingTable(schema.features(table), schema, inferred, inferred.encode_labels(column))


@dataclass(frozen=True)
class Fitted:
    """A published context and what it came from."""

    table: TrainingTable
    state: Any
    store: ContextStore
    digest: str
    path: Path
    predictor: Predictor
    manifest: Manifest
    largest_difference: float

    @property
    def features(self) -> Features:
        """The training rows."""
        return self.table.features


def fit(
    table: TrainingTable,
    data: Path,
    *,
    n_estimators: int = 8,
    progress: Progress = no_progress,
    **stored: str,
) -> Fitted:
    """Fit, write, verify, publish, open and thaw; `stored` is precision and cache."""
    weights = backbone(table.target.task)
    options = {"n_estimators": n_estimators, "seed": 42, **stored}
    state = adapter().fit(table, weights, options, progress)
    store = ContextStore(Settings(data_dir=data, host_dir=data / "host", host_tier_bytes=2**30))
    built = build_context(
        store, "default", new_id(), adapter(), weights, state, table,
        table_digest="0" * 64, key="k", options=options, timings_ms={},
    )  # fmt: skip
    with built:
        path = built.publish()
    mapped = store.open("default", built.digest)
    predictor = adapter().thaw(mapped.tensors, mapped.manifest.state, weights, table.target)
    return Fitted(
        table, state, store, built.digest, path, predictor, mapped.manifest, built.largest_difference
    )
