"""Kept-open HTTP connections to predict workers, over a Unix socket or TCP.

A socket and httptools' parser rather than an HTTP client library: one request and one answer at a time is all that is
needed, and what a predict passes through between two forwards is no longer in the processor's caches
(docs/decisions/0004).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import defaultdict

import httptools
import orjson

from common.errors import DeadlinePassed, InternalError, TabrelayError, decode
from common.relay.wire import Question

#: An idle connection older than this is not used again; the worker keeps them open for longer.
IDLE_S = 30.0
#: Idle connections kept to one worker.
IDLE_MOST = 64
CONNECT_TIMEOUT_S = 2.0
READ_BYTES = 256 * 1024


class Refused(Exception):
    """The worker could not be reached: nothing was sent, so trying again is safe."""


class Lost(Exception):
    """The connection broke after the request was sent; the worker may have died of it."""


class _Response:
    """What httptools reports of one response."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.chunks: list[bytes] = []
        self.complete = False
        self.kept = False

    def on_body(self, chunk: bytes) -> None:
        self.chunks.append(chunk)

    def on_message_complete(self) -> None:
        self.complete, self.kept = True, self.parser.should_keep_alive()


class Connection:
    """One connection; not for several threads at once."""

    def __init__(self, address: str) -> None:
        """Raises Refused."""
        try:
            self._socket = (
                _unix(address.removeprefix("unix:")) if address.startswith("unix:") else _tcp(address)
            )
        except OSError as error:
            raise Refused(str(error)) from error
        self.reusable = True

    def post(self, path: str, headers: dict[str, str], body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of the answer; raises Lost or DeadlinePassed, after which the connection is of no use."""
        until = time.monotonic() + timeout_s
        response = _Response()
        try:
            self._socket.settimeout(max(timeout_s, 0.001))
            self._socket.sendall(_head(path, headers, len(body)) + body)
            while not response.complete:
                self._socket.settimeout(max(until - time.monotonic(), 0.001))
                read = self._socket.recv(READ_BYTES)
                if not read:
                    raise Lost("the worker closed the connection")
                response.parser.feed_data(read)
        except TimeoutError as error:
            raise DeadlinePassed(retry_after_s=1) from error
        except (OSError, httptools.HttpParserError) as error:
            raise Lost(str(error)) from error
        self.reusable = response.kept
        return response.parser.get_status_code(), b"".join(response.chunks)

    def close(self) -> None:
        """Close the socket."""
        with contextlib.suppress(OSError):
            self._socket.close()


def _unix(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(CONNECT_TIMEOUT_S)
        made.connect(path)
    except OSError:
        made.close()
        raise
    return made


def _tcp(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    made = socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def _head(path: str, headers: dict[str, str], length: int) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: worker", f"content-length: {length}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    text = "\r\n".join(lines)
    if text.count("\r") + text.count("\n") != 2 * (len(lines) - 1):
        raise InternalError("a header of a request to a predict worker holds a line break")
    return f"{text}\r\n\r\n".encode("latin-1")


class WorkerConnections:
    """A pool of connections a worker address; safe to use from many threads."""

    def __init__(self) -> None:
        self._idle: dict[str, list[tuple[float, Connection]]] = defaultdict(list)
        self._lock = threading.Lock()

    def predict(self, address: str, question: Question, rows: bytes, timeout_s: float) -> bytes:
        """The worker's answer (`Answer.decode`); raises Refused, Lost, DeadlinePassed or what the worker reported."""
        return self._ask(address, "/predict", question.headers(), rows, timeout_s)

    def prefetch(self, address: str, question: Question, timeout_s: float) -> None:
        """Have the worker load a context; raises as `predict` does."""
        self._ask(address, "/prefetch", question.headers(), b"", timeout_s)

    def one_shot(self, address: str, request_id: str, body: bytes, timeout_s: float) -> bytes:
        """The worker's answer (`OneShotAnswer.decode`); raises as `predict` does."""
        headers = {"content-type": "application/octet-stream", "x-request-id": request_id}
        return self._ask(address, "/once", headers, body, timeout_s)

    def _ask(self, address: str, path: str, headers: dict[str, str], body: bytes, timeout_s: float) -> bytes:
        connection = self._take(address)
        kept = False
        try:
            status, answer = connection.post(path, headers, body, timeout_s)
            kept = connection.reusable
        finally:
            if kept:
                self._give(address, connection)
            else:
                connection.close()
        if status in (200, 204):
            return answer
        raise _reported(answer)

    def _take(self, address: str) -> Connection:
        now = time.monotonic()
        with self._lock:
            idle = self._idle[address]
            while idle:
                since, connection = idle.pop()
                if now - since < IDLE_S:
                    return connection
                connection.close()
        return Connection(address)

    def _give(self, address: str, connection: Connection) -> None:
        with self._lock:
            idle = self._idle[address]
            if len(idle) < IDLE_MOST:
                idle.append((time.monotonic(), connection))
                return
        connection.close()

    def close(self) -> None:
        """Close every idle connection."""
        for address in list(self._idle):
            self.forget(address)

    def forget(self, address: str) -> None:
        """Close the idle connections to a worker that died."""
        with self._lock:
            idle = self._idle.pop(address, [])
        for _, connection in idle:
            connection.close()


def _reported(answer: bytes) -> TabrelayError:
    try:
        return decode(orjson.loads(answer))
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return InternalError("a predict worker answered with something that is not ours")
