"""Predicts: check, bound, relay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.catalogue.records import Version
from common.errors import ContextGone, FieldError, InvalidRequest
from common.models.protocol import ModelSpec
from common.models.registry import Registry, outputs
from common.names import dataset_name
from common.relay.relay import Asked, Relay
from common.relay.snapshot import RoutingSnapshot
from common.relay.wire import Answer
from common.service.refits import RefitService
from common.settings import Settings

#: Most quantile levels of one predict.
QUANTILES_MOST = 99
DEFAULT_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class PredictRequest:
    """A predict as a transport read it; `rows` is an Arrow IPC stream, or JSON as the client sent it."""

    tenant: str
    dataset: str
    rows: bytes
    kind: str  # content type of the rows
    request_id: str
    arrived: float  # time.monotonic()
    version: int | None = None
    output: str | None = None
    quantiles: Sequence[float] = ()
    threshold: float | None = None
    deadline_s: float | None = None


class PredictService:
    """Answers predicts from the worker that holds the context."""

    def __init__(
        self,
        snapshot: RoutingSnapshot,
        relay: Relay,
        refits: RefitService,
        registry: Registry,
        settings: Settings,
    ) -> None:
        self._snapshot = snapshot
        self._registry = registry
        self._refits = refits
        self._relay = relay
        self._settings = settings

    def close(self) -> None:
        """Close the connections to workers."""
        self._relay.close()

    def resolve(self, tenant: str, dataset: str, version: int | None) -> Version:
        """The version that a predict would be answered from; raises DatasetNotFound or VersionNotFound."""
        return self._snapshot.resolve(tenant, dataset_name(dataset), version)

    def predict(self, request: PredictRequest, version: Version) -> tuple[Version, Answer, str]:
        """Version, answer and output kind, given what `resolve` said; raises as Relay.predict does, and InvalidRequest."""
        spec = self._registry.spec(version.model)
        output = output_of(request.output, request.quantiles, version.task, spec)
        self._check_threshold(request, version)
        levels: tuple[float, ...] = ()
        if output == "quantiles":
            levels = tuple(request.quantiles) or DEFAULT_QUANTILES
        asked = Asked(
            tenant=request.tenant,
            dataset=dataset_name(request.dataset),
            version=request.version,
            rows=request.rows,
            kind=request.kind,
            request_id=request.request_id,
            deadline=request.arrived + deadline_s(request.deadline_s, self._settings),
            quantiles=levels,
            point=output if output in spec.points else spec.points[0],
        )
        try:
            version, answer = self._relay.predict(asked, version)
        except ContextGone as gone:
            job = self._refits.refit(request.tenant, asked.dataset, version, gone)
            if job is not None:
                gone.detail = f"{gone.detail.rstrip('.')}. The dataset is fitted again by job {job.id}."
                gone.facts["job"] = job.id
                gone.retry_after_s = max(1.0, round(job.estimate_s))
            raise
        return version, answer, output

    @staticmethod
    def _check_threshold(request: PredictRequest, version: Version) -> None:
        if request.threshold is None:
            return
        if version.task != "classification":
            raise _wrong("threshold", f"is for a classification; this dataset is a {version.task}")
        count = len(version.target["classes"])
        if count != 2:
            raise _wrong("threshold", f"is for two classes; this dataset has {count}")
        if not 0 <= request.threshold <= 1:
            raise _wrong("threshold", "must be a probability, 0 to 1")


def deadline_s(given: float | None, settings: Settings) -> float:
    """Seconds that a predict may take; raises InvalidRequest."""
    if given is None:
        return settings.predict_deadline_s
    most = settings.max_predict_deadline_s
    if not 0 < given <= most:
        raise _wrong("deadline_ms", f"must be above 0 and at most {most * 1000:.0f}")
    return given


def output_of(output: str | None, quantiles: Sequence[float], task: str, spec: ModelSpec) -> str:
    """The output kind of a predict of this task by this model; raises InvalidRequest."""
    allowed = outputs(spec, task)
    if quantiles and "quantiles" not in allowed:
        raise _wrong("quantiles", f"are answers of a regression; this is a {task}")
    chosen = output or ("quantiles" if quantiles else allowed[0])
    if chosen in spec.withheld and task == "regression":
        raise _wrong("output", f"{chosen} is not offered by {spec.name}: {spec.withheld[chosen]}")
    if chosen not in allowed:
        raise _wrong("output", f"must be one of {', '.join(allowed)} for {task} by {spec.name}")
    if len(quantiles) > QUANTILES_MOST:
        raise _wrong("quantiles", f"at most {QUANTILES_MOST} levels, {len(quantiles)} given")
    if any(not 0 < level < 1 for level in quantiles):
        raise _wrong("quantiles", "each level must be above 0 and below 1, such as 0.05,0.5,0.95")
    if quantiles and chosen != "quantiles":
        raise _wrong("quantiles", f"goes with output=quantiles, not with output={chosen}")
    return chosen


def _wrong(field: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {message}", errors=[FieldError(field, message)])
