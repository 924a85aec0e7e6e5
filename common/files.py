"""The data folder: where tables, uploads and contexts lie, one lock a tenant, and the end of unreferenced files.

    <data>/uploads/<id>                              raw uploads that a fit worker still has to parse
    <data>/tables/<tenant>/<digest>.parquet          canonical training tables
    <data>/contexts/<tenant>/<digest>.safetensors    contexts (common.contexts.store)
    <data>/records.jsonl                             the record file
    <data>/epoch                                     which catalogue belongs here (common.catalogue.epoch)
    <data>/models/                                   downloaded weights

A file enters under its tenant's lock together with the script that refers to it, and leaves under the same
lock after the catalogue said once more that nobody refers to it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common import logs
from common.catalogue import Catalogue
from common.errors import CatalogueUnavailable, FilesBusy
from common.names import is_digest, is_tenant
from common.settings import Settings
from common.tables.canonical import sync_folder

log = logs.get("files")

#: How long a lock is waited for; whoever holds one needs milliseconds, so longer is a process that hangs.
LOCK_S = 30.0
LOCK_LOOK_S = 0.002


class DataFolder:
    """Paths under the data folder; folders are made 0700 when first used."""

    def __init__(self, settings: Settings) -> None:
        self._root = settings.data
        self._host = settings.host

    def uploads(self) -> Path:
        """The folder of raw uploads and of files on their way to be tables."""
        return private_folder(self._root / "uploads")

    def upload(self, upload_id: str) -> Path:
        """A raw upload."""
        if not upload_id.isalnum():
            raise ValueError("an upload's id is letters and digits")
        return self.uploads() / upload_id

    def tables(self, tenant: str) -> Path:
        """A tenant's tables."""
        return private_folder(self._root / "tables" / _tenant(tenant))

    def roots(self, kind: str) -> list[Path]:
        """The folders whose sub-folders are tenants and hold files of this kind, one a tier."""
        if kind == "table":
            return [self._root / "tables"]
        return [self._root / "contexts"] + ([self._host] if self._host is not None else [])

    def table(self, tenant: str, digest: str) -> Path:
        """A canonical table."""
        return self.tables(tenant) / f"{_digest(digest)}.parquet"

    def keep_table(self, tenant: str, digest: str, parsed: Path) -> Path:
        """Give a parsed table its name, durably, also where one lies: this one is whole, that one may have rotted.

        Hold the tenant's lock.
        """
        place = self.table(tenant, digest)
        os.replace(parsed, place)
        sync_folder(place.parent)
        return place

    def contexts(self) -> Path:
        """The folder of all tenants' contexts on disk."""
        return self._root / "contexts"

    def temporary_context(self, tenant: str, attempt: str) -> Path:
        """A name of this attempt beside where the context will lie, so that publishing is a rename."""
        return private_folder(self.contexts() / _tenant(tenant)) / f".tmp-{attempt}"

    def tiers(self, tenant: str, kind: str, digest: str) -> list[Path]:
        """Every place where a tenant's file of this kind may lie."""
        if kind == "table":
            return [self.table(tenant, digest)]
        name = f"{_digest(digest)}.safetensors"
        places = [self.contexts() / _tenant(tenant) / name]
        if self._host is not None:
            places.append(self._host / _tenant(tenant) / name)
        return places

    @contextmanager
    def locked(self, tenant: str) -> Iterator[None]:
        """Hold the tenant's lock, which ends with the process that holds it; raises FilesBusy after LOCK_S."""
        with self._holding(_tenant(tenant)):
            yield

    @contextmanager
    def budget_locked(self) -> Iterator[None]:
        """Hold the disk budget's lock, so that two publishes never count the same free bytes.

        Taken before a tenant's lock, never while one is held. No tenant's name begins with a dot.
        """
        with self._holding(".budget"):
            yield

    @contextmanager
    def _holding(self, name: str) -> Iterator[None]:
        descriptor = os.open(private_folder(self._root / "locks") / name, os.O_RDWR | os.O_CREAT, 0o600)
        ends = time.monotonic() + LOCK_S
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > ends:
                        raise FilesBusy(retry_after_s=5) from None
                    time.sleep(LOCK_LOOK_S)
            yield
        finally:
            # Closing alone would leave it locked while a process that was forked meanwhile has the descriptor too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def is_full(error: OSError) -> bool:
    """Whether this fault means that there is no room: a full disk, a quota, or the largest file allowed."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def bury(folder: DataFolder, catalogue: Catalogue, tenant: str) -> int:
    """Unlink every file of the tenant that nobody refers to, in every tier; returns how many.

    None while the catalogue does not belong to this folder: what another one says of its files is not said of these.
    What can't be done now, the catalogue or the files being out of reach, is done by the next one who buries.
    """
    buried = 0
    try:
        if not catalogue.epoch.matches():
            return buried
        for kind, digest in catalogue.datasets.dying(tenant):
            with folder.locked(tenant):
                if not catalogue.datasets.is_dying(tenant, kind, digest):
                    continue
                for path in folder.tiers(tenant, kind, digest):
                    path.unlink(missing_ok=True)
                catalogue.datasets.buried(tenant, kind, digest)
            log.info("file removed", kind=kind, digest=digest[:12])
            buried += 1
    except (CatalogueUnavailable, FilesBusy) as error:
        log.warning("files that nobody refers to are removed later", why=str(error))
    return buried


def private_folder(folder: Path) -> Path:
    """The folder, made with every missing parent, mode 0700."""
    missing = [folder, *folder.parents]
    for part in reversed(missing[: next(i for i, path in enumerate(missing) if path.exists())]):
        part.mkdir(mode=0o700, exist_ok=True)
    return folder


def _tenant(name: str) -> str:
    if not is_tenant(name):
        raise ValueError(f"{name!r} can't name a tenant")
    return name


def _digest(text: str) -> str:
    if not is_digest(text):
        raise ValueError("a digest is 64 hex digits")
    return text
