"""The epoch: one random id in Redis and in the data folder, which says that the two belong together.

A Redis that was emptied, or one that belongs to another folder, knows nothing of the files that lie here. While
the two ids differ nothing is deleted and no fit is taken; `tabrelay catalogue rebuild` makes them equal again.
Redis may come back empty at any moment, so it is asked at each use; the file's id is kept in memory.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from common.catalogue.connection import Client
from common.catalogue.recordfile import RecordFile
from common.errors import CatalogueEmptied
from common.names import new_id

_ID = re.compile(r"[0-9a-f]{32}")


class Epoch:
    """The epoch of one deployment."""

    def __init__(self, client: Client, prefix: str, data: Path) -> None:
        self._client = client
        self._key = f"{prefix}epoch"
        self._data = data
        self._path = data / "epoch"
        self._in_file = ""

    def matches(self, *, look_again: bool = False) -> bool:
        """Whether catalogue and folder belong together; `look_again` reads the file too, in case it went away.

        Raises CatalogueUnavailable.
        """
        in_redis = self._client.get(self._key)
        if look_again or in_redis != self._in_file:
            self._in_file = self._read()
        return bool(in_redis) and in_redis == self._in_file

    def ensure(self) -> bool:
        """Begin an epoch where there is nothing to lose; returns whether catalogue and folder belong together.

        With contexts or published versions on disk nothing is written. Raises CatalogueUnavailable, OSError.
        """
        if self.matches(look_again=True):
            return True
        in_redis = self._client.get(self._key)
        if (in_redis and self._in_file) or self._worth_keeping():
            return False
        if not in_redis:
            # Several processes may be here at once: the first one's id is everybody's. An id in the file is used
            # again, since Redis may have lost the last second of its log.
            self._client.set(self._key, self._in_file or new_id(), nx=True)
        self._write(str(self._client.get(self._key)))
        return self.matches()

    def require(self) -> None:
        """Raise CatalogueEmptied unless catalogue and folder belong together, or CatalogueUnavailable."""
        if not self.matches() and not self.ensure():
            raise CatalogueEmptied(retry_after_s=30)

    def explain_absence(self) -> None:
        """What was asked for is not in Redis: raise CatalogueEmptied when that is because Redis lost what it knew."""
        if not self.matches() and self._in_file:
            raise CatalogueEmptied(retry_after_s=30)

    def restore(self) -> bool:
        """Make both ids equal, once the catalogue holds what the folder tells; returns whether anything changed."""
        if self.matches(look_again=True):
            return False
        # The folder's id wins: other hosts that share this catalogue may hold it too.
        if self._in_file:
            self._client.set(self._key, self._in_file)
        else:
            self._client.set(self._key, new_id(), nx=True)
            self._write(str(self._client.get(self._key)))
        return True

    @property
    def value(self) -> str:
        """The folder's id as last read."""
        return self._in_file

    def _worth_keeping(self) -> bool:
        if any(self._data.glob("contexts/*/*.safetensors")):
            return True
        return any(line.get("op") == "publish" for line in RecordFile(self._data).read())

    def _read(self) -> str:
        try:
            found = self._path.read_text().strip()
        except FileNotFoundError:
            return ""
        return found if _ID.fullmatch(found) else ""

    def _write(self, value: str) -> None:
        self._data.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside = self._data / f".epoch.{new_id()}"
        try:
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(value + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self._path)
        finally:
            beside.unlink(missing_ok=True)
        folder = os.open(self._data, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
