"""A full disk, wherever it is met: `storage_full`, and nothing partial stays."""

from __future__ import annotations

import contextlib
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from api.app import create_app
from api.services import Services
from common.catalogue.jobs import Claim
from common.contexts.writer import write_context
from common.errors import CatalogueEmptied, StorageFull
from common.models.protocol import TensorSource
from common.names import new_id
from common.settings import Settings
from common.tables.child import ParserChild
from common.tables.shape import TableLimits
from fit_workers.publish import Publisher, Ready
from tests.support import as_csv, numeric
from tests.unit.stored import QUEUE, Stored

DISK = 1024**2


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that takes 1 MiB: a file system of its own, or, without the right to mount one, a limit on each file."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if mounted.returncode:
        resource.setrlimit(resource.RLIMIT_FSIZE, (DISK, before[1]))
    try:
        yield folder
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        if not mounted.returncode:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_context_that_finds_no_room_leaves_nothing(disk: Path) -> None:
    data = np.zeros(2 * DISK, dtype=np.uint8)
    with pytest.raises(StorageFull):
        write_context(disk / ".tmp-x", "{}", [TensorSource("a", "U8", data.shape, lambda: iter([data.data]))])
    assert everything(disk) == []


def test_a_table_that_finds_no_room_leaves_nothing(disk: Path, tmp_path: Path) -> None:
    source = tmp_path / "table.csv"
    with contextlib.ExitStack() as ending:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits[1], limits[1]))
        source.write_bytes(as_csv(numeric(rows=40_000, columns=6)))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        child = ending.enter_context(ParserChild(2 * 1024**3, 60))
        for _ in range(2):
            with pytest.raises(StorageFull):
                child.parse_training(source, "csv", "y", None, disk, TableLimits(10**6, 100, 10**8))
            assert list(disk.iterdir()) == []


@pytest.fixture
def http(disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The API over a data folder on that disk."""
    stored = Stored(tmp_path)
    monkeypatch.setattr("common.catalogue.catalogue.connect", lambda url: stored.client)
    services = Services.build(Settings(data_dir=disk, run_dir=tmp_path / "run", host_tier_bytes=0))
    monkeypatch.setattr(services.snapshot, "refresh", lambda: None)
    yield create_app(services).test_client()
    services.close()


@pytest.mark.parametrize("kind", ["file", "body"])
def test_an_upload_that_finds_no_room_is_507_and_leaves_nothing(http: Any, disk: Path, kind: str) -> None:
    if kind == "file":
        head = '--x\r\ncontent-disposition: form-data; name="file"; filename="t.csv"\r\n\r\n'
        body = head.encode() + b"a,y\n" + b"1,2\n" * DISK + b"\r\n--x--\r\n"
        content_type = "multipart/form-data; boundary=x"
    else:
        body, content_type = b" " * (2 * DISK), "application/json"
    response = http.post("/v1/fits", data=body, content_type=content_type)
    assert (response.status_code, response.json["code"]) == (507, "storage_full")
    assert list((disk / "uploads").iterdir()) == []


class Publishing:
    """A claimed job whose context is written, and the publisher that will publish it."""

    def __init__(self, tmp_path: Path, **settings: Any) -> None:
        self.stored = Stored(tmp_path, **settings)
        stored = self.stored
        stored.submit("d", stored.table("t"))
        claim = stored.catalogue.jobs.claim(QUEUE, "w", 1, new_id())
        assert claim is not None
        self.claim: Claim = claim
        final = stored.folder.tiers("default", "context", stored.context("content"))[0]
        self.final, self.temporary = final, final.with_name(".tmp-x")
        final.rename(self.temporary)
        worker = SimpleNamespace(
            settings=stored.settings, catalogue=stored.catalogue, folder=stored.folder, records=stored.records,
            registry=SimpleNamespace(spec=lambda _: SimpleNamespace(licence="")),
            store=SimpleNamespace(copy_to_host=lambda *_: None),
        )  # fmt: skip
        reporter = SimpleNamespace(phase=lambda _: None, done=dict, timings_ms={})
        self.publisher = Publisher(worker, claim, reporter)  # type: ignore[arg-type]  # what publishing uses of them
        manifest = SimpleNamespace(
            options={}, precision="native", cache="kv",
            key="k", table=claim.job.table, model="m", task="classification", rows=3, columns=2, schema={}, target={}
        )  # fmt: skip
        built = SimpleNamespace(publish=lambda: self.temporary.rename(final))
        size = final.stat().st_size if final.exists() else 7
        self.ready = Ready(final.stem, manifest, size, 0.1, 0.0, built)  # type: ignore[arg-type]  # likewise

    def publish(self) -> None:
        self.publisher.publish(self.ready)


def test_a_publish_goes_through_with_its_time_to_live_in_the_record(tmp_path: Path) -> None:
    publishing = Publishing(tmp_path)
    object.__setattr__(publishing.claim.job, "ttl_s", 60)
    publishing.publish()
    lines = list(publishing.stored.records.read())
    assert [line["op"] for line in lines] == ["publish", "published"]
    assert lines[0]["version"]["ttl_s"] == 60
    dataset = publishing.stored.catalogue.datasets.get("default", "d")
    assert dataset.expires_ms == dataset.versions[1].created_ms + 60_000
    assert publishing.final.exists()


def test_a_record_that_finds_no_room_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publishing = Publishing(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
    try:
        with pytest.raises(OSError, match=r"were written|File too large"):
            publishing.publish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not publishing.final.exists()
    assert list(publishing.stored.records.read()) == []
    assert publishing.stored.client.hget("tabrelay:dataset:default:d", "current") is None


def test_a_context_beyond_the_disk_budget_is_not_published(tmp_path: Path) -> None:
    publishing = Publishing(tmp_path, disk_budget_bytes=4)
    with pytest.raises(StorageFull):
        publishing.publish()
    assert not publishing.final.exists()
    assert list(publishing.stored.records.read()) == []


def test_redis_emptied_in_mid_publish_costs_no_file_of_an_earlier_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publishing = Publishing(tmp_path)
    stored = publishing.stored
    stored.publish("same content", "content")
    commit = stored.catalogue.jobs.publish

    def emptied_first(*arguments: Any) -> None:
        stored.client.flushall()
        commit(*arguments)

    monkeypatch.setattr(stored.catalogue.jobs, "publish", emptied_first)
    with pytest.raises(CatalogueEmptied):
        publishing.publish()
    assert publishing.final.exists()
    # Left open: whether it went through before the loss is for rebuild to find.
    assert [line["op"] for line in stored.records.read()][-1] == "publish"


def test_retention_is_asked_before_any_tenant_s_lock_is_held(tmp_path: Path) -> None:
    publishing = Publishing(tmp_path, disk_budget_bytes=10**6)
    publishing.stored.publish("other", "x")
    publishing.stored.catalogue.datasets.delete("default", "other")
    publishing.publish()  # would wait for itself for ever otherwise
    assert publishing.final.exists()
    assert "other" not in publishing.stored.catalogue.datasets.names("default", after=None, limit=5)
