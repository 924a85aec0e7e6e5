"""`GET /v1/jobs/{id}/events`: a job's changes as server-sent events.

A stream holds one of gunicorn's threads for as long as it is open, so there is a bound on how many are.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import orjson
from flask import Blueprint, Flask, Response, current_app, g, request

from api import schemas, views
from api.openapi import documented
from api.problems import problem_body
from api.requests import tenant
from common.catalogue import Catalogue
from common.catalogue.connection import connect
from common.errors import CatalogueUnavailable, Overloaded, TabrelayError
from common.service.follow import Follower, Told
from common.settings import Settings

blueprint = Blueprint("events", __name__, url_prefix="/v1")

CONTENT_TYPE = "text/event-stream"
#: Seconds of silence after which a comment is sent.
KEEP_ALIVE_S = 5.0
#: Longest wait for a change: a stopping API and a client that left are noticed this soon.
STEP_S = 1.0
#: Longest time that a stream is open; its client resumes.
LONGEST_S = 3600.0
#: How long a stream waits for a Redis that went away, and how long for one command of it.
OUTAGE_S, COMMAND_S, RETRY_S = 10.0, 3.0, 0.5
#: Seconds after which a refused reader should come back.
BUSY_S = 5.0
#: How long a peer may leave what was sent unacknowledged.
UNHEARD_MS = 20_000
#: How soon a browser's EventSource comes back after a cut.
_RECONNECT = b"retry: 1000\n\n"


class EventStreams:
    """The streams of one API process."""

    def __init__(self, catalogue: Catalogue, limit: int) -> None:
        """`catalogue` should fail fast: a reader hears nothing while a command waits."""
        self.catalogue = catalogue
        self.limit = limit
        self.open = 0
        #: Whether the process is about to end; the server that runs the application sets it.
        self.stopping: Callable[[], bool] = lambda: False
        self._lock = threading.Lock()

    @classmethod
    def of(cls, settings: Settings) -> EventStreams:
        """With connections of their own."""
        client = connect(settings.redis_url, timeout_s=COMMAND_S, retries=0)
        return cls(Catalogue(client, settings), settings.event_streams)

    def take(self) -> Callable[[], None]:
        """A place for one stream, as the call that gives it back; raises Overloaded."""
        with self._lock:
            if self.open >= self.limit:
                raise Overloaded(
                    f"{self.limit} event streams are open, the most of this process; "
                    "come back, or ask for the job itself",
                    retry_after_s=BUSY_S,
                    limit=self.limit,
                )
            self.open += 1
        given_back = False

        def give_back() -> None:
            nonlocal given_back
            with self._lock:
                self.open -= not given_back
                given_back = True

        return give_back


def install(app: Flask, settings: Settings) -> None:
    """Give the application its streams."""
    app.extensions["event_streams"] = EventStreams.of(settings)


@blueprint.get("/jobs/<job_id>/events")
@documented(
    "fits",
    {"200": schemas.Job, "204": None},
    ("404", "429", "503"),
    headers=schemas.EventsHeaders,
    media_type=CONTENT_TYPE,
)
def events(job_id: str) -> Response:
    """Follow a job as server-sent events: `progress` for its present state and each change, `end` for the last.

    The data of each is the whole job. After a cut, send the last id as `Last-Event-ID` to miss nothing; 204 says that
    its end was told before. `error` carries a problem and ends the stream, which can be resumed.
    """
    streams = cast(EventStreams, current_app.extensions["event_streams"])
    follower = Follower(streams.catalogue, tenant(), job_id)
    first = follower.begin(request.headers.get("Last-Event-ID", ""))
    if follower.over and not first:
        return Response(status=204)
    give_back = streams.take()
    peer = Peer(request.environ.get("gunicorn.socket"))
    frames = follow(follower, first, streams.stopping, peer.gone, g.get("request_id", ""))
    response = Response(
        frames,
        content_type=CONTENT_TYPE,
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )
    response.call_on_close(peer.forget)
    response.call_on_close(give_back)
    return response


def follow(
    follower: Follower,
    first: Sequence[Told],
    stopping: Callable[[], bool],
    gone: Callable[[], bool],
    request_id: str,
    *,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[bytes]:
    """The frames of one stream."""
    ends, spoke, failing_since = now() + LONGEST_S, now(), None
    yield _RECONNECT + b"".join(map(shown, first))
    while not follower.over and now() < ends and not stopping() and not gone():
        told: list[Told] = []
        try:
            told = follower.more(STEP_S)
            failing_since = None
        except CatalogueUnavailable as error:
            failing_since = now() if failing_since is None else failing_since
            if now() - failing_since >= OUTAGE_S:
                yield failed(error, request_id)
                return
            sleep(RETRY_S)
        except TabrelayError as error:
            yield failed(error, request_id)
            return
        if told:
            yield b"".join(map(shown, told))
            spoke = now()
        elif now() - spoke >= KEEP_ALIVE_S:
            yield b": keep-alive\n\n"
            spoke = now()


def shown(told: Told) -> bytes:
    """A change as a frame."""
    name = "end" if told.job.state.ended else "progress"
    return frame(name, views.job(told.job, told.outlook), told.id)


def failed(error: TabrelayError, request_id: str) -> bytes:
    """An error as a frame; it has no id, so that a resume goes on where the stream was."""
    return frame("error", problem_body(error, request_id))


def frame(event: str, data: Any, id: str = "") -> bytes:
    """One server-sent event; JSON has no line breaks outside its texts, and none inside."""
    head = f"id: {id}\n" if id else ""
    return f"{head}event: {event}\ndata: ".encode() + orjson.dumps(data) + b"\n\n"


class Peer:
    """The client's end of the connection, so that one that left is noticed between two writes."""

    def __init__(self, sock: Any) -> None:
        """`sock` is None or TLS where the server shows no plain socket; then only writes tell."""
        self._sock: socket.socket | None = sock if type(sock) is socket.socket else None
        self._allow_silence(UNHEARD_MS)

    def gone(self) -> bool:
        """Whether it has closed."""
        if self._sock is None:
            return False
        try:
            return self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def forget(self) -> None:
        """The connection may serve other requests now."""
        self._allow_silence(0)

    def _allow_silence(self, ms: int) -> None:
        """Have the kernel end a connection to a machine that vanished, or to a reader that reads no more."""
        if (
            self._sock is None
            or self._sock.family == socket.AF_UNIX
            or not hasattr(socket, "TCP_USER_TIMEOUT")
        ):
            return
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, ms)
        except OSError:
            return
