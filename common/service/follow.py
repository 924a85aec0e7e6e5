"""Following one job: what it is now, then each change, and its place while it waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from common.catalogue import Catalogue, Job, JobState
from common.catalogue.events import BEGINNING, Event
from common.service.forecast import Forecaster, Outlook

#: Seconds between two looks at a job that reports nothing: its place, or an end whose event was lost.
LOOK_S = 2.0


@dataclass(frozen=True)
class Told:
    """A job as it looked at one change; a change of its place alone has no id."""

    job: Job
    outlook: Outlook
    id: str = ""


class Follower:
    """One reader of one job. `begin` once, then `more` until `over`."""

    def __init__(
        self,
        catalogue: Catalogue,
        tenant: str,
        job_id: str,
        *,
        now: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._catalogue = catalogue
        self._tenant = tenant
        self._job_id = job_id
        self._now = now
        self._clock = clock
        self._after = BEGINNING
        self._position: int | None = None
        self._looked = float("-inf")
        #: Whether the job's end was told, or was known to the reader before.
        self.over = False

    def begin(self, last_id: str = "") -> list[Told]:
        """The present state, or what came after `last_id` when all of that is still kept; raises JobNotFound."""
        last = self._catalogue.events.last(self._job_id)
        job = self._job()
        if last_id and self._catalogue.events.holds(self._job_id, last_id):
            self._after = last_id
            changes = self._catalogue.events.after(self._job_id, last_id, 1)
            self.over = job.state.ended and not changes
            return self._changed(changes)
        if last is None:
            return [self._told(job, BEGINNING)]
        self._after = last.id
        return [self._told(last.of(job), last.id, last.at_ms)]

    def more(self, wait_s: float) -> list[Told]:
        """What has changed, after a wait of up to `wait_s` for it; raises JobNotFound, CatalogueUnavailable."""
        changes = self._catalogue.events.after(self._job_id, self._after, int(wait_s * 1000))
        if changes:
            return self._changed(changes)
        if self._now() - self._looked < LOOK_S:
            return []
        return self._look()

    def _look(self) -> list[Told]:
        before = self._position
        job = self._job()
        self._looked = self._now()
        if job.state.ended:
            changes = self._catalogue.events.after(self._job_id, self._after, 1)
            return self._changed(changes) or [self._told(job)]
        if job.state is not JobState.QUEUED:
            return []
        told = self._told(job)
        return [told] if told.outlook.position not in (None, before) else []

    def _changed(self, changes: list[Event]) -> list[Told]:
        if not changes:
            return []
        job = self._job()
        told = [self._told(change.of(job), change.id, change.at_ms) for change in changes]
        self._after = changes[-1].id
        return told

    def _told(self, job: Job, id: str = "", at_ms: int | None = None) -> Told:
        self.over = self.over or job.state.ended
        now_ms = int(self._clock() * 1000) if at_ms is None or job.state is JobState.QUEUED else at_ms
        outlook = Forecaster(self._catalogue).of(job, now_ms, told_ms=at_ms)
        self._position = outlook.position
        return Told(job, outlook, id)

    def _job(self) -> Job:
        return self._catalogue.jobs.get(self._tenant, self._job_id)
