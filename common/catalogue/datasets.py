"""Datasets and their versions, and which files nobody refers to any more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from common.catalogue.connection import Client, Scripts
from common.catalogue.records import Dataset, Version
from common.errors import DatasetNotFound


class Datasets:
    """The dataset side of the catalogue."""

    def __init__(self, client: Client, scripts: Scripts, prefix: str) -> None:
        self._client = client
        self._scripts = scripts
        self._prefix = prefix

    def get(self, tenant: str, name: str) -> Dataset:
        """The tenant's dataset; raises DatasetNotFound."""
        entry = self._client.hgetall(f"{self._prefix}dataset:{tenant}:{name}")
        if not entry:
            raise DatasetNotFound(f"there is no dataset {name!r}")
        versions = self._client.hgetall(f"{self._prefix}versions:{tenant}:{name}")
        return Dataset(
            tenant=tenant,
            name=name,
            current=int(entry.get("current") or 0),
            pinned=entry.get("pinned") == "1",
            pending=int(self._client.scard(f"{self._prefix}pending:{tenant}:{name}")),
            created_ms=int(entry.get("created_ms") or 0),
            updated_ms=int(entry.get("updated_ms") or 0),
            versions={int(number): Version.decode(text) for number, text in sorted(versions.items())},
            expires_ms=int(entry.get("expires_ms") or 0),
        )

    def names(self, tenant: str, *, after: str | None, limit: int) -> list[str]:
        """The tenant's dataset names in order."""
        low = f"({after}" if after else "-"
        return list(
            self._client.zrangebylex(f"{self._prefix}datasets:{tenant}", low, "+", start=0, num=limit)
        )

    def delete(self, tenant: str, name: str) -> None:
        """Delete with all versions, cancel what would publish into it; raises DatasetNotFound."""
        if not self._scripts.run("delete", tenant, name):
            raise DatasetNotFound(f"there is no dataset {name!r}")

    def pin(self, tenant: str, name: str, pinned: bool) -> None:
        """Keep all versions of a dataset, or no longer; raises DatasetNotFound."""
        if not self._scripts.run("pin", tenant, name, int(pinned)):
            raise DatasetNotFound(f"there is no dataset {name!r} with a published version")

    def pinned_contexts(self) -> frozenset[tuple[str, str]]:
        """(tenant, digest) of every version of every pinned dataset."""
        pinned = (entry.split("/", 1) for entry in self._client.smembers(f"{self._prefix}pinned"))
        return frozenset(
            (tenant, Version.decode(record).context)
            for tenant, name in pinned
            for record in self._client.hvals(f"{self._prefix}versions:{tenant}:{name}")
        )

    def mark(self) -> int:
        """A number that grows with every change of a dataset."""
        return int(self._client.get(f"{self._prefix}changes") or 0)

    def changed_since(self, mark: int) -> tuple[int, list[tuple[str, str]]]:
        """The present mark and (tenant, name) of every dataset that changed after `mark`."""
        now = self.mark()
        if now == mark:
            return now, []
        if now < mark:  # Redis was emptied or swapped
            mark = 0
        found = self._client.zrangebyscore(f"{self._prefix}changed", f"({mark}", "+inf")
        split = (entry.split("/", 1) for entry in found)
        return now, [(tenant, name) for tenant, name in split]

    def dying(self, tenant: str) -> list[tuple[str, str]]:
        """(kind, digest) of the tenant's files without a reference, not yet unlinked."""
        members = self._client.smembers(f"{self._prefix}dying:{tenant}")
        split = (member.split(":", 1) for member in sorted(members))
        return [(kind, digest) for kind, digest in split]

    def is_dying(self, tenant: str, kind: str, digest: str) -> bool:
        """True when the file may be unlinked; ask again under the folder's lock."""
        return bool(self._client.sismember(f"{self._prefix}dying:{tenant}", f"{kind}:{digest}"))

    def is_referred(self, tenant: str, kind: str, digest: str) -> bool:
        """True while a version or a job needs this file."""
        return bool(self._client.exists(f"{self._prefix}refs:{tenant}:{kind}:{digest}"))

    def condemn(self, epoch: str, tenant: str, kind: str, digest: str) -> bool:
        """Mark a file dying when nobody refers to it and the catalogue is still of this epoch."""
        return bool(self._scripts.run("condemn", epoch, tenant, kind, digest))

    def drop(self, tenant: str, name: str, version: Version, *, sparing: bool = False) -> bool:
        """End one version; `sparing` ends neither a current one nor one of a pinned dataset."""
        arguments = tenant, name, version.version, version.context, int(sparing)
        return bool(self._scripts.run("drop", *arguments))

    def restore(self, tenant: str, name: str, given: Mapping[str, Any]) -> tuple[bool, bool, list[int]]:
        """Bring recorded versions back: whether the dataset is new, was pinned, and which versions are new."""
        new, pinned, *versions = self._scripts.run("restore", tenant, name, orjson.dumps(given).decode())
        return bool(new), bool(pinned), [int(number) for number in versions]

    def all(self) -> list[tuple[str, str]]:
        """(tenant, name) of every dataset, and of some that are gone."""
        members = self._client.zrange(f"{self._prefix}changed", 0, -1)
        split = (member.split("/", 1) for member in members)
        return [(tenant, name) for tenant, name in split]

    def expired(self, now_ms: int) -> list[tuple[str, str]]:
        """(tenant, name) of datasets whose time is up."""
        members = self._client.zrangebyscore(f"{self._prefix}expiring", "-inf", now_ms, start=0, num=1000)
        split = (member.split("/", 1) for member in members)
        return [(tenant, name) for tenant, name in split]

    def holders(self, tenant: str, kind: str, digest: str) -> int:
        """How many versions and jobs need this file."""
        return int(self._client.scard(f"{self._prefix}refs:{tenant}:{kind}:{digest}"))

    def buried(self, tenant: str, kind: str, digest: str) -> None:
        """The file was unlinked."""
        self._client.srem(f"{self._prefix}dying:{tenant}", f"{kind}:{digest}")
