"""A data folder and its catalogue, on a Redis double that runs the real Lua; publishes as a fit worker does."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import fakeredis
from blake3 import blake3

from common.catalogue import Catalogue, Version
from common.catalogue.recordfile import RecordFile
from common.catalogue.records import NewJob
from common.files import DataFolder, private_folder
from common.names import new_id
from common.settings import Settings

QUEUE = "fit.small"
HOUR_S = 3600.0


class Stored:
    """`publish` datasets, `empty` Redis, look at `files`."""

    def __init__(self, root: Path, **settings: Any) -> None:
        chosen = {"data_dir": root / "data", "host_dir": root / "host", "run_dir": root / "run", **settings}
        self.settings = Settings(**chosen)
        self.client: Any = fakeredis.FakeRedis(decode_responses=True)
        self.catalogue = Catalogue(self.client, self.settings)
        self.folder = DataFolder(self.settings)
        self.records = RecordFile(self.settings.data)
        self.catalogue.epoch.ensure()

    def submit(self, dataset: str, table: str, tenant: str = "default") -> Any:
        """A queued job."""
        return self.catalogue.jobs.submit(
            NewJob(
                id=new_id(),
                tenant=tenant,
                dataset=dataset,
                model="m",
                task="classification",
                target="y",
                options={},
                queue=QUEUE,
                key=new_id(),
                table=table,
            )
        ).job

    def table(self, content: str, tenant: str = "default") -> str:
        """A table's file, by its digest."""
        digest = str(blake3(content.encode()).hexdigest())
        self.folder.table(tenant, digest).write_text(content)
        return digest

    def context(self, content: str, tenant: str = "default") -> str:
        """A context's file, by its digest; what is in it does not matter here."""
        digest = str(blake3(content.encode()).hexdigest())
        path = self.folder.tiers(tenant, "context", digest)[0]
        private_folder(path.parent)
        path.write_text(content)
        return digest

    def publish(
        self,
        dataset: str,
        content: str,
        *,
        tenant: str = "default",
        ttl_s: int = 0,
        created_ms: int | None = None,
        record: str = "published",
    ) -> Version:
        """The next version of a dataset; `record` is the last line that the record file gets."""
        table = self.table(f"table of {content}", tenant)
        self.submit(dataset, table, tenant)
        claim = self.catalogue.jobs.claim(QUEUE, "w", 1, new_id())
        assert claim is not None
        version = Version(
            version=claim.job.version, context=self.context(content, tenant), key=f"key of {content}",
            table=table, job=claim.job.id, model="m", task="classification", rows=3, columns=2,
            context_bytes=len(content), created_ms=created_ms or int(time.time() * 1000), schema={}, target={},
            ttl_s=ttl_s,
        )  # fmt: skip
        self.records.intend(tenant, dataset, version)
        if record == "aborted":
            self.records.aborted(tenant, dataset, version.version)
            return version
        self.catalogue.jobs.publish(claim, version, {})
        if record == "published":
            self.records.published(tenant, dataset, version.version)
        return version

    def pin(self, dataset: str, pinned: bool = True) -> None:
        """Pin as the service does."""
        self.records.pin("default", dataset, pinned)
        self.catalogue.datasets.pin("default", dataset, pinned)

    def files(self) -> set[str]:
        """Names of every file of tables, contexts and uploads, in every tier."""
        places = [self.settings.data / name for name in ("tables", "contexts", "uploads")]
        places.append(self.settings.data.parent / "host")
        return {path.name for place in places for path in place.rglob("*") if path.is_file()}

    def path(self, version: Version, tenant: str = "default") -> Path:
        """Where its context lies on disk."""
        return self.folder.tiers(tenant, "context", version.context)[0]

    def age(self, *paths: Path, seconds: float = 2 * HOUR_S) -> None:
        """Make files look old; all of tables, contexts and uploads when none is named."""
        every = [p for p in self.settings.data.parent.rglob("*") if p.is_file()]
        for path in paths or every:
            os.utime(path, (time.time() - seconds,) * 2)

    def state(self) -> dict[str, Any]:
        """Everything that the catalogue says of datasets, apart from the order of changes and jobs."""
        kept = {}
        for key in sorted(self.client.keys("*")):
            if key.startswith(("tabrelay:job", "tabrelay:event", "tabrelay:holds", "tabrelay:change")):
                continue
            kind = self.client.type(key)
            read = {
                "hash": self.client.hgetall,
                "set": self.client.smembers,
                "string": self.client.get,
                "zset": lambda k: self.client.zrange(k, 0, -1, withscores=True),
                "list": lambda k: self.client.lrange(k, 0, -1),
            }[kind]
            kept[key] = read(key)
        return kept
