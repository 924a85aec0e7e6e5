"""The one-shot lane: one-shots too heavy for a predict worker, fitted by fit workers between two jobs.

Redis holds ids only: a bounded list of those that wait, and a reply for each, which runs out. The table lies in a file that the
asker made and removes when it stops waiting, so a one-shot without its file is nobody's and is passed over. What a fit worker
hands back is a context file under a temporary name; the predict worker that answers maps it, then the asker unlinks it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import orjson

from common.catalogue import Catalogue
from common.errors import (
    Cancelled,
    DeadlinePassed,
    Overloaded,
    StorageFull,
    TabrelayError,
    decode,
)
from common.files import DataFolder, is_full
from common.names import new_id
from common.settings import Settings

#: Longest wait for a reply at once: an asker that left is noticed this soon.
STEP_S = 0.25
#: How long a reply that nobody fetches is kept.
REPLY_S = 30


@dataclass(frozen=True)
class Made:
    """A context that a fit worker made of a one-shot's table."""

    id: str  # names its file, with the tenant
    digest: str
    fit_ms: float


class OneShotLane:
    """The lane as both sides see it."""

    def __init__(self, catalogue: Catalogue, settings: Settings) -> None:
        self._client = catalogue.client
        self._waiting = f"{catalogue.prefix}one-shots"
        self._replies = f"{catalogue.prefix}one-shot:"
        self._most = settings.one_shots_waiting
        self._folder = DataFolder(settings)

    def table(self, id: str) -> Path:
        """Where a one-shot's question and table lie."""
        return self._folder.uploads() / f".one-shot-{id}"

    def context(self, tenant: str, id: str) -> Path:
        """Where the context of a one-shot lies."""
        return self._folder.temporary_context(tenant, id)

    # The asker's side

    def waiting(self) -> int:
        """One-shots that no fit worker has taken."""
        return int(self._client.llen(self._waiting))

    def submit(self, body: bytes) -> str:
        """Put a question into the lane; raises Overloaded when it is full, StorageFull."""
        id = new_id()
        place = self.table(id)
        try:
            place.touch(0o600)
            place.write_bytes(body)
            length = int(self._client.rpush(self._waiting, id))
        except OSError as error:
            place.unlink(missing_ok=True)
            if is_full(error):
                raise StorageFull("there is no room left for a one-shot's table") from error
            raise
        except BaseException:
            place.unlink(missing_ok=True)
            raise
        if length > self._most:
            self._client.lrem(self._waiting, 1, id)
            place.unlink(missing_ok=True)
            raise Overloaded(
                f"{self._most} one-shots wait for a fit worker, the most that may",
                retry_after_s=2,
                limit=self._most,
            )
        return id

    def wait(self, id: str, deadline: float, gone: Callable[[], bool]) -> Made:
        """What a fit worker made of it, until `deadline` (time.monotonic()).

        Raises the error that it ended with, Overloaded when no fit worker took it in time, DeadlinePassed when one did and was
        not done, Cancelled when the asker is gone.
        """
        while (left := deadline - time.monotonic()) > 0:
            reply = self._client.blpop([self._replies + id], timeout=min(left, STEP_S))
            if reply is not None:
                told = orjson.loads(reply[1])
                if "error" in told:
                    raise decode(told["error"])
                return Made(id, told["digest"], told["fit_ms"])
            if gone():
                raise Cancelled("the caller went away")
        if self._client.lrem(self._waiting, 1, id):
            raise Overloaded("no fit worker was free within the deadline", retry_after_s=5)
        raise DeadlinePassed(retry_after_s=1)

    def forget(self, tenant: str, id: str) -> None:
        """Nobody waits for it any more: its files go, and whoever works on it stops."""
        self.table(id).unlink(missing_ok=True)
        self.context(tenant, id).unlink(missing_ok=True)
        self._client.lrem(self._waiting, 1, id)
        self._client.delete(self._replies + id)

    # The fit worker's side

    def take(self) -> tuple[str, bytes] | None:
        """The next one-shot that somebody waits for and its question; None when there is none."""
        while (id := self._client.lpop(self._waiting)) is not None:
            try:
                return id, self.table(id).read_bytes()
            except FileNotFoundError:
                continue
        return None

    def wanted(self, id: str) -> None:
        """Raise Cancelled when nobody waits for it any more."""
        if not self.table(id).exists():
            raise Cancelled("nobody waits for this one-shot any more")

    def made(self, tenant: str, made: Made) -> None:
        """Its context is there."""
        self._reply(made.id, {"digest": made.digest, "fit_ms": made.fit_ms})
        if not self.table(made.id).exists():
            self.context(tenant, made.id).unlink(missing_ok=True)

    def failed(self, id: str, error: TabrelayError) -> None:
        """It ended with an error."""
        self._reply(id, {"error": error.encode()})

    def _reply(self, id: str, told: dict[str, object]) -> None:
        # Whoever waits takes it away again; the expiry is for the one that left.
        self._client.rpush(self._replies + id, orjson.dumps(told))
        self._client.expire(self._replies + id, REPLY_S)
