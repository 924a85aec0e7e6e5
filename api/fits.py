"""`POST /v1/fits` and the jobs that it starts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from flask import Blueprint, Response, g, request

from api import schemas, views
from api.openapi import documented
from api.requests import answer, body_to_file, prefer_wait_s, query_int, tenant
from api.services import services
from common.catalogue.records import Job, JobState
from common.errors import FieldError, InvalidRequest, TooLarge, UnsupportedMediaType
from common.service.fits import FitRequest
from common.service.forecast import Forecaster
from common.tables.parse import detect_format

blueprint = Blueprint("fits", __name__, url_prefix="/v1")

#: Seconds after which a client should look at a job again.
POLL_S = 1
_FIELDS = ("dataset", "target", "model", "task", "options", "encoding", "priority", "deadline_s", "ttl_s")


@blueprint.post("/fits")
@documented(
    "fits",
    {"200": schemas.Job, "202": schemas.Job},
    ("400", "403", "409", "413", "415", "422", "429", "503", "507"),
    json=schemas.Fit,
)
def submit() -> Response:
    """Queue a fit; 202 with the job, or 200 with the finished one when the same is already current."""
    with receiving():
        fit = _received()
    submitted = services().fits.submit(fit)
    job = submitted.job
    wait_s = prefer_wait_s(services().settings.max_wait_s)
    if wait_s and not job.state.ended:
        job = services().fits.wait(tenant(), job.id, wait_s)
    done = job.state is JobState.SUCCEEDED
    return _job_answer(job, 200 if done else 202)


@contextmanager
def receiving() -> Iterator[None]:
    """Room for the body while it comes in; one that does not tell its length may be as long as any."""
    held = services()
    size = request.content_length
    size = held.settings.max_upload_bytes if size is None else min(size, held.settings.max_upload_bytes)
    held.uploads.take(size)
    try:
        yield
    finally:
        held.uploads.give_back(size)


def _received() -> FitRequest:
    kind = request.mimetype
    if kind == "multipart/form-data":
        return _multipart()
    if kind == "application/json":
        path = body_to_file(services().settings.max_inline_parse_bytes)
        return FitRequest(tenant(), path, "json", idempotency_key=_idempotency_key())
    raise UnsupportedMediaType(
        f"{kind or 'no content type'} is not accepted here; send multipart/form-data with a `file`, or application/json"
    )


@blueprint.get("/jobs")
@documented("fits", {"200": schemas.Jobs}, ("422", "503"), query=schemas.JobsQuery)
def jobs() -> Response:
    """Jobs, newest first; `state`, `dataset`, `limit` and `cursor` narrow the list."""
    state = request.args.get("state") or None
    if state is not None and state not in list(JobState):
        known = ", ".join(JobState)
        raise InvalidRequest(
            f"unknown state {state!r}", errors=[FieldError("state", f"must be one of {known}")]
        )
    found, cursor = services().catalogue.jobs.page(
        tenant(),
        state=state,
        dataset=request.args.get("dataset") or None,
        limit=query_int("limit", 50, 1, 500) or 50,
        cursor=request.args.get("cursor") or None,
    )
    return answer({"jobs": _shown(found), "next": cursor})


@blueprint.get("/jobs/<job_id>")
@documented("fits", {"200": schemas.Job}, ("404", "503"))
def job(job_id: str) -> Response:
    """One job; `Prefer: wait=N` answers as soon as it has ended, or after N seconds."""
    wait_s = prefer_wait_s(services().settings.max_wait_s)
    return _job_answer(services().fits.wait(tenant(), job_id, wait_s), 200)


@blueprint.delete("/jobs/<job_id>")
@documented("fits", {"200": schemas.Job}, ("404", "409", "503"))
def cancel(job_id: str) -> Response:
    """Cancel a job: at once while it waits, at the model's next block while it runs."""
    return _job_answer(services().fits.cancel(tenant(), job_id), 200)


@blueprint.post("/jobs/<job_id>/retry")
@documented("fits", {"202": schemas.Job}, ("404", "409", "429", "503"))
def retry(job_id: str) -> Response:
    """Fit a failed or cancelled job's table once more, as a new job."""
    return _job_answer(services().refits.retry(tenant(), job_id).job, 202)


@blueprint.get("/dead-letters")
@documented("fits", {"200": schemas.Jobs}, ("503",))
def dead_letters() -> Response:
    """Jobs that failed because their worker died each time, newest first; their tables are kept for a retry."""
    return answer({"jobs": _shown(services().catalogue.jobs.dead(tenant())), "next": None})


def _job_answer(job: Job, status: int) -> Response:
    headers = {"Location": f"/v1/jobs/{job.id}"}
    if not job.state.ended:
        headers["Retry-After"] = str(POLL_S)
    schema = orjson.loads(job.schema) if job.schema else None
    return answer({**_shown([job])[0], "schema": schema}, status, headers)


def _shown(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    outlook, now_ms = Forecaster(services().catalogue).of, int(time.time() * 1000)
    return [views.job(job, outlook(job, now_ms)) for job in jobs]


def _multipart() -> FitRequest:
    form = request.form
    file = request.files.get("file")
    if file is None:
        raise InvalidRequest(
            "there is no file", errors=[FieldError("file", "send the table as the part named `file`")]
        )
    unknown = [name for name in form if name not in _FIELDS]
    if unknown:
        raise InvalidRequest(
            f"unknown field {unknown[0]!r}",
            errors=[FieldError(name, f"is not a field; known are {', '.join(_FIELDS)}") for name in unknown],
        )
    if not form.get("dataset"):
        raise InvalidRequest(
            "no dataset is named", errors=[FieldError("dataset", "name the dataset, such as churn")]
        )
    format = detect_format(file.filename, file.mimetype)
    stream: Any = file.stream
    stream.flush()
    path = Path(stream.name)
    file.close()
    limit = services().settings.max_upload_bytes
    size = os.path.getsize(path)
    if size > limit:  # the request's own cap counts the other parts too
        raise TooLarge(f"the file has {size} bytes, the most is {limit}", limit=limit, size=size)
    return FitRequest(
        tenant=tenant(),
        path=path,
        format=format,
        dataset=form["dataset"],
        target=form.get("target"),
        model=form.get("model") or None,
        task=form.get("task") or None,
        options=_options(form.get("options")),
        encoding=form.get("encoding") or None,
        priority=form.get("priority") or None,
        deadline_s=form.get("deadline_s") or None,
        ttl_s=form.get("ttl_s") or None,
        idempotency_key=_idempotency_key(),
    )


def _options(text: str | None) -> Any:
    if not text:
        return None
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(
            "options is not JSON",
            errors=[FieldError("options", 'must be a JSON object, such as {"n_estimators": 8}')],
        ) from error


def _idempotency_key() -> str:
    key = request.headers.get("Idempotency-Key", "")
    if len(key) > 128 or not key.isprintable():
        raise InvalidRequest(
            "the Idempotency-Key is too long",
            errors=[FieldError("Idempotency-Key", "at most 128 printable characters")],
        )
    g.idempotency_key = key
    return key
