"""A catalogue that refuses to write is unavailable, not broken: the client is told so and tries again."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from redis.exceptions import ResponseError

from common.catalogue.connection import CatalogueClient
from common.errors import CatalogueUnavailable


@pytest.mark.parametrize(
    "said",
    [
        "MISCONF Errors writing to the AOF file: No space left on device",
        "MISCONF Valkey is configured to save RDB snapshots, but it's currently unable to persist to disk.",
        "OOM command not allowed when used memory > 'maxmemory'.",
        "command not allowed when used memory > 'maxmemory'.",
        "READONLY You can't write against a read only replica.",
    ],
)
def test_a_redis_that_refuses_writes_is_an_unavailable_catalogue(
    monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    refuse_with(monkeypatch, ResponseError(said))
    with pytest.raises(CatalogueUnavailable):
        CatalogueClient().execute_command("SET", "a", 1)


def test_a_fault_of_ours_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_with(
        monkeypatch, ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")
    )
    with pytest.raises(ResponseError):
        CatalogueClient().execute_command("SET", "a", 1)


def refuse_with(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def execute_command(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(redis.Redis, "execute_command", execute_command)
