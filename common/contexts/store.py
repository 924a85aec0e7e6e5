"""Where contexts lie: on disk for good, and in the host tier (memory) as a cache that a restart may take."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Container
from pathlib import Path

from common import logs
from common.contexts.reader import MappedContext, open_context
from common.errors import ContextDamaged, ContextGone
from common.files import DataFolder, private_folder
from common.names import new_id
from common.settings import Settings

log = logs.get("contexts")

TIERS = ("disk", "host")
_TEMPORARY = ".tmp-"


class ContextStore:
    """The context files of one host."""

    def __init__(self, settings: Settings) -> None:
        self._folder = DataFolder(settings)
        self._host_bytes = settings.host_tier_bytes if settings.host is not None else 0

    def temporary(self, tenant: str, attempt: str) -> Path:
        """A name of this attempt beside where the context will lie, so that publishing is a rename."""
        return self._folder.temporary_context(tenant, attempt)

    def discard(self, attempt: str) -> None:
        """Remove what an attempt that is over was writing."""
        for left in self._folder.contexts().glob(f"*/{_TEMPORARY}{attempt}"):
            left.unlink(missing_ok=True)

    def publish(self, temporary: Path, tenant: str, digest: str) -> Path:
        """Give a whole, fsynced file its name, durably. Hold the tenant's lock."""
        final = self._path(tenant, digest, "disk")
        os.replace(temporary, final)
        folder = os.open(final.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return final

    def best_path(self, tenant: str, digest: str) -> Path | None:
        """The fastest place that has the file; None when no place has."""
        for tier in reversed(TIERS):
            path = self._path(tenant, digest, tier)
            if path.exists():
                return path
        return None

    def size(self, tenant: str, digest: str) -> int:
        """Bytes of a context's file; raises ContextGone."""
        path = self.best_path(tenant, digest)
        found = _stat(path) if path is not None else None
        if found is None:
            raise ContextGone
        return found.st_size

    def open(self, tenant: str, digest: str) -> MappedContext:
        """Map a context from the fastest tier; a damaged copy in the host tier falls back to the disk.

        Raises ContextGone, ContextDamaged, ContextIncompatible.
        """
        if self._host_bytes:
            host = self._path(tenant, digest, "host")
            try:
                mapped = open_context(host, digest, "host")
                _touch(host)  # the host tier drops what was opened longest ago
                return mapped
            except ContextGone as error:
                if isinstance(error, ContextDamaged):
                    log.warning("damaged copy in the host tier", context=digest[:12])
                    host.unlink(missing_ok=True)
            except FileNotFoundError:
                pass  # unlinked between opening and touching
        return open_context(self._path(tenant, digest, "disk"), digest, "disk")

    def touch(self, tenant: str, digest: str) -> None:
        """Note that the context is in use: retention ends what was used longest ago. Its age stays as it is."""
        with contextlib.suppress(OSError):  # deleted meanwhile, or a disk that is read only here
            _touch(self._path(tenant, digest, "disk"))

    def copy_to_host(self, tenant: str, digest: str, pinned: Container[tuple[str, str]] = ()) -> bool:
        """Copy a context into the host tier, dropping what was opened longest ago and is not `pinned`.

        False when it does not fit.
        """
        source = self._path(tenant, digest, "disk")
        if not self._host_bytes or not source.exists():
            return False
        host = self._path(tenant, digest, "host")
        if host.exists():
            return True
        size = source.stat().st_size
        private_folder(host.parent)
        if size > self._host_bytes or not self._make_room(host.parent.parent, size, pinned):
            return False
        temporary = host.parent / f"{_TEMPORARY}{new_id()}"
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as copy, source.open("rb") as file:
                shutil.copyfileobj(file, copy, 16 * 1024**2)
            os.replace(temporary, host)
        except OSError as error:
            log.warning("no copy in the host tier", context=digest[:12], error=str(error))
            temporary.unlink(missing_ok=True)
            return False
        if not source.exists():  # deleted meanwhile
            host.unlink(missing_ok=True)
            return False
        return True

    def _make_room(self, root: Path, size: int, pinned: Container[tuple[str, str]]) -> bool:
        files = sorted(
            (
                (stat.st_atime_ns, stat.st_size, path)
                for path in root.glob("*/*")
                if (stat := _stat(path)) is not None
            ),
            key=lambda entry: entry[0],
        )
        used = sum(entry[1] for entry in files)
        for _, freed, path in files:
            if used + size <= self._host_bytes:
                break
            if (path.parent.name, path.stem) in pinned:
                continue
            path.unlink(missing_ok=True)
            used -= freed
        free = shutil.disk_usage(root).free
        return used + size <= self._host_bytes and size < free

    def _path(self, tenant: str, digest: str, tier: str) -> Path:
        places = self._folder.tiers(tenant, "context", digest)
        return places[TIERS.index(tier)] if TIERS.index(tier) < len(places) else places[0]


def _touch(path: Path) -> None:
    """Set the access time; the modification time is how a reader knows that nobody wrote."""
    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None
