"""One-shot predicts: check, estimate, place, answer."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from blake3 import blake3

from common.admission import estimate_one_shot_s
from common.catalogue import Catalogue
from common.catalogue.records import FitWorker
from common.errors import (
    ContextGone,
    DeadlinePassed,
    FieldError,
    InvalidRequest,
    Overloaded,
    Unavailable,
    WorkerBusy,
)
from common.lane import OneShotLane
from common.models.protocol import AUTO, ModelSpec
from common.models.registry import SCHEMA, Registry, check_table, validate_options
from common.relay.one_shot import OneShotAnswer, OneShotQuestion, OneShotRelay
from common.relay.wire import encode_rows
from common.service.fits import Wake, context_key
from common.service.forecast import Forecaster
from common.service.predicts import DEFAULT_QUANTILES, deadline_s, output_of
from common.settings import Settings
from common.tables.one_shot import OneShotLimits, OneShotTables, read_one_shot
from common.tables.overrides import Overrides
from common.wake import LANE

#: How a one-shot's context is kept.
AS_COMPUTED = {"precision": "native", "cache": "kv"}
#: How long a worker's pace counts, and the most that it makes of an estimate.
PACE_S, PACE_MOST = 60.0, 1.5
#: After a refusal others are refused unread for so long: reading them costs what the workers' host lacks just then.
SHUT_S = 0.05


@dataclass(frozen=True)
class OneShotRequest:
    """A one-shot as a transport read it."""

    tenant: str
    body: Mapping[str, Any]
    request_id: str
    arrived: float  # time.monotonic()
    deadline_s: float | None = None
    gone: Callable[[], bool] = lambda: False  # whether the caller went away


@dataclass(frozen=True)
class OneShotTold:
    """An answer and what it is of."""

    told: OneShotAnswer
    spec: ModelSpec
    task: str
    output: str


class OneShotService:
    """Answers rows from a training table that comes with them."""

    def __init__(
        self,
        relay: OneShotRelay,
        catalogue: Catalogue,
        registry: Registry,
        settings: Settings,
        wake: Wake,
    ) -> None:
        self._relay = relay
        self._catalogue = catalogue
        self._lane = OneShotLane(catalogue, settings)
        self._wake = wake
        self._shut_until = -math.inf
        self._paces: dict[str, tuple[float, float]] = {}  # by model: when it was told, and what
        self._registry = registry
        self._settings = settings

    def close(self) -> None:
        """Close the connections to workers."""
        self._relay.close()

    def admit(self) -> None:
        """Raise WorkerBusy when a one-shot was refused just now."""
        if time.monotonic() < self._shut_until:
            raise WorkerBusy("predict workers have as many one-shots as they may hold", retry_after_s=1)

    def predict(self, request: OneShotRequest) -> OneShotTold:
        """The answer.

        Raises InvalidRequest, InvalidTable, InvalidTarget, InvalidRows and TooLarge for what was sent, ModelNotFound,
        ModelNotReady, Overloaded, Unavailable, DeadlinePassed and Cancelled.
        """
        body = request.body
        deadline = request.arrived + deadline_s(request.deadline_s, self._settings)
        spec, options = self._model(body)
        tables = self._tables(body, spec, Overrides.decode(options.get(SCHEMA)))
        target = tables.target
        levels = _levels(body.get("quantiles"))
        output = output_of(_text("output", body.get("output")), levels, target.task, spec)
        train, rows = encode_rows(tables.train), encode_rows(tables.rows)
        question = OneShotQuestion(
            tenant=request.tenant,
            key=context_key(
                table=blake3(train).hexdigest(),
                target=target.name,
                task=target.task,
                spec=spec,
                weights=self._registry.weights(spec.name, target.task).digest,
                options=options,
            ),
            model=spec.name,
            task=target.task,
            options=options,
            schema=tables.schema.encode(),
            target=target.encode(),
            estimate_s=estimate_one_shot_s(spec, tables.total_rows, len(tables.schema.columns), options),
            deadline_s=0.0,
            request_id=request.request_id,
            quantiles=(levels or DEFAULT_QUANTILES) if output == "quantiles" else (),
            point=output if output in spec.points else spec.points[0],
        )
        told = self._answer(request, question, train, rows, deadline)
        return OneShotTold(told, spec, target.task, output)

    def _answer(
        self, request: OneShotRequest, question: OneShotQuestion, train: bytes, rows: bytes, deadline: float
    ) -> OneShotAnswer:
        """From a predict worker alone when that is estimated to hold up nobody, else with a fit worker's help."""
        if question.estimate_s * self._pace(question.model) <= self._settings.one_shot_device_s:
            try:
                told = self._relay.ask(question, train, rows, deadline)
            except WorkerBusy:
                self._shut_until = time.monotonic() + SHUT_S
                raise
            self._paces[question.model] = time.monotonic(), told.pace
            return told
        with contextlib.suppress(ContextGone):
            return self._relay.ask(replace(question, if_held=True), b"", rows, deadline)
        self._check_wait(question.estimate_s, deadline)
        id = self._lane.submit(question.encode(train, b""))
        try:
            self._wake(LANE)
            made = self._lane.wait(id, deadline, request.gone)
            known = replace(question, made=made.id, made_digest=made.digest)
            told = self._relay.ask(known, b"", rows, deadline)
        finally:
            self._lane.forget(request.tenant, id)
        timings = {"fit": made.fit_ms, **told.answer.timings_ms}
        return replace(told, answer=replace(told.answer, timings_ms=timings))

    def _pace(self, model: str) -> float:
        """Real seconds for an estimated one, as the workers said lately.

        What was said a while ago is forgotten, or one busy moment would send all to fit workers for ever.
        """
        told_at, pace = self._paces.get(model, (-math.inf, 1.0))
        return min(pace, PACE_MOST) if time.monotonic() - told_at < PACE_S else 1.0

    def _check_wait(self, estimate_s: float, deadline: float) -> None:
        """Refuse what would not be done in time; raises Overloaded, DeadlinePassed, Unavailable (no fit worker)."""
        workers = self._catalogue.workers.fit()
        if not workers:
            raise Unavailable("no fit worker is registered", retry_after_s=2)
        left_s = deadline - time.monotonic()
        if estimate_s > left_s:
            raise DeadlinePassed(
                f"this one-shot is estimated to take {estimate_s:.1f} s; give it a later deadline or fit a dataset"
            )
        free_s = min(self._busy_s(worker) for worker in workers)
        wait_s = free_s + self._lane.waiting() * estimate_s / len(workers)
        if wait_s + estimate_s > left_s:
            raise Overloaded(
                f"every fit worker is busy for {wait_s:.0f} s, longer than the deadline allows",
                retry_after_s=max(1.0, round(wait_s)),
            )

    def _busy_s(self, worker: FitWorker) -> float:
        """Seconds until a fit worker has ended its job; 0 when it has none or nothing is known of it."""
        job = self._catalogue.jobs.find(worker.job) if worker.job else None
        if job is None:
            return 0.0
        return Forecaster(self._catalogue).of(job, int(time.time() * 1000)).eta_s or 0.0

    def _model(self, body: Mapping[str, Any]) -> tuple[ModelSpec, dict[str, Any]]:
        spec = self._registry.spec(_text("model", body.get("model")) or self._registry.default_model())
        given = body.get("options")
        if given is not None and not isinstance(given, Mapping):
            raise _wrong("options", "must be an object")
        own = {"n_estimators": self._settings.one_shot_estimators, **AS_COMPUTED}
        options = {name: value for name, value in own.items() if name in spec.options} | dict(given or {})
        for name, value in AS_COMPUTED.items():
            if options.get(name) == AUTO:
                options[name] = value
            if options.get(name, value) != value:
                raise _wrong(f"options.{name}", f"must be {value}; a fitted dataset can have others")
        return spec, validate_options(spec, options)

    def _tables(self, body: Mapping[str, Any], spec: ModelSpec, overrides: Overrides) -> OneShotTables:
        settings = self._settings
        limits = OneShotLimits(
            settings.one_shot_max_rows, settings.one_shot_max_columns, settings.one_shot_max_cells
        )
        tables = read_one_shot(body, _text("task", body.get("task")), limits, overrides)
        check_table(spec, tables.train.num_rows, len(tables.schema.columns), tables.target)
        return tables


def _levels(given: Any) -> tuple[float, ...]:
    if given is None:
        return ()
    if not isinstance(given, list) or any(
        isinstance(level, bool) or not isinstance(level, int | float) for level in given
    ):
        raise _wrong("quantiles", "must be a list of levels, such as [0.05, 0.5, 0.95]")
    return tuple(float(level) for level in given)


def _text(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise _wrong(name, "must be text")
    return value or None


def _wrong(field: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {message}", errors=[FieldError(field, message)])
