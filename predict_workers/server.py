"""The predict worker's HTTP server: `POST /predict`, `POST /once`, `POST /prefetch`, `GET /readyz`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson

from common import logs
from common.errors import InternalError, InvalidRequest, NotFound, TabrelayError, TooLarge, Unavailable
from common.models.protocol import PredictOptions
from common.relay.wire import JSON, NUMBERS, Answer, Question, decode_rows
from common.settings import Settings
from common.tables.inline import features_of_json
from common.tables.json_reader import loads_json
from common.tables.shape import predict_limits
from predict_workers.batcher import Batcher
from predict_workers.one_shot import OneShots
from predict_workers.residency import Residency

log = logs.get("predict")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

#: Bodies above this are decoded beside the event loop.
DECODE_INLINE_BYTES = 256 * 1024


class Disconnected(Exception):
    """The caller went away; its rows are dropped."""


class PredictServer:
    """An ASGI application. Plain ASGI because each layer between socket and batcher is paid by every predict."""

    def __init__(
        self, settings: Settings, name: str, residency: Residency, batcher: Batcher, one_shots: OneShots
    ) -> None:
        self._settings = settings
        self._name = name
        self._residency = residency
        self._batcher = batcher
        self._one_shots = one_shots
        self._limits = predict_limits(settings)
        self.ready = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        if scope["type"] != "http":
            return
        try:
            status, kind, body = await self._answer(scope, receive)
        except Disconnected:
            return
        except TabrelayError as error:
            status, kind, body = error.status, b"application/json", orjson.dumps(error.encode())
        except Exception:
            log.exception("request failed", path=scope["path"])
            fault = InternalError()
            status, kind, body = fault.status, b"application/json", orjson.dumps(fault.encode())
        await send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(b"content-type", kind), (b"content-length", str(len(body)).encode())],
            }
        )
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[int, bytes, bytes]:
        route = scope["method"], scope["path"]
        if route == ("POST", "/predict"):
            return await self._predict(scope, receive)
        if route == ("POST", "/once"):
            return await self._once(receive)
        if route == ("POST", "/prefetch"):
            question = self._question(scope)
            await self._residency.get(question.tenant, question.context)
            return 204, b"text/plain", b""
        if route == ("GET", "/readyz"):
            if not self.ready:
                raise Unavailable("the weights are being loaded", retry_after_s=1)
            return 200, b"application/json", b'{"ready":true}'
        raise NotFound

    async def _predict(self, scope: Scope, receive: Receive) -> tuple[int, bytes, bytes]:
        arrived = time.monotonic()
        question = self._question(scope)
        deadline = arrived + question.deadline_s
        self._batcher.admit(0)
        body = await self._body(receive)
        plain = question.rows == JSON
        rows = await self._off_loop(len(body), loads_json if plain else decode_rows, body)
        parsed = time.monotonic()
        context = await self._residency.get(question.tenant, question.context)
        loaded = time.monotonic()
        if plain:
            features = features_of_json(rows, context.schema, self._limits)
        else:
            features = await self._off_loop(len(body), context.schema.features, rows)
        prepared = time.monotonic()
        answering = asyncio.ensure_future(
            self._batcher.predict(
                context, features, PredictOptions(question.quantiles, question.point), deadline
            )
        )
        prediction, work = await until_disconnect(answering, receive)
        answered = time.monotonic()
        started = work.started or answered
        timings = {
            "parse": (parsed - arrived) + (prepared - loaded),
            "load": loaded - parsed,
            "queue": max(answered - prepared - work.forward_s, started - work.arrived),
            "forward": work.forward_s,
        }
        answer = Answer(
            prediction=prediction,
            context=question.context,
            worker=self._name,
            target=context.target.encode(),
            quantiles=question.quantiles,
            timings_ms={name: round(seconds * 1000, 3) for name, seconds in timings.items()},
        )
        return 200, NUMBERS.encode(), await self._off_loop(len(prediction) * 64, answer.encode)

    async def _once(self, receive: Receive) -> tuple[int, bytes, bytes]:
        arrived = time.monotonic()
        body = await self._body(receive)
        told = await until_disconnect(asyncio.ensure_future(self._one_shots.answer(body, arrived)), receive)
        return 200, b"application/octet-stream", told.encode()

    @staticmethod
    async def _off_loop(size: int, function: Callable[..., Any], *args: Any) -> Any:
        """Small work at once; large work on a thread, so that other requests are not held up."""
        if size <= DECODE_INLINE_BYTES:
            return function(*args)
        return await asyncio.to_thread(function, *args)

    @staticmethod
    def _question(scope: Scope) -> Question:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            return Question.read(headers)
        except (KeyError, ValueError) as error:
            raise InvalidRequest(f"the request's headers are not those of a predict: {error}") from error

    async def _body(self, receive: Receive) -> bytes:
        chunks: list[bytes] = []
        size = 0
        most = self._settings.max_predict_bytes * 4  # JSON numbers may grow on their way to Arrow
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > most:
                raise TooLarge(f"the rows take more than {most} bytes", limit=most, size=size)
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)


async def until_disconnect(answering: asyncio.Future[Any], receive: Receive) -> Any:
    """The answer, or Disconnected as soon as the caller goes away."""
    gone = asyncio.ensure_future(receive())
    try:
        await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return answering.result()
        answering.cancel()
        raise Disconnected
    finally:
        gone.cancel()
