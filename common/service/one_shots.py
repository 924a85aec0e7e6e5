"""One-shot predicts: check, estimate, place, answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from common.admission import estimate_one_shot_s
from common.errors import FieldError, InvalidRequest
from common.models.protocol import ModelSpec
from common.models.registry import Registry, check_table, validate_options
from common.relay.one_shot import OneShotAnswer, OneShotQuestion, OneShotRelay
from common.relay.wire import encode_rows
from common.service.fits import context_key
from common.service.predicts import DEFAULT_QUANTILES, deadline_s, output_of
from common.settings import Settings
from common.tables.one_shot import OneShotLimits, OneShotTables, read_one_shot


@dataclass(frozen=True)
class OneShotRequest:
    """A one-shot as a transport read it."""

    tenant: str
    body: Mapping[str, Any]
    request_id: str
    arrived: float  # time.monotonic()
    deadline_s: float | None = None


@dataclass(frozen=True)
class OneShotTold:
    """An answer and what it is of."""

    told: OneShotAnswer
    spec: ModelSpec
    task: str
    output: str


class OneShotService:
    """Answers rows from a training table that comes with them."""

    def __init__(self, relay: OneShotRelay, registry: Registry, settings: Settings) -> None:
        self._relay = relay
        self._registry = registry
        self._settings = settings

    def close(self) -> None:
        """Close the connections to workers."""
        self._relay.close()

    def predict(self, request: OneShotRequest) -> OneShotTold:
        """The answer.

        Raises InvalidRequest, InvalidTable, InvalidTarget, InvalidRows and TooLarge for what was sent, ModelNotFound,
        ModelNotReady, WorkerBusy, NoPredictWorker and DeadlinePassed.
        """
        body = request.body
        deadline = request.arrived + deadline_s(request.deadline_s, self._settings)
        spec, options = self._model(body)
        tables = self._tables(body, spec)
        target = tables.target
        levels = _levels(body.get("quantiles"))
        output = output_of(_text("output", body.get("output")), levels, target.task)
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
        )
        told = self._relay.ask(question, train, rows, deadline)
        return OneShotTold(told, spec, target.task, output)

    def _model(self, body: Mapping[str, Any]) -> tuple[ModelSpec, dict[str, Any]]:
        spec = self._registry.spec(_text("model", body.get("model")) or self._registry.default_model())
        given = body.get("options")
        if given is not None and not isinstance(given, Mapping):
            raise _wrong("options", "must be an object")
        own = {"n_estimators": self._settings.one_shot_estimators} if "n_estimators" in spec.options else {}
        return spec, validate_options(spec, own | dict(given or {}))

    def _tables(self, body: Mapping[str, Any], spec: ModelSpec) -> OneShotTables:
        settings = self._settings
        limits = OneShotLimits(
            settings.one_shot_max_rows, settings.one_shot_max_columns, settings.one_shot_max_cells
        )
        tables = read_one_shot(body, _text("task", body.get("task")), limits)
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
