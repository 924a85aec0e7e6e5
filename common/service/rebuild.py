"""`tabrelay catalogue rebuild`: read datasets, versions and pins back from the record file and the contexts.

It adds what the catalogue lacks and changes nothing that is there, so it may run at any time, also beside a running
stack and more than once. A version comes back only when its context is in some tier and matches its digest.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from common.catalogue import Catalogue
from common.catalogue.recordfile import RecordFile
from common.catalogue.replay import Recorded, RecordedDataset, Replayed, replay
from common.contexts.format import parse_header
from common.contexts.manifest import Manifest
from common.errors import ContextGone, DatasetNotFound
from common.files import DataFolder
from common.names import is_digest, is_tenant
from common.settings import Settings

MISSING, DAMAGED, NO_RECORD = "file missing", "damaged", "no record"


@dataclass(frozen=True)
class NotRestored:
    """A version or a file that did not come back."""

    tenant: str
    dataset: str  # "" for a file that no record names
    version: int
    context: str
    reason: str
    detail: str = ""


@dataclass
class Rebuilt:
    """What a rebuild did."""

    datasets: int = 0  # restored
    versions: int = 0
    pins: int = 0
    known_datasets: int = 0  # there before
    known_versions: int = 0
    epoch: bool = False  # it was written
    unreadable_lines: int = 0
    not_restored: list[NotRestored] = field(default_factory=list)

    @property
    def changed(self) -> bool:
        """Whether anything was not as it should be."""
        return bool(self.versions or self.pins or self.epoch)

    def encode(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "changed": self.changed}


class Rebuild:
    """One rebuild of one data folder's catalogue."""

    def __init__(self, catalogue: Catalogue, settings: Settings) -> None:
        self._catalogue = catalogue
        self._settings = settings
        self._folder = DataFolder(settings)
        self._records = RecordFile(settings.data)
        self._checked: dict[tuple[str, str], str] = {}

    def run(self) -> Rebuilt:
        """Restore, then write the epoch; raises CatalogueUnavailable, OSError."""
        self._catalogue.client.ping()
        report = Rebuilt()
        # Digests are compared before anything is locked: it may take minutes.
        for (tenant, name), dataset in self._replay().datasets.items():
            known = self._known(tenant, name)
            for number, entry in dataset.versions.items():
                if number not in known:
                    self._check(tenant, entry.version.context)
        for tenant in sorted({tenant for tenant, _ in self._replay().datasets}):
            # Publishes hold the tenant's lock, deletes append a tombstone first: with both held nothing changes.
            with self._folder.locked(tenant), self._records.still():
                for (owner, name), dataset in self._replay().datasets.items():
                    if owner == tenant:
                        self._restore(tenant, name, dataset, report)
        replayed = self._replay()
        report.unreadable_lines = replayed.unreadable
        self._unrecorded(replayed, report)
        report.epoch = self._catalogue.epoch.restore()
        return report

    def _replay(self) -> Replayed:
        return replay(self._records.read(), self._settings.versions_kept)

    def _known(self, tenant: str, name: str) -> Mapping[int, Any]:
        try:
            return self._catalogue.datasets.get(tenant, name).versions
        except DatasetNotFound:
            return {}

    def _restore(self, tenant: str, name: str, dataset: RecordedDataset, report: Rebuilt) -> None:
        known = self._known(tenant, name)
        report.known_datasets += bool(known)
        report.known_versions += len(known)
        whole: dict[int, Recorded] = {}
        for number, entry in sorted(dataset.versions.items()):
            if number in known:
                continue
            context = entry.version.context
            fault = self._check(tenant, context)
            if not fault and not any(path.exists() for path in self._places(tenant, context)):
                fault = MISSING  # unlinked since it was checked
            if not fault:
                whole[number] = entry
            elif not entry.open:  # an open one may never have been published
                reason, _, detail = fault.partition(": ")
                report.not_restored.append(NotRestored(tenant, name, number, context, reason, detail))
        new, pinned, versions = self._catalogue.datasets.restore(
            tenant,
            name,
            {
                "next": dataset.next,
                "pinned": dataset.pinned,
                "versions": [
                    {"version": number, "record": entry.record, "open": entry.open}
                    for number, entry in whole.items()
                ],
            },
        )
        report.datasets += new
        report.pins += pinned
        report.versions += len(versions)

    def _unrecorded(self, replayed: Replayed, report: Rebuilt) -> None:
        """Contexts on disk that no version names; they are told, never deleted."""
        named = {
            (tenant, entry.version.context)
            for (tenant, _), dataset in replayed.datasets.items()
            for entry in dataset.versions.values()
        }
        for path in sorted(self._folder.roots("context")[0].glob("*/*.safetensors")):
            tenant, digest = path.parent.name, path.stem
            if not is_tenant(tenant) or not is_digest(digest) or (tenant, digest) in named:
                continue
            if self._catalogue.datasets.is_referred(tenant, "context", digest):
                continue
            reason = replayed.former.get((tenant, digest), NO_RECORD)
            detail = _describe(path) if reason == NO_RECORD else ""
            report.not_restored.append(NotRestored(tenant, "", 0, digest, reason, detail))

    def _places(self, tenant: str, digest: str) -> list[Path]:
        return self._folder.tiers(tenant, "context", digest)

    def _check(self, tenant: str, digest: str) -> str:
        """What is wrong with a context in every tier, "" when one is whole."""
        key = tenant, digest
        if key not in self._checked:
            faults = [_fault(path, digest) for path in self._places(tenant, digest)]
            worse = [fault for fault in faults if fault != MISSING]
            self._checked[key] = "" if "" in faults else (worse or faults)[0]
        return self._checked[key]


def _fault(path: Path, digest: str) -> str:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return f"{DAMAGED}: it is empty"
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                if blake3(mapped).hexdigest() != digest:
                    return f"{DAMAGED}: its digest is another one"
    except FileNotFoundError:
        return MISSING
    except OSError as error:
        return f"{DAMAGED}: {error.strerror}"
    return ""


def _describe(path: Path) -> str:
    """What an unrecorded context says of itself, so that an operator knows which fit it was."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        manifest = Manifest.decode(parse_header(memoryview(mapped)).manifest)
    except (ContextGone, OSError, ValueError) as error:  # ValueError: an empty file can't be mapped
        return str(error)
    return (
        f"{manifest.model}, {manifest.task}, {manifest.rows} x {manifest.columns}, made {manifest.created_at}"
    )
