"""Removes what nobody needs: leftovers of killed processes, unreferenced files, rows without a file, expired datasets.

Every removal asks the catalogue again at the moment it happens. Nothing younger than `sweep_age_s` goes, and
nothing at all while the catalogue does not belong to the data folder (common.catalogue.epoch). What the record file
says is published stays even when the catalogue does not know it: Redis may have lost its last second.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from common import logs
from common.catalogue import Catalogue
from common.catalogue.recordfile import RecordFile
from common.catalogue.replay import replay
from common.errors import CatalogueUnavailable, DatasetNotFound
from common.files import DataFolder, bury
from common.names import is_digest, is_tenant
from common.service.datasets import DatasetService
from common.settings import Settings

log = logs.get("janitor")

CONNECT_S = 1.0
#: Between two steps, so that a waiting fork gets its turn.
FORK_S = 0.0005
#: Sockets in the run folder that are not a predict worker's.
_OTHER_SOCKETS = ("redis.sock",)
_SUFFIXES = {"context": ".safetensors", "table": ".parquet"}


@dataclass
class Removed:
    """How much one sweep removed, by kind."""

    temporary: int = 0
    uploads: int = 0
    files: int = 0  # contexts and tables that nobody referred to
    sockets: int = 0
    versions: int = 0  # rows whose context was in no tier
    datasets: int = 0  # expired

    def counts(self) -> dict[str, int]:
        """Those above zero."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name)}


class Janitor:
    """One sweep at a time.

    `now` is the clock that files' times are compared with; `pause` is called between steps, when nothing is locked.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        settings: Settings,
        *,
        now: Callable[[], float] = time.time,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        self._pause = pause
        self._catalogue = catalogue
        self._settings = settings
        self._now = now
        self._folder = DataFolder(settings)
        self._records = RecordFile(settings.data)
        self._datasets = DatasetService(catalogue, settings)
        self._warned = False

    def sweep(self) -> Removed:
        """Remove what may go; raises CatalogueUnavailable."""
        removed = Removed()
        if not self._catalogue.epoch.matches(look_again=True):
            if not self._warned:
                log.warning(
                    "the catalogue does not belong to this data folder; nothing is removed until "
                    "`tabrelay catalogue rebuild`"
                )
            self._warned = True
            return removed
        self._warned = False
        removed.temporary = self.temporary()
        removed.uploads = self.uploads()
        removed.datasets = self.expired()
        removed.versions = self.rows_without_file()
        removed.files = self.unreferenced()
        removed.sockets = self.sockets()
        counts = removed.counts()
        if counts:
            log.info("swept", **counts)
            for name, count in counts.items():
                self._catalogue.client.hincrby(f"{self._settings.redis_prefix}removed", name, count)
        return removed

    def temporary(self) -> int:
        """Files that killed processes were writing."""
        data = self._settings.data
        places = [data.glob("uploads/.*")]
        places += [root.glob("*/.tmp-*") for root in self._folder.roots("context")]
        return sum(self._remove(path) for place in places for path in place if self._is_old(path))

    def uploads(self) -> int:
        """Raw uploads that no queued or running job needs; an upload is named as its job."""
        ttl = max(self._settings.upload_ttl_s, self._settings.sweep_age_s)
        count = 0
        for path in self._settings.data.glob("uploads/[!.]*"):
            self._pause()
            if self._age(path) < ttl:
                continue
            state = self._catalogue.client.hget(f"{self._settings.redis_prefix}job:{path.name}", "state")
            if state not in ("queued", "running") and self._catalogue.epoch.matches():
                count += self._remove(path)
        return count

    def expired(self) -> int:
        """Datasets whose time to live is up, tombstone first."""
        seconds, micros = self._catalogue.client.time()
        now_ms = seconds * 1000 + micros // 1000
        count = 0
        for tenant, name in self._catalogue.datasets.expired(now_ms):
            self._pause()
            if self._datasets.delete_expired(tenant, name, now_ms):
                log.info("dataset expired", dataset=name)
                count += 1
        return count

    def rows_without_file(self) -> int:
        """Versions whose context is in no tier; the dataset's pointer goes to the highest that remains."""
        count = 0
        for tenant, name in self._catalogue.datasets.all():
            self._pause()
            # A tenant without any folder is rather a disk that is not mounted.
            if not is_tenant(tenant) or not (self._folder.roots("context")[0] / tenant).is_dir():
                continue
            try:
                found = self._catalogue.datasets.get(tenant, name)
            except DatasetNotFound:
                continue
            for version in found.versions.values():
                young = self._now() - version.created_ms / 1000 < self._settings.sweep_age_s
                if young or not is_digest(version.context) or self._exists(tenant, version.context):
                    continue
                with self._folder.locked(tenant):
                    if self._exists(tenant, version.context) or not self._catalogue.epoch.matches():
                        continue
                    self._records.end(tenant, name, version.version)
                    if self._catalogue.datasets.drop(tenant, name, version):
                        log.warning(
                            "version dropped, its context is gone", dataset=name, version=version.version
                        )
                        count += 1
        return count

    def unreferenced(self) -> int:
        """Contexts and tables that neither a version nor a job refers to, and those already dying."""
        recorded: set[tuple[str, str, str]] | None = None
        epoch = self._catalogue.epoch.value
        tenants = set()
        for kind in ("context", "table"):
            for tenant, path in self._files(kind):
                self._pause()
                tenants.add(tenant)
                if not is_digest(path.stem) or path.suffix != _SUFFIXES[kind] or not self._is_old(path):
                    continue
                if self._catalogue.datasets.is_referred(tenant, kind, path.stem):
                    continue
                if recorded is None:  # read once a sweep, and only when something looks unneeded
                    recorded = replay(self._records.read(), self._settings.versions_kept).files()
                if (tenant, kind, path.stem) in recorded:
                    log.warning(
                        "a published file is not in the catalogue; `tabrelay catalogue rebuild` restores it",
                        kind=kind,
                        digest=path.stem[:12],
                    )
                    continue
                with self._folder.locked(tenant):
                    # A publish may have given the name to a fresh file since.
                    if self._is_old(path):
                        self._catalogue.datasets.condemn(epoch, tenant, kind, path.stem)
        count = 0
        for tenant in sorted(tenants):
            self._pause()
            count += bury(self._folder, self._catalogue, tenant)
        return count

    def sockets(self) -> int:
        """Sockets of predict workers that died: nobody accepts there."""
        count = 0
        for path in self._settings.run.glob("*.sock"):
            self._pause()
            if path.name in _OTHER_SOCKETS or not self._is_old(path):
                continue
            before = _identity(path)
            # A worker that starts again replaces its socket: what is unlinked must be what refused.
            if before is not None and _refuses(path) and _identity(path) == before:
                count += self._remove(path)
        return count

    def _files(self, kind: str) -> Iterator[tuple[str, Path]]:
        for root in self._folder.roots(kind):
            for path in root.glob("*/*"):
                if is_tenant(path.parent.name):
                    yield path.parent.name, path

    def _exists(self, tenant: str, digest: str) -> bool:
        return any(path.exists() for path in self._folder.tiers(tenant, "context", digest))

    def _age(self, path: Path) -> float:
        """Seconds since anything in it was written; below zero for what is not there."""
        try:
            written = path.lstat().st_mtime
            if path.is_dir():
                written = max([written, *(inside.lstat().st_mtime for inside in path.rglob("*"))])
        except OSError:
            return -1.0
        return self._now() - written

    def _is_old(self, path: Path) -> bool:
        age = self._age(path)
        return age >= 0 and age >= self._settings.sweep_age_s

    @staticmethod
    def _remove(path: Path) -> int:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        return 1


