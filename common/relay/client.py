"""Kept-open HTTP connections to predict workers, over a Unix socket or TCP.

http.client rather than a bigger library: one request and one answer at a time is all that is needed, and it
adds less than a tenth of a millisecond.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections import defaultdict

import orjson

from common.errors import DeadlinePassed, InternalError, TabrelayError, decode
from common.relay.wire import Question

#: An idle connection older than this is not used again; the worker keeps them open for longer.
IDLE_S = 30.0
#: Idle connections kept to one worker.
IDLE_MOST = 64
CONNECT_TIMEOUT_S = 2.0


class Refused(Exception):
    """The worker could not be reached: nothing was sent, so trying again is safe."""


class Lost(Exception):
    """The connection broke after the request was sent; the worker may have died of it."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(CONNECT_TIMEOUT_S)
        self.sock.connect(self._path)


class WorkerConnections:
    """A pool of connections a worker address; safe to use from many threads."""

    def __init__(self) -> None:
        self._idle: dict[str, list[tuple[float, http.client.HTTPConnection]]] = defaultdict(list)
        self._lock = threading.Lock()

    def predict(self, address: str, question: Question, rows: bytes, timeout_s: float) -> bytes:
        """The worker's Arrow answer; raises Refused, Lost, DeadlinePassed or what the worker reported."""
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
        try:
            if connection.sock is None:
                try:
                    connection.connect()
                except OSError as error:
                    raise Refused(str(error)) from error
            connection.sock.settimeout(max(timeout_s, 0.001))
            connection.request("POST", path, body=body, headers=headers)
            response = connection.getresponse()
            answer = response.read()
        except TimeoutError as error:
            connection.close()
            raise DeadlinePassed(retry_after_s=1) from error
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Lost(str(error)) from error
        except Refused:
            connection.close()
            raise
        if response.will_close:
            connection.close()
        else:
            self._give(address, connection)
        if response.status in (200, 204):
            return answer
        raise _reported(answer)

    def _take(self, address: str) -> http.client.HTTPConnection:
        now = time.monotonic()
        with self._lock:
            idle = self._idle[address]
            while idle:
                since, connection = idle.pop()
                if now - since < IDLE_S:
                    return connection
                connection.close()
        if address.startswith("unix:"):
            return _UnixConnection(address.removeprefix("unix:"))
        host, _, port = address.rpartition(":")
        return http.client.HTTPConnection(host, int(port), timeout=CONNECT_TIMEOUT_S)

    def _give(self, address: str, connection: http.client.HTTPConnection) -> None:
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
            with contextlib.suppress(OSError):
                connection.close()


def _reported(answer: bytes) -> TabrelayError:

    try:
        return decode(orjson.loads(answer))
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return InternalError("a predict worker answered with something that is not ours")
