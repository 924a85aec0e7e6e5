"""The record file: names, versions and pins on disk, so that the loss of Redis loses no dataset.

One JSON object a line, appended by a single write and fsynced before what it announces happens:
`publish` (an intent, with the whole version record), `published` or `aborted` (what became of it), `end` (one
version is gone), `delete` (a tombstone) and `pin`. Later lines win; torn lines are passed over.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from common.catalogue.records import Version


class RecordFile:
    """Appends to `<data>/records.jsonl`; many processes may do so at once."""

    def __init__(self, data: Path) -> None:
        self.path = data / "records.jsonl"

    def intend(self, tenant: str, dataset: str, version: Version) -> None:
        """This version is about to be published."""
        record = orjson.loads(version.encode())
        self._append({"op": "publish", "tenant": tenant, "dataset": dataset, "version": record})

    def published(self, tenant: str, dataset: str, version: int) -> None:
        """The catalogue took it."""
        self._append({"op": "published", "tenant": tenant, "dataset": dataset, "version": version})

    def aborted(self, tenant: str, dataset: str, version: int) -> None:
        """The catalogue refused it."""
        self._append({"op": "aborted", "tenant": tenant, "dataset": dataset, "version": version})

    def end(self, tenant: str, dataset: str, version: int) -> None:
        """This version is given up."""
        self._append({"op": "end", "tenant": tenant, "dataset": dataset, "version": version})

    def delete(self, tenant: str, dataset: str) -> None:
        """The dataset and every version recorded so far are gone."""
        self._append({"op": "delete", "tenant": tenant, "dataset": dataset})

    def pin(self, tenant: str, dataset: str, pinned: bool) -> None:
        """The dataset is pinned, or no longer."""
        self._append({"op": "pin", "tenant": tenant, "dataset": dataset, "pinned": pinned})

    def read(self) -> Iterator[dict[str, Any]]:
        """Every whole line, oldest first."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    continue
                try:
                    record = orjson.loads(line)
                except orjson.JSONDecodeError:
                    continue  # its writer died; the next one began a new line
                if isinstance(record, dict):
                    yield record

    @contextmanager
    def still(self) -> Iterator[None]:
        """Nobody appends meanwhile, this process neither: an append would wait for itself."""
        with self._locked():
            yield

    def _append(self, record: dict[str, Any]) -> None:
        line = orjson.dumps(record) + b"\n"
        with self._locked() as descriptor:
            end = os.fstat(descriptor).st_size
            if end and os.pread(descriptor, 1, end - 1) != b"\n":  # a writer died in mid-line
                line = b"\n" + line
            written = os.write(descriptor, line)
            if written != len(line):
                os.ftruncate(descriptor, end)
                raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes of a record were written")
            os.fsync(descriptor)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = not self.path.exists()
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if new:
                folder = os.open(self.path.parent, os.O_RDONLY)
                os.fsync(folder)
                os.close(folder)
            yield descriptor
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process forked meanwhile has the descriptor too
            os.close(descriptor)
