"""Datasets and their versions, and which files nobody refers to any more."""

from __future__ import annotations

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

    def changed_since(self, mark: int) -> tuple[int, list[tuple[str, str]]]:
        """The present mark and (tenant, name) of every dataset that changed after `mark`."""
        now = int(self._client.get(f"{self._prefix}changes") or 0)
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

    def buried(self, tenant: str, kind: str, digest: str) -> None:
        """The file was unlinked."""
        self._client.srem(f"{self._prefix}dying:{tenant}", f"{kind}:{digest}")
