"""Reading a job's event stream: what changed after an entry, and the job as it looked then."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from common.catalogue.connection import Client
from common.catalogue.records import Job, JobState

#: The place before the first entry; told as the id of a job that has no entry yet.
BEGINNING = "0-0"
#: Entries that every stream keeps (`EVENTS_KEPT` of lua/lib.lua): a shorter one has never been trimmed.
KEPT = 256
#: Entries that one read returns.
READ = 64
_ID = re.compile(r"[0-9]{1,19}-[0-9]{1,19}")


@dataclass(frozen=True)
class Event:
    """One change of a job; `id` is Redis' own time."""

    id: str
    state: JobState
    phase: str
    fraction: float
    attempt: int

    @classmethod
    def decode(cls, id: str, stored: Mapping[str, str]) -> Event:
        """From a stream entry."""
        return cls(
            id=id,
            state=JobState(stored["state"]),
            phase=stored.get("phase", ""),
            fraction=float(stored.get("fraction") or 0),
            attempt=int(stored.get("attempt") or 0),
        )

    @property
    def at_ms(self) -> int:
        """When it happened."""
        return int(self.id.partition("-")[0])

    def of(self, job: Job) -> Job:
        """The job as it looked at this change, from a record that was read later."""
        if self.state.ended:
            return job
        running = self.state is JobState.RUNNING
        same_phase = running and job.phase == self.phase and job.attempt == self.attempt
        return replace(
            job,
            state=self.state,
            phase=self.phase,
            fraction=self.fraction,
            attempt=self.attempt,
            started_ms=job.started_ms if running and job.attempt == self.attempt else None,
            phase_ms=job.phase_ms if same_phase else None,
            finished_ms=None,
            timings={},
            context="",
            context_bytes=0,
            error=None,
        )


class Events:
    """The event streams of all jobs."""

    def __init__(self, client: Client, prefix: str) -> None:
        self._client = client
        self._prefix = prefix

    def last(self, job_id: str) -> Event | None:
        """The newest change of a job that has one."""
        found = self._client.xrevrange(self._key(job_id), count=1)
        return Event.decode(*found[0]) if found else None

    def holds(self, job_id: str, event_id: str) -> bool:
        """Whether everything after this id can still be told."""
        if event_id == BEGINNING:
            return int(self._client.xlen(self._key(job_id))) < KEPT
        if not _ID.fullmatch(event_id):
            return False
        return bool(self._client.xrange(self._key(job_id), event_id, event_id, count=1))

    def after(self, job_id: str, event_id: str, wait_ms: int) -> list[Event]:
        """The changes after an id, oldest first; waits up to `wait_ms` for the first of them."""
        found = self._client.xread({self._key(job_id): event_id}, count=READ, block=max(1, wait_ms))
        return [Event.decode(*entry) for _, entries in found or () for entry in entries]

    def _key(self, job_id: str) -> str:
        return f"{self._prefix}events:{job_id}"
