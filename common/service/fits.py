"""Submitting a fit: check, admit, queue, wake."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import orjson
from blake3 import blake3

from common.admission import estimate_fit_s, settle
from common.catalogue import Catalogue, Job
from common.catalogue.jobs import Submitted
from common.catalogue.records import JobState, NewJob, Priority, Upload
from common.errors import CatalogueUnavailable, FieldError, InvalidRequest, TooLarge
from common.files import DataFolder, bury
from common.models.protocol import ModelSpec
from common.models.registry import SCHEMA, Registry, check_table, validate_options
from common.names import dataset_name, new_id
from common.settings import Settings
from common.tables.canonical import file_digest
from common.tables.child import ParserChild
from common.tables.schema import TableSchema
from common.tables.shape import TableLimits
from common.tables.training import ParsedTable

TASKS = ("classification", "regression")
#: Largest time to live of a dataset: ten years.
TTL_MOST_S = 10 * 366 * 86400.0
#: A job with a longer schema shows none: the catalogue holds tens of thousands of jobs. Its dataset shows it.
SCHEMA_MOST_BYTES = 32 * 1024

#: Wakes a fit worker of a queue; the transport brings it, the core knows no Celery.
Wake = Callable[[str], None]


@dataclass(frozen=True)
class FitRequest:
    """A fit as a transport read it; the table is still a raw file, which the service takes over."""

    tenant: str
    path: Path
    format: str
    dataset: Any = None
    target: str | None = None
    model: str | None = None
    task: str | None = None
    options: Any = None
    encoding: str | None = None
    priority: Any = None
    deadline_s: Any = None
    ttl_s: Any = None
    idempotency_key: str = ""


@dataclass(frozen=True)
class Terms:
    """When a fit may run and how long its result lives."""

    priority: str
    deadline_s: float
    ttl_s: float


def table_limits(settings: Settings) -> TableLimits:
    """Limits of any table, whatever its model."""
    return TableLimits(settings.max_rows, settings.max_columns, settings.max_cells)


def context_key(
    *, table: str, target: str, task: str, spec: ModelSpec, weights: str, options: Mapping[str, Any]
) -> str:
    """What makes two fits the same: blake3 over everything that decides the context's content.

    `options` are settled: an `auto` says nothing of the content.
    """
    parts = {
        "table": table,
        "target": target,
        "task": task,
        "model": spec.name,
        "weights": weights,
        "options": dict(options),
        "state_version": spec.state_version,
    }
    if spec.libraries:
        parts["libraries"] = {name: installed_version(name) for name in spec.libraries}
    return str(blake3(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)).hexdigest())


def shown_schema(schema: TableSchema) -> str:
    """The schema as a job shows it, JSON; "" when it is too long for that."""
    text = orjson.dumps(schema.encode()).decode()
    return text if len(text) <= SCHEMA_MOST_BYTES else ""


def queue_of(estimate_s: float, settings: Settings) -> str:
    """The queue of a fit by its estimated seconds."""
    return "fit.large" if estimate_s > settings.large_fit_s else "fit.small"


class FitService:
    """Accepts fits and answers about jobs."""

    def __init__(
        self, catalogue: Catalogue, registry: Registry, parser: ParserChild, settings: Settings, wake: Wake
    ) -> None:
        self._catalogue = catalogue
        self._registry = registry
        self._parser = parser
        self._settings = settings
        self._folder = DataFolder(settings)
        self._wake = wake

    def submit(self, request: FitRequest) -> Submitted:
        """Queue a fit; `request.path` is consumed whatever happens.

        Raises what makes the table, target or options unusable (400, 413, 422), Conflict (another request with the same
        idempotency key is under way), ModelNotReady, QueueFull, CatalogueUnavailable.
        """
        try:
            self._catalogue.ping()
            if request.dataset is not None:
                dataset_name(request.dataset)
            self._terms(request, {})
            with self._catalogue.jobs.alone(request.tenant, request.idempotency_key):
                if (
                    request.format == "json"
                    or request.path.stat().st_size <= self._settings.max_inline_parse_bytes
                ):
                    submitted = self._submit_parsed(request)
                else:
                    submitted = self._submit_raw(request)
        finally:
            request.path.unlink(missing_ok=True)
        if submitted.outcome == "accepted":
            self._wake(submitted.job.queue)
        return submitted

    def _submit_parsed(self, request: FitRequest) -> Submitted:
        size = request.path.stat().st_size
        if size > self._settings.max_inline_parse_bytes:
            limit = self._settings.max_inline_parse_bytes
            raise TooLarge(
                f"a JSON fit may have {limit} bytes, this one has {size}; send a Parquet or CSV file",
                limit=limit,
                size=size,
            )
        parsed = self._parser.parse_training(
            request.path,
            request.format,
            request.target,
            self._task(request.task),
            self._folder.uploads(),
            table_limits(self._settings),
            encoding=request.encoding,
            schema=request.options.get(SCHEMA) if isinstance(request.options, Mapping) else None,
        )
        try:
            inside = parsed.request
            dataset = dataset_name(request.dataset if request.dataset is not None else inside.get("dataset"))
            model = request.model or self._text("model", inside.get("model"))
            options = request.options if request.options is not None else inside.get("options")
            spec, chosen = self._model(model, options)
            check_table(spec, parsed.rows, parsed.columns - 1, parsed.target)
            return self._accept(request, parsed, dataset, spec, chosen, self._terms(request, inside))
        finally:
            parsed.path.unlink(missing_ok=True)

    def _accept(
        self,
        request: FitRequest,
        parsed: ParsedTable,
        dataset: str,
        spec: ModelSpec,
        options: Mapping[str, Any],
        terms: Terms,
    ) -> Submitted:
        target = parsed.target
        weights = self._registry.weights(spec.name, target.task)
        shape = {"rows": parsed.rows, "columns": parsed.columns - 1, "classes": len(target.classes)}
        key = context_key(
            table=parsed.table_digest,
            target=target.name,
            task=target.task,
            spec=spec,
            weights=weights.digest,
            options=settle(spec, options, **shape, settings=self._settings),
        )
        estimate_s = estimate_fit_s(spec, parsed.rows, parsed.columns - 1, options)
        new = NewJob(
            id=new_id(),
            tenant=request.tenant,
            dataset=dataset,
            model=spec.name,
            task=target.task,
            target=target.name,
            options=options,
            queue=queue_of(estimate_s, self._settings),
            key=key,
            table=parsed.table_digest,
            rows=parsed.rows,
            columns=parsed.columns - 1,
            schema=shown_schema(parsed.schema),
            estimate_s=estimate_s,
            **asdict(terms),
        )
        place = self._folder.table(request.tenant, parsed.table_digest)
        with self._folder.locked(request.tenant):
            known = place.exists()
            self._folder.keep_table(request.tenant, parsed.table_digest, parsed.path)
            try:
                submitted = self._catalogue.jobs.submit(
                    new, idempotency_key=request.idempotency_key, fingerprint=f"{dataset}/{key}"
                )
                # An earlier answer was repeated: its job and dataset may be gone, and their table with them.
                if submitted.outcome == "accepted" or self._catalogue.datasets.is_referred(
                    request.tenant, "table", parsed.table_digest
                ):
                    known = True
                return submitted
            except CatalogueUnavailable:
                known = True  # it may be accepted although the answer is lost; the janitor removes what is nobody's
                raise
            finally:
                if not known:
                    place.unlink(missing_ok=True)

    def _submit_raw(self, request: FitRequest) -> Submitted:
        """A file too big to parse before the answer: the fit worker parses it, with the same errors."""
        dataset = dataset_name(request.dataset)
        if not request.target:
            raise InvalidRequest(
                "no target is named", errors=[FieldError("target", "name the column to predict")]
            )
        spec, options = self._model(request.model, request.options)
        upload = Upload(new_id(), request.format, request.encoding)
        new = NewJob(
            id=upload.id,
            tenant=request.tenant,
            dataset=dataset,
            model=spec.name,
            task=self._task(request.task) or "",
            target=request.target,
            options=options,
            queue="fit.large",
            upload=upload,
            **asdict(self._terms(request, {})),
        )
        fingerprint = ""
        if request.idempotency_key:
            fingerprint = f"{dataset}/{request.target}/{spec.name}/{new.task}/{file_digest(request.path)}"
        kept = self._folder.upload(upload.id)
        os.rename(request.path, kept)
        try:
            submitted = self._catalogue.jobs.submit(
                new, idempotency_key=request.idempotency_key, fingerprint=fingerprint
            )
        except CatalogueUnavailable:
            raise  # it may be accepted although the answer is lost; the janitor removes what is nobody's
        except BaseException:
            kept.unlink(missing_ok=True)
            raise
        if submitted.outcome != "accepted":
            kept.unlink(missing_ok=True)
        return submitted

    def cancel(self, tenant: str, job_id: str) -> Job:
        """Cancel a job and remove the files that only it needed; raises JobNotFound, Conflict."""
        job = self._catalogue.jobs.cancel(tenant, job_id)
        if job.state is JobState.CANCELLED:
            if job.upload is not None:
                self._folder.upload(job.upload.id).unlink(missing_ok=True)
            bury(self._folder, self._catalogue, tenant)
        return job

    def wait(self, tenant: str, job_id: str, wait_s: float) -> Job:
        """The job as soon as it has ended, or as it stands after `wait_s`."""
        until = time.monotonic() + wait_s
        while True:
            job = self._catalogue.jobs.get(tenant, job_id)
            left = until - time.monotonic()
            if job.state.ended or left <= 0:
                return job
            time.sleep(min(0.1, left))

    def _model(self, name: str | None, options: Any) -> tuple[ModelSpec, dict[str, Any]]:
        spec = self._registry.spec(name or self._registry.default_model())
        if options is not None and not isinstance(options, Mapping):
            raise InvalidRequest(
                "options must be an object", errors=[FieldError("options", "must be an object")]
            )
        return spec, validate_options(spec, options or {})

    def _terms(self, request: FitRequest, inside: Mapping[str, Any]) -> Terms:
        """Priority, deadline and time to live as given beside the table, or in a JSON body."""
        given = {
            name: inside.get(name) if getattr(request, name) is None else getattr(request, name)
            for name in ("priority", "deadline_s", "ttl_s")
        }
        priority = given["priority"] or Priority.INTERACTIVE
        if priority not in list(Priority):
            raise _wrong("priority", f"must be one of {', '.join(Priority)}")
        return Terms(
            str(priority),
            _seconds("deadline_s", given["deadline_s"], self._settings.max_deadline_s),
            _seconds("ttl_s", given["ttl_s"], TTL_MOST_S),
        )

    @staticmethod
    def _task(task: str | None) -> str | None:
        if task and task not in TASKS:
            raise InvalidRequest(
                f"unknown task {task!r}", errors=[FieldError("task", f"must be one of {', '.join(TASKS)}")]
            )
        return task or None

    @staticmethod
    def _text(name: str, value: Any) -> str | None:
        if value is not None and not isinstance(value, str):
            raise InvalidRequest(f"{name} must be text", errors=[FieldError(name, "must be text")])
        return value


def _seconds(name: str, given: Any, most: float) -> float:
    """A number of seconds, as JSON or as a form field's text; 0 when none is given."""
    if given is None or given == "":
        return 0.0
    try:
        seconds = float(given) if isinstance(given, int | float | str) and not isinstance(given, bool) else 0
    except ValueError:
        seconds = 0
    if not 0 < seconds <= most:
        raise _wrong(name, f"must be a number of seconds above 0 and at most {most:.0f}, such as 600")
    return float(seconds)


def _wrong(field: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {message}", errors=[FieldError(field, message)])
