"""Predicts: check, bound, relay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.catalogue.records import Version
from common.errors import ContextGone, FieldError, InvalidRequest
from common.names import dataset_name
from common.relay.relay import Asked, Relay
from common.relay.snapshot import RoutingSnapshot
from common.relay.wire import Answer
from common.service.refits import RefitService
from common.settings import Settings

#: Most quantile levels of one predict.
QUANTILES_MOST = 99
OUTPUTS = {
    "classification": ("proba", "label"),
    "regression": ("mean", "quantiles"),
}
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
    deadline_s: float | None = None


class PredictService:
    """Answers predicts from the worker that holds the context."""

    def __init__(
        self, snapshot: RoutingSnapshot, relay: Relay, refits: RefitService, settings: Settings
    ) -> None:
        self._snapshot = snapshot
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
        output = self._output(request, version)
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
            deadline=request.arrived + self._deadline_s(request),
            quantiles=levels,
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

    def _deadline_s(self, request: PredictRequest) -> float:
        given = request.deadline_s
        if given is None:
            return self._settings.predict_deadline_s
        most = self._settings.max_predict_deadline_s
        if not 0 < given <= most:
            raise _wrong("deadline_ms", f"must be above 0 and at most {most * 1000:.0f}")
        return given

    @staticmethod
    def _output(request: PredictRequest, version: Version) -> str:
        allowed = OUTPUTS[version.task]
        if request.quantiles and "quantiles" not in allowed:
            raise _wrong("quantiles", f"are answers of a regression; this dataset is a {version.task}")
        output = request.output or ("quantiles" if request.quantiles else allowed[0])
        if output not in allowed:
            raise _wrong("output", f"must be one of {', '.join(allowed)} for {version.task}")
        if len(request.quantiles) > QUANTILES_MOST:
            raise _wrong("quantiles", f"at most {QUANTILES_MOST} levels, {len(request.quantiles)} given")
        if any(not 0 < level < 1 for level in request.quantiles):
            raise _wrong("quantiles", "each level must be above 0 and below 1, such as 0.05,0.5,0.95")
        if request.quantiles and output != "quantiles":
            raise _wrong("quantiles", f"goes with output=quantiles, not with output={output}")
        return output


def _wrong(field: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {message}", errors=[FieldError(field, message)])
