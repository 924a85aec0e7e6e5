"""The Redis connection: bounded waits, and every failure to reach it is a CatalogueUnavailable."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any

import redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ReadOnlyError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from common.errors import CatalogueUnavailable

#: redis-py's types do not know that `decode_responses=True` makes every answer text.
Client = Any

#: Seconds that one command may take before the catalogue counts as unreachable.
COMMAND_TIMEOUT_S = 5.0

#: How a server that answers, but can't write, begins its refusals: a full disk, a full memory, a replica.
REFUSALS = ("MISCONF ", "OOM ", "READONLY ", "command not allowed when used memory ")


class CatalogueClient(redis.Redis):
    """A Redis client that speaks of an unreachable server in the product's own error."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]  # redis-py
        except (RedisConnectionError, RedisTimeoutError) as error:
            raise CatalogueUnavailable(retry_after_s=2) from error
        except ResponseError as error:
            if isinstance(error, (OutOfMemoryError, ReadOnlyError)) or str(error).startswith(REFUSALS):
                raise CatalogueUnavailable(
                    f"the catalogue takes no writes now: {error}", retry_after_s=5
                ) from error
            raise


def connect(url: str, *, timeout_s: float = COMMAND_TIMEOUT_S, retries: int = 2) -> Client:
    """A client of `url`; connects lazily, reconnects by itself, tries a command again `retries` times."""
    return CatalogueClient.from_url(
        url,
        decode_responses=True,
        socket_timeout=timeout_s,
        socket_connect_timeout=2.0,
        health_check_interval=30,
        retry=Retry(ExponentialBackoff(cap=0.2, base=0.02), retries),
    )


class Scripts:
    """The scripts of `lua/`, each with `lib.lua` before it; run by name."""

    def __init__(self, client: Client, prefix: str) -> None:
        self._prefix = prefix
        folder = resources.files("common.catalogue") / "lua"
        library = (folder / "lib.lua").read_text()
        self._scripts = {
            entry.name.removesuffix(".lua"): client.register_script(library + entry.read_text())
            for entry in folder.iterdir()
            if entry.name.endswith(".lua") and entry.name != "lib.lua"
        }

    def run(self, name: str, *args: Any) -> Any:
        """Run `name`; the key prefix goes first."""
        return self._scripts[name](keys=(), args=[self._prefix, *args])


def pairs(flat: Sequence[Any]) -> dict[str, str]:
    """A flat list of field, value, ... as a dictionary."""
    return dict(zip(flat[::2], flat[1::2], strict=True))
