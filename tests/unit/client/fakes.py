"""A scripted service: each request takes the next answer; the clock only moves when the client sleeps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tabrelay.client import Client, Pace

Answer = httpx.Response | Exception | Callable[[httpx.Request], httpx.Response]


def answer(status: int = 200, data: Any = None, **headers: str) -> httpx.Response:
    """A JSON answer; header names are written with underscores."""
    return httpx.Response(status, json=data, headers={n.replace("_", "-"): v for n, v in headers.items()})


def problem(status: int, code: str, detail: str = "no", **more: Any) -> httpx.Response:
    retry_after = more.pop("retry_after", None)
    headers = {"Content-Type": "application/problem+json"}
    if retry_after is not None:
        headers["Retry-After"] = str(retry_after)
    body = {"type": "about:blank", "title": "t", "status": status, "code": code, "detail": detail, **more}
    return httpx.Response(status, json=body, headers=headers)


def job(state: str = "queued", **more: Any) -> dict[str, Any]:
    return {"id": "j1", "state": state, "dataset": "churn", **more}


class Pieces(httpx.SyncByteStream):
    """A body that comes in pieces; an exception among them cuts it off."""

    def __init__(self, *pieces: bytes | Exception) -> None:
        self.pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        for piece in self.pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece


def stream(*pieces: bytes | Exception) -> httpx.Response:
    """An answer of server-sent events."""
    return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, stream=Pieces(*pieces))


def event(name: str, data: Any, id: str | None = None) -> bytes:
    head = "" if id is None else f"id: {id}\n"
    return f"{head}event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


@dataclass
class Service:
    answers: list[Answer]
    requests: list[httpx.Request] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    slept: list[float] = field(default_factory=list)
    now: float = 0.0
    #: Answers to requests for event streams; without any the service has no such route.
    streams: list[Answer] = field(default_factory=list)
    opened: list[httpx.Request] = field(default_factory=list)

    def handle(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/events"):
            return self._stream(request)
        self.requests.append(request)
        self.bodies.append(request.read())
        given = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(given, Exception):
            raise given
        if callable(given):
            return given(request)
        return httpx.Response(given.status_code, headers=given.headers, content=given.content)

    def _stream(self, request: httpx.Request) -> httpx.Response:
        self.opened.append(request)
        given = self.streams.pop(0) if self.streams else httpx.Response(404, text="no such page")
        if isinstance(given, Exception):
            raise given
        return given(request) if callable(given) else given

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def client(self, **more: Any) -> Client:
        pace = Pace(now=lambda: self.now, sleep=self.sleep, chance=lambda: 0.0)
        return Client("http://svc:8000", transport=httpx.MockTransport(self.handle), pace=pace, **more)


def service(*answers: Answer) -> Service:
    return Service(list(answers))
