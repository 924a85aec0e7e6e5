"""Sends calls over HTTP and sends them again when that is safe.

Every call of the client may be repeated: reads and predicts change nothing, deletes and pins end in the same
state, and a fit carries an idempotency key. So these are retried, within the call's time:

- a refused connection; a service that never answered this client is given `FIRST_CONTACT_S` only;
- a connection lost after sending, at most `MAX_LOST` times, as the request itself may be the cause;
- 429 and 503 that name a `Retry-After`, and 502, which a gateway says while the service restarts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from typing import Any

import httpx

from tabrelay.client.errors import (
    ConnectionFailed,
    DeadlinePassed,
    ServerError,
    TabrelayHTTPError,
    from_response,
)

#: Says `Retry-After` but won't pass in a call's time: somebody has to bring the weights.
LASTING = frozenset({"model_not_ready"})
#: How long a service that has never answered is tried.
FIRST_CONTACT_S = 2.0
#: Lost connections after sending that one call survives.
MAX_LOST = 2
MAX_ATTEMPTS = 30
BACKOFF_FIRST_S = 0.1
BACKOFF_MOST_S = 5.0
#: A retry waits up to this much longer, so that many clients don't return at once.
JITTER = 0.25
CONNECT_TIMEOUT_S = 5.0
#: The service is given this long past a deadline to say itself that it passed.
ANSWER_SLACK_S = 2.0

#: Longest silence of a stream that counts as open; the service says something every 5 s.
SILENT_S = 25.0

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class Pace:
    """Time and chance, passed in so that tests need neither."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    chance: Callable[[], float] = random.random


#: httpx arguments that carry a body, opened anew for each attempt.
Body = Callable[[], AbstractContextManager[Mapping[str, Any]]]


def no_body() -> AbstractContextManager[Mapping[str, Any]]:
    """A call without a body."""
    return nullcontext({})


@dataclass(frozen=True)
class Call:
    """One request, independent of how often it is sent."""

    method: str
    path: str
    params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Body = no_body
    #: Whether the service is told the time that is left, as `deadline_ms`.
    tells_deadline: bool = False
    #: Seconds that the service was asked to hold the answer back.
    held_s: float = 0.0
    #: Whether the answer comes bit by bit, as a stream of events does; a 429 is then not waited out.
    streams: bool = False


class Wire:
    """One service's connection pool."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        *,
        transport: httpx.BaseTransport | None = None,
        pace: Pace | None = None,
    ) -> None:
        """`url` may carry a path prefix; the key is sent as a bearer token and never shown."""
        self._pace = pace or Pace()
        self._heard = False
        try:
            base = httpx.URL(url)
            if base.scheme not in ("http", "https") or not base.host:
                raise httpx.InvalidURL("the url must be like http://127.0.0.1:8000")
            self._http = httpx.Client(
                base_url=base,
                headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                transport=transport,
                # A proxy from the environment can't reach this machine's loopback.
                trust_env=base.host not in LOOPBACK,
                follow_redirects=False,
            )
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise ValueError(f"not a usable url or API key: {error}") from None
        self.shown_url = str(base.copy_with(username=None, password=None)).rstrip("/")

    def close(self) -> None:
        """Close the kept connections."""
        self._http.close()

    def send(self, call: Call, within_s: float) -> httpx.Response:
        """Send until a 2xx answer, an error that won't pass, or the end of the time.

        The answer of a call that `streams` is still to be read, and to be closed.
        """
        pace = self._pace
        started = pace.now()
        lost = 0
        for attempt in range(MAX_ATTEMPTS):
            failure: TabrelayHTTPError
            try:
                response = self._attempt(call, within_s - (pace.now() - started))
            except httpx.TransportError as fault:
                failure = self._failure(fault)
                lost += _was_sent(fault)
                wait_s = self._wait_after(fault, attempt, lost, pace.now() - started)
            else:
                self._heard = True
                if response.is_success:
                    return response
                failure = from_response(response)
                wait_s = (
                    None if call.streams and failure.status == 429 else self._wait_as_told(failure, attempt)
                )
            if wait_s is None or pace.now() - started + wait_s > within_s or attempt + 1 == MAX_ATTEMPTS:
                raise failure from None
            pace.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self, call: Call, left_s: float) -> httpx.Response:
        left_s = max(left_s, 0.001)
        params = dict(call.params)
        if call.tells_deadline:
            params["deadline_ms"] = max(1, round(left_s * 1000))
        silent_s = SILENT_S if call.streams else max(left_s, call.held_s) + ANSWER_SLACK_S
        timeout = httpx.Timeout(silent_s, connect=min(CONNECT_TIMEOUT_S, silent_s))
        with call.body() as body:
            request = self._http.build_request(
                call.method, call.path, params=params, headers=dict(call.headers), timeout=timeout, **body
            )
            response = self._http.send(request, stream=call.streams)
        if call.streams and not response.is_success:
            with closing(response):
                response.read()
        return response

    def _failure(self, fault: httpx.TransportError) -> TabrelayHTTPError:
        if isinstance(fault, httpx.ReadTimeout | httpx.WriteTimeout):
            return DeadlinePassed(f"{self.shown_url} gave no answer in time", code="client_timeout")
        said = str(fault) or type(fault).__name__
        if _was_sent(fault):
            return ConnectionFailed(
                f"the connection to {self.shown_url} was lost: {said}", code="connection_lost"
            )
        return ConnectionFailed(f"can't reach {self.shown_url}: {said}", code="connection_failed")

    def _wait_after(
        self, fault: httpx.TransportError, attempt: int, lost: int, spent_s: float
    ) -> float | None:
        if isinstance(
            fault, httpx.ReadTimeout | httpx.WriteTimeout | httpx.UnsupportedProtocol | httpx.ProxyError
        ):
            return None
        if lost > MAX_LOST or (not self._heard and not lost and spent_s > FIRST_CONTACT_S):
            return None
        return self.backoff(attempt)

    def _wait_as_told(self, failure: TabrelayHTTPError, attempt: int) -> float | None:
        if failure.code in LASTING:
            return None
        # 409: the same submission is being worked on; 410: the dataset is being fitted again.
        if failure.status in (409, 410, 429, 503) and failure.retry_after_s is not None:
            return failure.retry_after_s * (1 + JITTER * self._pace.chance()) or self.backoff(attempt)
        return self.backoff(attempt) if failure.status == 502 else None

    def backoff(self, attempt: int) -> float:
        """Seconds before the next attempt, after `attempt` that failed before this one."""
        least_s = min(BACKOFF_MOST_S, BACKOFF_FIRST_S * 2.0**attempt)
        return least_s * (1 + JITTER * self._pace.chance())


def _was_sent(fault: httpx.TransportError) -> bool:
    never = (
        httpx.ConnectError
        | httpx.ConnectTimeout
        | httpx.PoolTimeout
        | httpx.UnsupportedProtocol
        | httpx.ProxyError
    )
    return not isinstance(fault, never)


def read_object(response: httpx.Response) -> dict[str, Any]:
    """The JSON object of an answer; ServerError for anything else."""
    try:
        data = response.json()
    except ValueError as error:
        raise unreadable(response, error) from error
    if not isinstance(data, dict):
        raise unreadable(response, TypeError("no JSON object"))
    return data


def unreadable(response: httpx.Response, error: Exception) -> TabrelayHTTPError:
    """The error of an answer that is not Tabrelay's."""
    return ServerError(
        f"{response.request.url.copy_with(username=None, password=None)} answered what is no Tabrelay answer: {error}",
        code="unreadable_answer",
        status=response.status_code,
    )
