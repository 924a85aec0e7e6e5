"""The routing snapshot: what a predict needs to know of the catalogue, kept in the API's own memory.

Refreshed when a change is announced and at least every `snapshot_refresh_s`; when Redis is down the last one
goes on answering, and when Redis was emptied (common.catalogue.epoch) no dataset is dropped from it. Redis is asked
on the way of a predict only for what the snapshot can't settle: a name or version it does not know, a dataset with a
job in flight, a context that a worker no longer has.
"""

from __future__ import annotations

import contextlib
import threading

from redis.exceptions import RedisError

from common import logs
from common.catalogue import Catalogue
from common.catalogue.records import Dataset, PredictWorker, Version
from common.errors import CatalogueEmptied, CatalogueUnavailable, DatasetNotFound, VersionNotFound
from common.settings import Settings

log = logs.get("snapshot")


class RoutingSnapshot:
    """Datasets and predict workers as last seen; a thread keeps it fresh."""

    def __init__(self, catalogue: Catalogue, settings: Settings) -> None:
        self._catalogue = catalogue
        self._refresh_s = settings.snapshot_refresh_s
        self._channel = f"{settings.redis_prefix}changed"
        self._datasets: dict[tuple[str, str], Dataset] = {}
        self._workers: tuple[PredictWorker, ...] = ()
        self._mark = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._reachable = False
        self._emptied = False
        self._thread = threading.Thread(target=self._run, name="routing-snapshot", daemon=True)

    def start(self) -> None:
        """Take a first snapshot if Redis answers, then keep it fresh beside everything else."""
        with contextlib.suppress(CatalogueUnavailable):
            self.refresh()
        self._thread.start()

    def stop(self) -> None:
        """End the thread; it is a daemon and a slow Redis does not hold up the process."""
        self._stop.set()
        self._thread.join(timeout=1)

    @property
    def reachable(self) -> bool:
        """Whether the latest refresh reached Redis."""
        return self._reachable

    @property
    def workers(self) -> tuple[PredictWorker, ...]:
        """Predict workers as last heard of."""
        return self._workers

    def resolve(self, tenant: str, name: str, number: int | None) -> Version:
        """The version asked for; raises DatasetNotFound or VersionNotFound."""
        dataset = self._datasets.get((tenant, name))
        if dataset is not None and not dataset.pending:
            version = dataset.version(number)
            if version is not None:
                return version
        return self.resolve_again(tenant, name, number)

    def resolve_again(self, tenant: str, name: str, number: int | None) -> Version:
        """The same from Redis; falls back to the snapshot while Redis is down."""
        try:
            dataset = self._catalogue.datasets.get(tenant, name)
        except CatalogueUnavailable:
            known = self._datasets.get((tenant, name))
            if known is None:
                raise
            dataset = known
        except DatasetNotFound:
            known = self._datasets.get((tenant, name))
            if not self._catalogue.epoch.matches():
                if known is None:
                    raise CatalogueEmptied(retry_after_s=30) from None
                dataset = known
            else:
                self._datasets.pop((tenant, name), None)
                raise
        else:
            self._datasets[tenant, name] = dataset
        version = dataset.version(number)
        if version is not None:
            return version
        if number is None:
            raise DatasetNotFound(f"the dataset {name!r} has no published version yet")
        have = ", ".join(str(n) for n in dataset.versions) or "none"
        raise VersionNotFound(f"the dataset {name!r} has no version {number}; it has {have}")

    def refresh(self) -> None:
        """Read what changed; raises CatalogueUnavailable."""
        with self._lock:
            try:
                emptied = not self._catalogue.epoch.matches()
                mark, changed = self._catalogue.datasets.changed_since(self._mark)
                if self._emptied and not emptied:  # restored: what was kept may not have come back
                    changed = list({*changed, *self._datasets})
                for tenant, name in changed:
                    try:
                        self._datasets[tenant, name] = self._catalogue.datasets.get(tenant, name)
                    except DatasetNotFound:
                        if not emptied and self._catalogue.epoch.matches():
                            self._datasets.pop((tenant, name), None)
                self._mark = mark
                workers = tuple(self._catalogue.workers.predict())
                if not workers and not self._catalogue.epoch.matches():
                    # An emptied Redis hears of the workers again at their next heartbeats.
                    workers, emptied = self._workers, True
                self._workers = workers
                self._tell(emptied)
            except CatalogueUnavailable:
                self._reachable = False
                raise
            self._reachable = True

    def _tell(self, emptied: bool) -> None:
        if emptied and not self._emptied:
            log.warning("the catalogue was emptied; routing goes on from the last snapshot")
        self._emptied = emptied

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with self._catalogue.client.pubsub(ignore_subscribe_messages=True) as announced:
                    announced.subscribe(self._channel)
                    while not self._stop.is_set():
                        announced.get_message(timeout=self._refresh_s)
                        self.refresh()
            except (CatalogueUnavailable, RedisError, OSError) as error:
                if self._reachable:
                    log.warning(
                        "the catalogue can't be reached; routing goes on from the last snapshot",
                        error=str(error),
                    )
                self._reachable = False
                self._stop.wait(min(self._refresh_s, 1.0))
