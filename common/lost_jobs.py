"""Looks after jobs whose worker is gone, whose deadline passed in the queue, or whose wake-up was lost.

Runs in the parents of fit workers, and beside predict workers while no fit worker lives; one process at a time.
"""

from __future__ import annotations

import time

from common import logs
from common.catalogue import Catalogue
from common.catalogue.jobs import QUEUES
from common.contexts.store import ContextStore
from common.settings import Settings
from common.wake import unheard

log = logs.get("janitor")


class LostJobs:
    """Looks every `janitor_every_s`."""

    def __init__(
        self, catalogue: Catalogue, settings: Settings, name: str, *, as_substitute: bool = False
    ) -> None:
        """`name` is who holds the lock."""
        self._catalogue = catalogue
        self._settings = settings
        self._name = name
        self._as_substitute = as_substitute
        self._store = ContextStore(settings)
        self._looked: float | None = None

    def look(self) -> list[str]:
        """Requeue or end what is lost; the queues that must be woken. Raises CatalogueUnavailable."""
        now = time.monotonic()
        if self._looked is not None and now - self._looked < self._settings.janitor_every_s:
            return []
        self._looked = now
        lasts_s = self._settings.janitor_every_s
        if not self._catalogue.workers.has_turn(
            "janitor", self._name, lasts_s, as_substitute=self._as_substitute
        ):
            return []
        jobs = self._catalogue.jobs
        for job, token in jobs.expired():
            queue = jobs.release_dead(job)
            if queue:
                log.warning("a job's lease ran out", job=job, then=queue)
                self._store.discard(token)
        for job in jobs.end_overdue():
            log.warning("a job's deadline passed while it waited", job=job)
        return unheard(self._catalogue, QUEUES)
