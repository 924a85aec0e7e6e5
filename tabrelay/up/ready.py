"""Ready checks: each answers within a second or two and never raises for a server that is not there yet."""

from __future__ import annotations

import http.client
import json
import socket

import redis

from common.process import Bind

TIMEOUT_S = 2.0


class RedisAnswers:
    """Redis answers PING, with its data loaded."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __call__(self) -> bool:
        try:
            ping(self.url)
        except redis.RedisError:
            return False
        return True


def ping(url: str) -> None:
    """One PING; raises redis.RedisError."""
    with redis.Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S) as client:
        client.ping()


class KeyAppears:
    """A worker has registered: its key, deleted by the first call, is there again."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self.key = key
        self._cleared = False

    def __call__(self) -> bool:
        try:
            with redis.Redis.from_url(self.url, socket_timeout=TIMEOUT_S) as client:
                if not self._cleared:
                    # A killed worker's key outlives it for some seconds and would pass for the new one's;
                    # a live worker writes it again at its next heartbeat.
                    client.delete(self.key)
                    self._cleared = True
                    return False
                return bool(client.exists(self.key))
        except redis.RedisError:
            return False


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class HttpAnswers:
    """GET `path` answers 200."""

    def __init__(self, bind: Bind, path: str = "/readyz") -> None:
        self.bind = bind
        self.path = path

    def accepts(self, status: int, body: bytes) -> bool:
        """Whether this answer means ready."""
        return status == 200

    def __call__(self) -> bool:
        connection = (
            _UnixConnection(self.bind.path, TIMEOUT_S)
            if self.bind.path is not None
            else http.client.HTTPConnection(self.bind.host, self.bind.port, timeout=TIMEOUT_S)
        )
        try:
            connection.request("GET", self.path)
            response = connection.getresponse()
            return self.accepts(response.status, response.read())
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


class ApiAnswers(HttpAnswers):
    """The API is ready, or would be once the catalogue is rebuilt: for that it must be running."""

    def accepts(self, status: int, body: bytes) -> bool:
        """Whether nothing is missing but what `tabrelay catalogue rebuild` brings back."""
        if status != 503:
            return status == 200
        try:
            return list(json.loads(body)["missing"]) == ["epoch"]
        except (ValueError, KeyError, TypeError):
            return False
