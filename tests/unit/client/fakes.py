"""A scripted service: each request takes the next answer; the clock only moves when the client sleeps."""

from __future__ import annotations

from collections.abc import Callable
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


@dataclass
class Service:
    answers: list[Answer]
    requests: list[httpx.Request] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    slept: list[float] = field(default_factory=list)
    now: float = 0.0

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        self.bodies.append(request.read())
        given = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(given, Exception):
            raise given
        if callable(given):
            return given(request)
        return httpx.Response(given.status_code, headers=given.headers, content=given.content)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def client(self, **more: Any) -> Client:
        pace = Pace(now=lambda: self.now, sleep=self.sleep, chance=lambda: 0.0)
        return Client("http://svc:8000", transport=httpx.MockTransport(self.handle), pace=pace, **more)


def service(*answers: Answer) -> Service:
    return Service(list(answers))
