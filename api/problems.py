"""One mapping from errors to `application/problem+json` (RFC 9457); routes only raise."""

from __future__ import annotations

import math
from typing import Any

import orjson
from flask import Flask, Response, current_app, g, request
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from common import logs
from common.errors import (
    InternalError,
    InvalidRequest,
    MalformedBody,
    NotFound,
    StorageFull,
    TabrelayError,
    TooLarge,
    UnsupportedMediaType,
)
from common.files import is_full

log = logs.get("api")

#: What werkzeug itself raises, in our words.
_WERKZEUG: dict[int, type[TabrelayError]] = {
    400: MalformedBody,
    404: NotFound,
    413: TooLarge,
    415: UnsupportedMediaType,
    422: InvalidRequest,
}


def problem_body(error: TabrelayError, request_id: str) -> dict[str, Any]:
    """The members of an error's problem."""
    return {
        **error.facts,
        "type": f"urn:tabrelay:problem:{error.code}",
        "title": error.title,
        "status": error.status,
        "code": error.code,
        "detail": error.detail,
        "errors": [{"field": fault.field, "message": fault.message} for fault in error.errors],
        "request_id": request_id,
    }


def problem(error: TabrelayError) -> Response:
    """The response that says this error."""
    body = problem_body(error, g.get("request_id", ""))
    response = Response(orjson.dumps(body), status=error.status, content_type="application/problem+json")
    if error.retry_after_s is not None or error.status in (429, 503, 504):
        response.headers["Retry-After"] = str(math.ceil(error.retry_after_s or 1))
    return response


def _http_problem(error: HTTPException) -> Response:
    status = error.code or 500
    if isinstance(error, RequestEntityTooLarge):
        limit, size = current_app.config["MAX_CONTENT_LENGTH"], request.content_length
        return problem(
            TooLarge(f"the body has {size or 'more'} bytes, the most is {limit}", limit=limit, size=size)
        )
    cls = _WERKZEUG.get(status)
    if cls is not None:
        return problem(cls(error.description))
    other = TabrelayError(error.description)
    response = problem(other)
    response.status_code = status
    response.data = orjson.dumps(
        {
            **orjson.loads(response.data),
            "status": status,
            "title": error.name,
            "code": error.name.lower().replace(" ", "_"),
        }
    )
    if status == 405:
        response.headers["Allow"] = ", ".join(getattr(error, "valid_methods", None) or ())
    return response


def install(app: Flask) -> None:
    """Have the application answer every error as a problem."""

    def ours(error: TabrelayError) -> Response:
        if error.status >= 500:
            log.warning("refused", code=error.code, detail=error.detail)
        return problem(error)

    def unexpected(error: Exception) -> Response:
        if isinstance(error, OSError) and is_full(error):
            log.error("the disk is full")
            return problem(StorageFull("there is no room left for uploads"))
        log.exception("request failed")
        return problem(InternalError())

    app.register_error_handler(TabrelayError, ours)
    app.register_error_handler(HTTPException, _http_problem)
    app.register_error_handler(Exception, unexpected)
