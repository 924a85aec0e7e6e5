"""The disk budget: what may be given up for a new context, least recently used first.

Only versions that are neither current nor of a pinned dataset are given up, and only when that makes enough room;
otherwise nothing is, and the new context is refused. How lately a context was used is its file's access time, which
predict workers set (`ContextStore.touch`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common import logs
from common.catalogue import Catalogue, Version
from common.catalogue.recordfile import RecordFile
from common.errors import DatasetNotFound, StorageFull
from common.files import DataFolder, bury
from common.names import is_digest, is_tenant
from common.settings import Settings

log = logs.get("retention")


@dataclass(frozen=True)
class Spare:
    """A version that may be given up."""

    tenant: str
    dataset: str
    version: Version
    used_ns: int
    nbytes: int


class Retention:
    """Keeps tables and contexts on disk within `disk_budget_bytes`."""

    def __init__(
        self, catalogue: Catalogue, folder: DataFolder, records: RecordFile, settings: Settings
    ) -> None:
        self._catalogue = catalogue
        self._folder = folder
        self._records = records
        self._budget = settings.disk_budget_bytes

    @contextlib.contextmanager
    def room_for(self, tenant: str, digest: str, nbytes: int) -> Iterator[None]:
        """Make room for a context and hold it for the `with` block; hold no tenant's lock when calling.

        Raises StorageFull when it can't be had, and CatalogueUnavailable.
        """
        if not self._budget:
            yield
            return
        with self._folder.budget_locked():
            if not self._folder.tiers(tenant, "context", digest)[0].exists():  # else it replaces its equal
                self._make_room(nbytes)
            yield

    def used(self) -> int:
        """Bytes of all tables and contexts on disk."""
        roots = self._folder.roots("context")[0], self._folder.roots("table")[0]
        return sum(_size(path) for root in roots for path in root.glob("*/[!.]*"))

    def _make_room(self, nbytes: int) -> None:
        if self.used() + nbytes <= self._budget:
            return
        for tenant in self._tenants():
            bury(self._folder, self._catalogue, tenant)
        used = self.used()
        spares = sorted(self._spares(), key=lambda spare: spare.used_ns)
        if used + nbytes - sum(spare.nbytes for spare in spares) > self._budget:
            raise StorageFull(
                f"the context has {nbytes} bytes and {used} of {self._budget} are taken (TABRELAY_DISK_BUDGET_BYTES); "
                "delete or unpin datasets, or raise the budget",
                limit=self._budget,
                size=nbytes,
                used=used,
            )
        for spare in spares:
            if self.used() + nbytes <= self._budget:
                return
            self._give_up(spare)
        used = self.used()
        if used + nbytes > self._budget:
            raise StorageFull(
                f"the context has {nbytes} bytes and {used} of {self._budget} are taken (TABRELAY_DISK_BUDGET_BYTES)",
                limit=self._budget,
                size=nbytes,
                used=used,
            )

    def _give_up(self, spare: Spare) -> None:
        with self._folder.locked(spare.tenant):
            if not self._catalogue.epoch.matches():
                return
            if not self._catalogue.datasets.drop(spare.tenant, spare.dataset, spare.version, sparing=True):
                return
            self._records.end(spare.tenant, spare.dataset, spare.version.version)
        bury(self._folder, self._catalogue, spare.tenant)
        log.info(
            "version given up for room",
            dataset=spare.dataset,
            version=spare.version.version,
            bytes=spare.nbytes,
        )

    def _spares(self) -> Iterator[Spare]:
        for tenant, name in self._catalogue.datasets.all():
            if not is_tenant(tenant):
                continue
            try:
                found = self._catalogue.datasets.get(tenant, name)
            except DatasetNotFound:
                continue
            if found.pinned:
                continue
            for version in found.versions.values():
                if version.version == found.current or not is_digest(version.context):
                    continue
                # A file that somebody else needs too would stay: ending this version would gain nothing.
                if self._catalogue.datasets.holders(tenant, "context", version.context) != 1:
                    continue
                path = self._folder.tiers(tenant, "context", version.context)[0]
                with contextlib.suppress(FileNotFoundError):
                    stat = path.stat()
                    yield Spare(tenant, name, version, stat.st_atime_ns, stat.st_size)

    def _tenants(self) -> list[str]:
        roots = self._folder.roots("context")[0], self._folder.roots("table")[0]
        return sorted({path.name for root in roots for path in root.glob("*") if is_tenant(path.name)})


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