class Sweeper:
    """Has the janitor sweep every `sweep_every_s`, on a thread of its own.

    Of all processes one sweeps: whoever first takes the lock, which runs out when the next sweep is due. With
    `as_substitute` only while no fit worker lives, whose keepers do it otherwise.

    A fit worker's parent forks its children. A lock that this thread held at that moment would stay locked in the child
    for ever, so forks wait for the present step to end.
    """

    def __init__(
        self, catalogue: Catalogue, settings: Settings, name: str, *, as_substitute: bool = False
    ) -> None:
        self._catalogue = catalogue
        self._settings = settings
        self._name = name
        self._as_substitute = as_substitute
        self._step = threading.Lock()
        self._janitor = Janitor(catalogue, settings, pause=self._let_fork)
        os.register_at_fork(
            before=self._step.acquire, after_in_parent=self._step.release, after_in_child=self._step.release
        )
        self._thread: threading.Thread | None = None
        self._looked: float | None = None

    def look(self) -> None:
        """Begin a sweep if one is due; returns at once, since a sweep may wait for locks."""
        now = time.monotonic()
        # More often than the lock runs out, so that a sweep that is due begins soon, whoever was last.
        if self._looked is not None and now - self._looked < self._settings.sweep_every_s / 4:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        self._looked = now
        self._thread = threading.Thread(target=self._sweep, name="janitor", daemon=True)
        self._thread.start()

    def _let_fork(self) -> None:
        self._step.release()
        time.sleep(FORK_S)  # a lock that is taken again at once is never had by another thread
        self._step.acquire()

    def _sweep(self) -> None:
        with self._step, contextlib.suppress(CatalogueUnavailable):
            lasts_s = self._settings.sweep_every_s
            if not self._catalogue.workers.has_turn(
                "sweep", self._name, lasts_s, as_substitute=self._as_substitute
            ):
                return
            try:
                self._janitor.sweep()
            except CatalogueUnavailable:
                raise
            except Exception:
                log.exception("the janitor stumbled and goes on")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


def _refuses(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
