"""The epoch: when it begins, when it is taken over, and what stops while it differs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from common.catalogue import Catalogue
from common.catalogue.epoch import Epoch
from common.errors import CatalogueEmptied, CatalogueUnavailable, DatasetNotFound, JobNotFound
from common.files import bury
from common.relay.snapshot import RoutingSnapshot
from common.service.datasets import DatasetService
from tests.unit.stored import Stored


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path)


def epoch_of(stored: Stored) -> Epoch:
    """As another process sees it."""
    return Catalogue(stored.client, stored.settings).epoch


def test_a_first_start_on_an_empty_folder_begins_an_epoch(stored: Stored) -> None:
    path = stored.settings.data / "epoch"
    assert stored.client.get("tabrelay:epoch") == path.read_text().strip()
    assert oct(path.stat().st_mode & 0o777) == "0o600"
    assert epoch_of(stored).matches()
    assert [p.name for p in stored.settings.data.glob(".epoch*")] == []


def test_three_processes_that_start_at_once_agree(tmp_path: Path) -> None:
    for attempt in range(5):
        stored = Stored(tmp_path / str(attempt))
        stored.client.flushall()
        (stored.settings.data / "epoch").unlink()
        epochs = [epoch_of(stored) for _ in range(3)]
        gate = threading.Barrier(3)
        said: list[bool] = []

        def start(epoch: Epoch, gate: threading.Barrier = gate, said: list[bool] = said) -> None:
            gate.wait()
            said.append(epoch.ensure())

        threads = [threading.Thread(target=start, args=(epoch,)) for epoch in epochs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert said == [True, True, True]
        assert all(epoch.matches() for epoch in epochs)


def test_an_epoch_lost_before_anything_was_published_begins_again(stored: Stored) -> None:
    before = (stored.settings.data / "epoch").read_text()
    stored.client.flushall()
    assert not epoch_of(stored).matches()
    assert epoch_of(stored).ensure()
    assert (stored.settings.data / "epoch").read_text() == before


def test_a_new_node_takes_over_the_catalogue_s_epoch(stored: Stored) -> None:
    (stored.settings.data / "epoch").unlink()
    assert epoch_of(stored).ensure()
    assert (stored.settings.data / "epoch").read_text().strip() == stored.client.get("tabrelay:epoch")


@pytest.mark.parametrize("what", ["contexts", "records"])
@pytest.mark.parametrize("lost", ["redis", "file", "both", "swapped"])
def test_with_anything_to_lose_a_mismatch_writes_nothing(tmp_path: Path, what: str, lost: str) -> None:
    stored = Stored(tmp_path)
    version = stored.publish("d", "content")
    if what == "contexts":
        stored.records.path.unlink()
    else:
        stored.path(version).unlink()
    path = stored.settings.data / "epoch"
    if lost in ("redis", "both"):
        stored.client.flushall()
    if lost in ("file", "both"):
        path.unlink()
    if lost == "swapped":
        stored.client.set("tabrelay:epoch", "f" * 32)
    key, text = stored.client.get("tabrelay:epoch"), path.read_text() if path.exists() else None
    epoch = epoch_of(stored)
    assert not epoch.ensure()
    assert not epoch.matches()
    with pytest.raises(CatalogueEmptied, match="tabrelay catalogue rebuild"):
        epoch.require()
    assert stored.client.get("tabrelay:epoch") == key
    assert (path.read_text() if path.exists() else None) == text


def test_redis_emptied_at_any_moment_is_seen_at_the_next_use(stored: Stored) -> None:
    stored.publish("d", "content")
    stored.catalogue.ping()
    stored.client.flushall()
    with pytest.raises(CatalogueEmptied) as refused:
        stored.catalogue.ping()
    assert isinstance(refused.value, CatalogueUnavailable)
    assert (refused.value.code, refused.value.status) == ("catalogue_emptied", 503)
    assert refused.value.retry_after_s


def test_a_folder_that_went_away_is_seen_when_looked_at_again(stored: Stored) -> None:
    (stored.settings.data / "epoch").unlink()
    assert stored.catalogue.epoch.matches()
    assert not stored.catalogue.epoch.matches(look_again=True)


def test_nothing_is_buried_while_the_epoch_differs(stored: Stored) -> None:
    stored.publish("d", "content")
    stored.catalogue.datasets.delete("default", "d")
    held = stored.files()
    own = stored.client.getset("tabrelay:epoch", "f" * 32)
    assert bury(stored.folder, stored.catalogue, "default") == 0
    assert stored.files() == held
    stored.client.set("tabrelay:epoch", own)
    assert bury(stored.folder, stored.catalogue, "default") == 2
    assert stored.files() == set()


def test_what_a_catalogue_without_writes_keeps_from_being_buried_is_buried_later(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored.publish("d", "content")
    with monkeypatch.context() as full:
        full.setattr(stored.catalogue.datasets, "buried", Mock(side_effect=CatalogueUnavailable))
        DatasetService(stored.catalogue, stored.settings).delete("default", "d")
    assert bury(stored.folder, stored.catalogue, "default") == 2
    assert stored.files() == set()
    assert list(stored.catalogue.datasets.dying("default")) == []


def test_an_emptied_catalogue_does_not_say_that_a_dataset_does_not_exist(stored: Stored) -> None:
    stored.publish("d", "content")
    service = DatasetService(stored.catalogue, stored.settings)
    stored.client.flushall()
    for ask in (
        lambda: service.get("default", "d"),
        lambda: service.delete("default", "d"),
        lambda: service.pin("default", "d", True),
        lambda: service.page("default", after=None, limit=5),
    ):
        with pytest.raises(CatalogueEmptied):
            ask()
    assert "delete" not in [line["op"] for line in stored.records.read()]


def test_another_folder_s_catalogue_can_not_have_this_folder_s_datasets_deleted(stored: Stored) -> None:
    stored.publish("d", "content")
    service = DatasetService(stored.catalogue, stored.settings)
    stored.client.set("tabrelay:epoch", "f" * 32)
    with pytest.raises(CatalogueEmptied):
        service.delete("default", "d")
    with pytest.raises(CatalogueEmptied):
        service.pin("default", "d", True)
    assert [line["op"] for line in stored.records.read()] == ["publish", "published"]


def test_the_routing_snapshot_keeps_what_it_knew_until_the_catalogue_is_restored(stored: Stored) -> None:
    kept, lost = stored.publish("kept", "a"), stored.publish("lost", "b")
    snapshot = RoutingSnapshot(stored.catalogue, stored.settings)
    snapshot.refresh()
    saved: Any = stored.client.dump("tabrelay:epoch")
    stored.client.flushall()
    for _ in range(2):
        snapshot.refresh()
        assert snapshot.resolve("default", "kept", None) == kept
        assert snapshot.resolve_again("default", "lost", 1) == lost
        with pytest.raises(CatalogueEmptied):
            snapshot.resolve("default", "never heard of", None)
    assert saved is not None
    given = {"next": 1, "pinned": False, "versions": [{"version": 1, "record": kept.encode(), "open": False}]}
    stored.catalogue.datasets.restore("default", "kept", given)
    stored.catalogue.epoch.restore()
    snapshot.refresh()
    assert snapshot.resolve("default", "kept", None) == kept
    with pytest.raises(DatasetNotFound):
        snapshot.resolve("default", "lost", None)


def test_a_job_that_an_emptied_redis_forgot_is_not_called_unknown(stored: Stored) -> None:
    with pytest.raises(JobNotFound):
        stored.catalogue.jobs.get("default", "0" * 32)
    stored.client.flushall()
    with pytest.raises(CatalogueEmptied):
        stored.catalogue.jobs.get("default", "0" * 32)
