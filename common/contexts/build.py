"""From a fitted state to a verified context file: freeze, write, read back through the loader, compare answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from common.contexts.manifest import Manifest, Probes, numbers
from common.contexts.reader import MappedContext, open_context
from common.contexts.store import ContextStore
from common.contexts.writer import Written, write_context
from common.errors import VerificationFailed
from common.models.protocol import Adapter, Backbone, FittedState, PredictOptions, TrainingTable

#: Rows whose answers are compared and kept; four or more, because fewer round differently.
PROBE_ROWS = 8


@dataclass(frozen=True)
class Built:
    """A verified context under a temporary name; leaving the `with` block removes what was not published."""

    store: ContextStore
    tenant: str
    path: Path
    digest: str
    nbytes: int
    manifest: Manifest
    largest_difference: float  # see `largest_difference`

    def publish(self) -> Path:
        """Give the file its name; hold the tenant's lock."""
        return self.store.publish(self.path, self.tenant, self.digest)

    def __enter__(self) -> Built:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.path.unlink(missing_ok=True)


def build_context(
    store: ContextStore,
    tenant: str,
    attempt: str,
    adapter: Adapter,
    backbone: Backbone,
    fitted: FittedState,
    table: TrainingTable,
    *,
    table_digest: str,
    key: str,
    options: Mapping[str, Any],
    timings_ms: Mapping[str, float],
    on_verify: Callable[[], None] = lambda: None,
) -> Built:
    """Write and verify a context under a name that only this `attempt` uses; raises StorageFull, VerificationFailed, and then nothing is left on disk."""
    frozen = adapter.freeze(fitted)
    probed = table.features.take(slice(0, PROBE_ROWS))
    manifest = Manifest(
        model=backbone.weights.model,
        task=table.target.task,
        family=adapter.family,
        state_version=frozen.state_version,
        weights_digest=backbone.weights.digest,
        precision=frozen.precision,
        cache=frozen.cache,
        libraries=dict(adapter.versions()),
        key=key,
        table=table_digest,
        rows=table.features.rows,
        columns=len(table.schema.columns),
        target=table.target.encode(),
        schema=table.schema.encode(),
        options=dict(options),
        state=frozen.state,
        tensor_bytes=sum(tensor.nbytes for tensor in frozen.tensors),
        timings_ms=dict(timings_ms),
        probes=Probes.of(probed, fitted.predict(probed)),
        created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
    )
    written = write_context(store.temporary(tenant, attempt), manifest.encode(), frozen.tensors)
    try:
        on_verify()
        difference = verify(written, adapter, backbone, table)
    except BaseException:
        written.path.unlink(missing_ok=True)
        raise
    return Built(store, tenant, written.path, written.digest, written.nbytes, manifest, difference)


def verify(written: Written, adapter: Adapter, backbone: Backbone, table: TrainingTable) -> float:
    """Open the file as a predict worker would and compare its answers with the fitted estimator's.

    Returns the largest difference. Raises VerificationFailed; as computed, on CPU, every bit must be the same.
    """
    mapped = open_context(written.path, written.digest, "disk")
    difference = largest_difference(mapped, adapter, backbone, table)
    tolerance = adapter.tolerance(backbone.device, mapped.manifest.precision)
    if not difference <= tolerance:
        raise VerificationFailed(
            f"the context read back answers differently by {difference:.3g} (at most {tolerance:g} is allowed); nothing was published",
            difference=difference,
        )
    return difference


def largest_difference(
    mapped: MappedContext, adapter: Adapter, backbone: Backbone, table: TrainingTable
) -> float:
    """How far a context's answers for its probes are from those of the estimator that was fitted, as computed.

    Of probabilities, or of means in standard deviations of the target; infinity when they can't be compared.
    """
    predictor = adapter.thaw(mapped.tensors, mapped.manifest.state, backbone, table.target)
    answered = numbers(predictor.predict(mapped.manifest.probes.features(), PredictOptions()))
    expected = np.array(mapped.manifest.probes.answers, dtype=np.float64)
    if answered.shape != expected.shape or not np.array_equal(np.isnan(answered), np.isnan(expected)):
        return float("inf")
    unit = 1.0 if table.target.task == "classification" else float(np.std(table.y)) or 1.0
    return float(np.nan_to_num(np.abs(answered - expected)).max(initial=0.0)) / unit
