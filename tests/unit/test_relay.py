"""The way to a worker: who is asked, what is tried again, and what comes over the wire."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any

import numpy as np
import orjson
import pytest

from common.catalogue.records import PredictWorker, Resident, Version
from common.errors import (
    ContextGone,
    DeadlinePassed,
    InvalidRows,
    NoPredictWorker,
    TabrelayError,
    WorkerBusy,
)
from common.models.protocol import Prediction
from common.placement import HoldersFirst
from common.relay.client import WorkerConnections
from common.relay.relay import Asked, Relay
from common.relay.wire import ARROW, Answer, Question

CONTEXT = "c" * 64


def version(context: str = CONTEXT) -> Version:
    return Version(1, context, "k", "t", "j", "m", "classification", 3, 2, 100, 1, {}, {})


def worker(
    name: str, *, address: str = "", holds: bool = False, room: int = 1000, busy: int = 0
) -> PredictWorker:
    residents = (Resident("default", CONTEXT, 100, "disk"),) if holds else ()
    return PredictWorker(name, address, "h", 1, "cpu", ("m",), 1000, 1000 - room, busy, busy, 0, 1, residents)


def test_holders_come_first_then_room_then_idleness() -> None:
    order = HoldersFirst().order
    workers = [worker("full", room=10), worker("idle"), worker("holder", holds=True, busy=9)]
    assert [w.name for w in order("default", version(), workers)] == ["holder", "idle", "full"]
    assert next(w.name for w in order("stranger", version(), workers)) == "idle"
    busy = [worker("busy", busy=5), worker("calm")]
    assert [w.name for w in order("default", version(), busy)] == ["calm", "busy"]
    other = [PredictWorker("o", "", "h", 1, "cpu", ("another",), 1, 0, 0, 0, 0, 1, ())]
    assert order("default", version(), other) == []


@pytest.mark.parametrize(
    "prediction",
    [
        Prediction(probabilities=np.array([[0.1, 0.9], [0.7, 0.3]])),
        Prediction(mean=np.array([1.5, -2.25])),
        Prediction(mean=np.array([1.5]), quantiles=np.array([[0.1, 0.2]])),
    ],
)
def test_an_answer_survives_the_wire_bit_for_bit(prediction: Prediction) -> None:
    target = {"name": "y", "classes": ["007", True, 1.0]}
    levels = (0.05, 0.95) if prediction.quantiles is not None else ()
    sent = Answer(prediction, CONTEXT, "w", target, levels, {"forward": 1.25})
    got = Answer.decode(sent.encode())
    assert (got.context, got.target, got.quantiles, got.timings_ms) == (
        CONTEXT,
        target,
        levels,
        {"forward": 1.25},
    )
    for name in ("probabilities", "mean", "quantiles"):
        ours, theirs = getattr(prediction, name), getattr(got.prediction, name)
        assert (ours is None and theirs is None) or np.array_equal(ours, theirs)


def test_a_question_survives_its_headers() -> None:
    asked = Question("default", CONTEXT, "m", "regression", "r", 1.5, (0.1, 0.123456789))
    assert Question.read(asked.headers()) == asked


class UnixServer(ThreadingMixIn, HTTPServer):
    address_family = socket.AF_UNIX
    daemon_threads = True

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)

    def get_request(self) -> tuple[Any, Any]:
        request, _ = self.socket.accept()
        return request, ("unix", 0)


Reply = Callable[[BaseHTTPRequestHandler], None]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[str, Reply], str]]:
    """Starts a worker's double on a Unix socket; returns its address."""
    servers: list[UnixServer] = []

    def start(name: str, reply: Reply) -> str:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                reply(self)

            def log_message(self, *_: Any) -> None:
                return

        path = tmp_path / f"{name}.sock"
        server = UnixServer(str(path), Handler)  # type: ignore[arg-type]  # a path, not host and port
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"unix:{path}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def send(handler: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
    handler.send_response(status)
    handler.send_header("content-length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def answering(context: str = CONTEXT) -> Reply:
    body = Answer(Prediction(mean=np.array([7.0])), context, "w", {}).encode()
    return lambda handler: send(handler, 200, body)


def failing(error: TabrelayError) -> Reply:
    return lambda handler: send(handler, error.status, orjson.dumps(error.encode()))


def hanging_up(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


class Snapshot:
    """A snapshot's double: workers may change while a predict is on its way."""

    def __init__(self, *workers: PredictWorker, again: Version | None = None) -> None:
        self.workers = workers
        self.again = again or version()
        self.resolved = 0

    def resolve_again(self, tenant: str, name: str, number: int | None) -> Version:
        self.resolved += 1
        return self.again


def ask(snapshot: Any, within_s: float = 2.0) -> Answer:
    asked = Asked("default", "d", None, b"rows", ARROW, "r", time.monotonic() + within_s)
    relay = Relay(snapshot)
    try:
        return relay.predict(asked, version())[1]
    finally:
        relay.close()


def test_connections_are_kept_open(serve: Callable[[str, Reply], str]) -> None:
    seen: set[Any] = set()
    reply = answering()

    def noting(handler: BaseHTTPRequestHandler) -> None:
        seen.add(id(handler.connection))
        reply(handler)

    address = serve("w", noting)
    connections = WorkerConnections()
    for _ in range(3):
        connections.predict(address, Question("default", CONTEXT, "m", "regression", "r", 1.0), b"x", 1.0)
    connections.forget(address)
    assert len(seen) == 1


def test_a_refused_connection_is_tried_on_the_next_worker(
    serve: Callable[[str, Reply], str], tmp_path: Path
) -> None:
    gone = worker("gone", address=f"unix:{tmp_path}/none.sock", holds=True)
    here = worker("here", address=serve("here", answering()))
    assert ask(Snapshot(gone, here)).worker == "here"


def test_a_worker_that_comes_back_before_the_deadline_answers(
    serve: Callable[[str, Reply], str], tmp_path: Path
) -> None:
    late = worker("late", address=f"unix:{tmp_path}/late.sock")
    threading.Timer(0.4, serve, args=("late", answering())).start()
    answer = ask(Snapshot(late), within_s=5)
    assert answer.prediction.mean is not None
    assert answer.prediction.mean.tolist() == [7.0]


def test_no_worker_within_the_deadline_is_503(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(NoPredictWorker):
        ask(Snapshot(worker("gone", address=f"unix:{tmp_path}/none.sock")), within_s=0.3)
    assert 0.2 < time.monotonic() - began < 2


def test_a_request_that_fells_its_worker_is_given_up_after_two(serve: Callable[[str, Reply], str]) -> None:
    calls: list[int] = []

    def deadly(handler: BaseHTTPRequestHandler) -> None:
        calls.append(1)
        hanging_up(handler)

    workers = [worker(name, address=serve(name, deadly)) for name in "abc"]
    with pytest.raises(NoPredictWorker, match="lost 2 times"):
        ask(Snapshot(*workers))
    assert len(calls) == 2


def test_a_busy_worker_is_passed_over_and_all_busy_is_429(serve: Callable[[str, Reply], str]) -> None:
    busy = worker("busy", address=serve("busy", failing(WorkerBusy(retry_after_s=1))), holds=True)
    free = worker("free", address=serve("free", answering()))
    assert ask(Snapshot(busy, free)).worker == "free"
    with pytest.raises(WorkerBusy):
        ask(Snapshot(busy))


def test_a_slow_worker_is_504(serve: Callable[[str, Reply], str]) -> None:
    slow = worker("slow", address=serve("slow", lambda handler: time.sleep(1.5)))
    with pytest.raises(DeadlinePassed):
        ask(Snapshot(slow), within_s=0.2)


def test_a_worker_s_own_refusal_comes_through_with_its_fields(serve: Callable[[str, Reply], str]) -> None:
    address = serve("w", failing(InvalidRows("no plan", limit=3)))
    with pytest.raises(InvalidRows, match="no plan") as refused:
        ask(Snapshot(worker("w", address=address)))
    assert refused.value.facts == {"limit": 3}


def test_a_gone_context_is_resolved_once_more(serve: Callable[[str, Reply], str]) -> None:
    snapshot = Snapshot(worker("w", address=serve("w", failing(ContextGone()))))
    with pytest.raises(ContextGone):
        ask(snapshot)
    assert snapshot.resolved == 1


def test_an_answer_of_another_context_is_thrown_away(serve: Callable[[str, Reply], str]) -> None:
    with pytest.raises(ContextGone, match="another context"):
        ask(Snapshot(worker("w", address=serve("w", answering("d" * 64)))))
