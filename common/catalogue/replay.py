"""What the record file says now: its lines played through in order, later ones win.

A publish ends the versions beyond those kept, as its script does, so the file holds no line for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from common.catalogue.records import Version
from common.names import is_digest, is_tenant

#: What became of a context that no live version names.
TOMBSTONED, REPLACED, ENDED, ABORTED = "tombstoned", "replaced", "ended", "aborted"


@dataclass
class Recorded:
    """One version; `open` while neither `published` nor `aborted` followed its intent."""

    version: Version
    open: bool = True

    @property
    def record(self) -> str:
        """As the catalogue stores it."""
        return self.version.encode()


@dataclass
class RecordedDataset:
    """A dataset that was not deleted since its last publish."""

    versions: dict[int, Recorded] = field(default_factory=dict)
    pinned: bool = False
    next: int = 0  # the highest version number that was given out


@dataclass
class Replayed:
    """The record file's present meaning."""

    datasets: dict[tuple[str, str], RecordedDataset] = field(default_factory=dict)
    former: dict[tuple[str, str], str] = field(default_factory=dict)  # (tenant, context): what became of it
    unreadable: int = 0

    def files(self) -> set[tuple[str, str, str]]:
        """(tenant, kind, digest) of every file that a published version needs."""
        found = set()
        for (tenant, _), dataset in self.datasets.items():
            for entry in dataset.versions.values():
                if not entry.open:
                    found.add((tenant, "context", entry.version.context))
                    found.add((tenant, "table", entry.version.table))
        return found


def replay(lines: Iterable[Mapping[str, Any]], versions_kept: int) -> Replayed:
    """Play the lines through; a line that makes no sense is counted and passed over."""
    found = Replayed()
    for line in lines:
        try:
            _apply(found, line, versions_kept)
        except (KeyError, TypeError, ValueError, AttributeError):
            found.unreadable += 1
    found.datasets = {key: dataset for key, dataset in found.datasets.items() if dataset.versions}
    return found


def _apply(found: Replayed, line: Mapping[str, Any], versions_kept: int) -> None:
    op, tenant, name = line["op"], line["tenant"], line["dataset"]
    if not is_tenant(tenant) or not isinstance(name, str):
        raise ValueError("no tenant or no name")
    dataset = found.datasets.setdefault((tenant, name), RecordedDataset())
    if op == "publish":
        version = Version.decode(orjson.dumps(line["version"]))
        if not is_digest(version.context):
            raise ValueError("no digest")
        dataset.versions[version.version] = Recorded(version)
        dataset.next = max(dataset.next, version.version)
        found.former.pop((tenant, version.context), None)
    elif op == "published":
        entry = dataset.versions.get(line["version"])
        if entry is not None:
            entry.open = False
        if not dataset.pinned:
            numbers = sorted(n for n, kept in dataset.versions.items() if not kept.open)
            for number in numbers[: max(len(numbers) - versions_kept, 0)]:
                _end(found, tenant, dataset, number, REPLACED)
    elif op == "aborted":
        _end(found, tenant, dataset, line["version"], ABORTED)
    elif op == "end":
        _end(found, tenant, dataset, line["version"], ENDED)
    elif op == "pin":
        dataset.pinned = bool(line["pinned"])
    elif op == "delete":
        for number in list(dataset.versions):
            _end(found, tenant, dataset, number, TOMBSTONED)
        del found.datasets[tenant, name]
    else:
        raise ValueError(f"unknown operation {op!r}")


def _end(found: Replayed, tenant: str, dataset: RecordedDataset, number: int, why: str) -> None:
    entry = dataset.versions.pop(number, None)
    if entry is not None:
        found.former[tenant, entry.version.context] = why
