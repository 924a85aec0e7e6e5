"""Reading requests: request ids, JSON answers, query fields, and bodies that go straight to disk."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from typing import IO, Any

import orjson
from flask import Flask, Request, Response, current_app, g, request

from api.services import services
from common.errors import FieldError, InvalidRequest, MalformedBody, TooLarge
from common.names import new_id

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
COPY_BYTES = 1024**2
#: How much of a refused body is read, and for how long.
DRAIN_BYTES = 256 * 1024**2
DRAIN_S = 10.0
#: The tenant of a deployment without keys.
DEFAULT_TENANT = "default"


class UploadRequest(Request):
    """A request whose multipart files are written to the uploads folder, never to memory."""

    def _get_file_stream(
        self,
        total_content_length: int | None,
        content_type: str | None,
        filename: str | None = None,
        content_length: int | None = None,
    ) -> IO[bytes]:
        path = new_upload()
        file = path.open("w+b")
        g.setdefault("upload_files", []).append(file)
        return file


def install(app: Flask) -> None:
    """Give each request an id and a start time; log each answer; remove what uploads left."""
    app.request_class = UploadRequest

    @app.before_request
    def begin() -> None:
        given = request.headers.get("X-Request-Id", "")
        g.request_id = given if _REQUEST_ID.fullmatch(given) else new_id()
        g.arrived = time.monotonic()

    @app.after_request
    def finish(response: Response) -> Response:
        if response.status_code >= 400:
            drain()
        response.headers["X-Request-Id"] = g.get("request_id", "")
        response.headers["X-Content-Type-Options"] = "nosniff"
        if request.path not in ("/livez", "/readyz"):
            current_app.extensions["log"].info(
                "request",
                method=request.method,
                path=request.path,
                status=response.status_code,
                ms=round((time.monotonic() - g.get("arrived", time.monotonic())) * 1000, 2),
                request_id=g.get("request_id", ""),
            )
        return response

    @app.teardown_request
    def clean(_: BaseException | None) -> None:
        for path in g.pop("uploads", ()):
            path.unlink(missing_ok=True)
        for file in g.pop("upload_files", ()):
            # One that a full disk cut short is closed by nobody else, and holds its blocks until then.
            with contextlib.suppress(OSError):
                file.close()


def tenant() -> str:
    """Whose request this is."""
    return DEFAULT_TENANT


def new_upload() -> Path:
    """A fresh path in the uploads folder; removed at the request's end unless somebody took the file."""
    path = services().folder.uploads() / f".{new_id()}"
    g.setdefault("uploads", []).append(path)
    return path


def answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    body = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, status=status, content_type="application/json", headers=headers)


def body_to_file(most: int) -> Path:
    """The whole body as a file in the uploads folder; raises TooLarge as soon as it passes `most` bytes."""
    if request.content_length is not None and request.content_length > most:
        raise TooLarge(
            f"the body has {request.content_length} bytes, the most is {most}",
            limit=most,
            size=request.content_length,
        )
    path = new_upload()
    size = 0
    with path.open("wb") as file:
        while chunk := request.stream.read(COPY_BYTES):
            size += len(chunk)
            if size > most:
                raise TooLarge(f"the body has more than {most} bytes", limit=most, size=size)
            file.write(chunk)
    return path


def body_bytes(most: int) -> bytes:
    """The whole body in memory; raises TooLarge when it has more than `most` bytes."""
    if request.content_length is not None and request.content_length > most:
        raise TooLarge(
            f"the body has {request.content_length} bytes, the most is {most}",
            limit=most,
            size=request.content_length,
        )
    body = request.stream.read(most + 1)
    if len(body) > most:
        raise TooLarge(f"the body has more than {most} bytes", limit=most, size=len(body))
    return body


def drain() -> None:
    """Read what the client still sends, within bounds: closing on unread data resets the connection, and the client
    would see that instead of the answer.
    """
    if request.content_length is None and "chunked" not in request.headers.get("Transfer-Encoding", ""):
        return
    stream, left, until = request.environ["wsgi.input"], DRAIN_BYTES, time.monotonic() + DRAIN_S
    while left > 0 and time.monotonic() < until:
        chunk = stream.read(min(COPY_BYTES, left))
        if not chunk:
            return
        left -= len(chunk)


def json_object(body: bytes) -> dict[str, Any]:
    """A small JSON object; raises MalformedBody."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise MalformedBody(f"the body is not JSON: {error}; NaN is written as null") from error
    if not isinstance(value, dict):
        raise MalformedBody("the body must be a JSON object")
    return value


def query_int(name: str, default: int | None, least: int, most: int) -> int | None:
    """A whole number of the query; raises InvalidRequest that names the range."""
    text = request.args.get(name)
    if text is None or text == "":
        return default
    if not (text.isascii() and text.isdigit()) or not least <= int(text[:18]) <= most:
        raise InvalidRequest(
            f"{name} must be a whole number, {least} to {most}",
            errors=[FieldError(name, f"must be a whole number, {least} to {most}")],
        )
    return int(text)


def query_numbers(name: str) -> tuple[float, ...]:
    """Numbers of the query, comma-separated; raises InvalidRequest."""
    text = request.args.get(name, "")
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise InvalidRequest(
            f"{name} must be numbers, such as 0.05,0.5,0.95",
            errors=[FieldError(name, "must be numbers, such as 0.05,0.5,0.95")],
        ) from error


def query_number(name: str) -> float | None:
    """One number of the query; raises InvalidRequest."""
    numbers = query_numbers(name)
    if len(numbers) > 1:
        raise InvalidRequest(f"{name} must be one number", errors=[FieldError(name, "must be one number")])
    return numbers[0] if numbers else None


def prefer_wait_s(most: float) -> float:
    """Seconds of a `Prefer: wait=N` header, at most `most`; 0 without one."""
    for part in request.headers.get("Prefer", "").split(","):
        name, _, value = part.strip().partition("=")
        if name == "wait" and value.strip().isdigit():
            return min(float(value), most)
    return 0.0
