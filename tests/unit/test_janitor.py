"""The janitor: what each sweep removes, and what it leaves alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from common.catalogue.records import FitWorker
from common.errors import DatasetNotFound
from common.janitor import Janitor, Removed, Sweeper
from common.names import new_id
from common.service.rebuild import Rebuild
from tests.support import wait_until
from tests.unit.stored import HOUR_S, QUEUE, Stored


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path)


def sweep(stored: Stored) -> Removed:
    return Janitor(stored.catalogue, stored.settings).sweep()


def host_copy(stored: Stored, digest: str) -> Path:
    disk, host = stored.folder.tiers("default", "context", digest)
    host.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(disk, host)
    return host


def leftovers(stored: Stored) -> list[Path]:
    """What a killed process may leave: a context being written in each tier, an upload, a parser's folder."""
    uploads = stored.folder.uploads()
    left = [uploads / ".upload", uploads / ".parse-x", uploads / new_id()]
    left += [
        path.with_name(f".tmp-{new_id()}") for path in stored.folder.tiers("default", "context", "0" * 64)
    ]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.name.startswith(".parse"):
            path.mkdir()
            (path / "table").write_text("x")
        else:
            path.write_text("x")
    return left


def test_nothing_is_deleted_while_the_epoch_differs(stored: Stored) -> None:
    stored.publish("d", "a", ttl_s=1, created_ms=1)
    gone = stored.publish("gone", "b", created_ms=1)
    stored.path(gone).unlink()
    stored.context("unreferenced")
    stored.catalogue.datasets.delete("default", "gone")
    leftovers(stored)
    stored.age(seconds=48 * HOUR_S)
    held = stored.files()
    for change in (lambda: stored.client.set("tabrelay:epoch", "f" * 32), lambda: stored.client.flushall()):
        change()
        assert sweep(stored).counts() == {}
        assert stored.files() == held


def test_nothing_is_deleted_when_the_data_folder_is_not_mounted(stored: Stored) -> None:
    stored.publish("d", "a", created_ms=1)
    away = stored.settings.data.rename(stored.settings.data.with_name("away"))
    stored.settings.data.mkdir()
    before = stored.state()
    assert sweep(stored).counts() == {}
    assert stored.state() == before
    assert away.exists()


def test_nothing_young_is_deleted(stored: Stored) -> None:
    leftovers(stored)
    stored.context("unreferenced")
    stored.table("unreferenced")
    gone = stored.publish("gone", "b")
    stored.path(gone).unlink()
    held = stored.files()
    assert sweep(stored).counts() == {}
    assert stored.files() == held
    assert stored.catalogue.datasets.get("default", "gone").current == 1


def test_leftovers_of_killed_processes_are_removed_and_counted(stored: Stored) -> None:
    version = stored.publish("d", "a")
    left = leftovers(stored)
    stored.age(seconds=25 * HOUR_S)
    for folder in stored.settings.data.glob("uploads/.parse-*"):
        stored.age(folder, seconds=25 * HOUR_S)
    removed = sweep(stored)
    assert removed.counts() == {"temporary": 4, "uploads": 1}
    assert not any(path.exists() for path in left)
    assert stored.files() == {f"{version.context}.safetensors", f"{version.table}.parquet"}
    assert stored.client.hgetall("tabrelay:removed") == {"temporary": "4", "uploads": "1"}


def test_a_folder_in_which_somebody_still_writes_stays(stored: Stored) -> None:
    left = leftovers(stored)
    stored.age(seconds=25 * HOUR_S)
    folder = next(path for path in left if path.is_dir())
    (folder / "table").write_text("more")
    stored.age(folder)
    sweep(stored)
    assert [path for path in left if path.exists()] == [folder]


def test_a_raw_upload_stays_while_its_job_waits_or_runs(stored: Stored) -> None:
    job = stored.submit("d", "")
    upload = stored.folder.upload(job.id)
    upload.write_text("x")
    stored.age(upload, seconds=48 * HOUR_S)
    sweep(stored)
    claim = stored.catalogue.jobs.claim(QUEUE, "w", 1, new_id())
    assert claim is not None
    sweep(stored)
    assert upload.exists()
    stored.catalogue.jobs.hand_back(job.id, claim.token)
    stored.catalogue.jobs.cancel("default", job.id)
    stored.age(upload, seconds=23 * HOUR_S)
    sweep(stored)
    assert upload.exists()
    stored.age(upload, seconds=25 * HOUR_S)
    assert sweep(stored).uploads == 1


def test_files_without_a_reference_go_from_every_tier(stored: Stored) -> None:
    kept = stored.publish("d", "a")
    host_copy(stored, kept.context)
    host_copy(stored, stored.context("unreferenced"))
    stored.table("unreferenced")
    stored.context("of another tenant", tenant="another")
    stored.submit("waiting", stored.table("of a waiting job"))
    needed = stored.table("of a waiting job")
    stored.age()
    assert sweep(stored).files == 3
    assert stored.files() == {
        f"{kept.context}.safetensors",
        f"{kept.table}.parquet",
        f"{needed}.parquet",
    }


def test_a_file_that_is_dying_already_goes_at_the_next_sweep(stored: Stored) -> None:
    stored.publish("d", "a")
    stored.catalogue.datasets.delete("default", "d")
    assert sweep(stored).files == 2
    assert stored.files() == set()


def test_a_file_that_gets_a_reference_before_its_unlink_stays(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = "published while the janitor looks"
    digest = stored.context(content)
    stored.age()
    asked = stored.catalogue.datasets.is_referred

    def publish_first(tenant: str, kind: str, found: str) -> bool:
        answer = asked(tenant, kind, found)
        if kind == "context" and not answer:
            path = stored.folder.tiers(tenant, kind, found)[0]
            stored.publish("d", content)
            stored.age(path)
        return answer

    monkeypatch.setattr(stored.catalogue.datasets, "is_referred", publish_first)
    sweep(stored)
    assert f"{digest}.safetensors" in stored.files()
    assert not stored.catalogue.datasets.is_dying("default", "context", digest)


def test_a_published_file_stays_though_redis_lost_its_last_second(stored: Stored) -> None:
    epoch = stored.client.get("tabrelay:epoch")
    version = stored.publish("d", "a")
    stored.client.flushall()
    stored.client.set("tabrelay:epoch", epoch)
    stored.age()
    assert sweep(stored).counts() == {}
    Rebuild(stored.catalogue, stored.settings).run()
    assert stored.catalogue.datasets.get("default", "d").versions == {1: version}


def test_rows_whose_context_is_in_no_tier_are_dropped_and_the_pointer_moves_back(stored: Stored) -> None:
    first = stored.publish("d", "a", created_ms=1)
    second = stored.publish("d", "b", created_ms=1)
    stored.path(second).unlink()
    assert sweep(stored).versions == 1
    dataset = stored.catalogue.datasets.get("default", "d")
    assert (dataset.current, dict(dataset.versions)) == (1, {1: first})
    stored.path(first).unlink()
    sweep(stored)
    with pytest.raises(DatasetNotFound):
        stored.catalogue.datasets.get("default", "d")
    assert stored.catalogue.datasets.names("default", after=None, limit=5) == []
    stored.client.flushall()
    assert Rebuild(stored.catalogue, stored.settings).run().not_restored == []


def test_a_row_whose_context_is_in_the_host_tier_stays(stored: Stored) -> None:
    version = stored.publish("d", "a", created_ms=1)
    host_copy(stored, version.context)
    stored.path(version).unlink()
    assert sweep(stored).versions == 0


def test_a_dataset_without_rows_stays_while_a_job_will_publish_into_it(stored: Stored) -> None:
    version = stored.publish("d", "a", created_ms=1)
    waiting = stored.submit("d", stored.table("t"))
    stored.path(version).unlink()
    sweep(stored)
    assert stored.catalogue.datasets.get("default", "d").pending == 1
    assert stored.catalogue.jobs.get("default", waiting.id).version == 2


def test_an_expired_dataset_is_deleted_tombstone_first(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored.publish("d", "a", ttl_s=1, created_ms=1)
    later = stored.publish("later", "b", ttl_s=3600)
    deleted = stored.catalogue.datasets.delete

    def after_its_tombstone(tenant: str, name: str) -> None:
        assert list(stored.records.read())[-1]["op"] == "delete"
        deleted(tenant, name)

    monkeypatch.setattr(stored.catalogue.datasets, "delete", after_its_tombstone)
    assert sweep(stored).datasets == 1
    assert stored.files() == {f"{later.context}.safetensors", f"{later.table}.parquet"}
    assert stored.client.zrange("tabrelay:expiring", 0, -1) == ["default/later"]
    assert stored.catalogue.datasets.get("default", "later").expires_ms == later.created_ms + 3_600_000


def test_a_refit_renews_or_ends_the_time_to_live_and_a_pin_outlasts_it(stored: Stored) -> None:
    stored.publish("renewed", "a", ttl_s=1, created_ms=1)
    stored.publish("renewed", "b", ttl_s=3600)
    stored.publish("for good", "c", ttl_s=1, created_ms=1)
    stored.publish("for good", "d")
    stored.publish("pinned", "e", ttl_s=1, created_ms=1)
    stored.pin("pinned")
    assert sweep(stored).datasets == 0
    assert stored.catalogue.datasets.get("default", "for good").expires_ms == 0
    stored.pin("pinned", False)
    assert sweep(stored).datasets == 1


@pytest.fixture
def run(stored: Stored) -> Path:
    stored.settings.run.mkdir(parents=True)
    return stored.settings.run


def test_sockets_of_dead_predict_workers_are_removed(stored: Stored, run: Path) -> None:
    listening = {}
    for name in ("dead.sock", "alive.sock", "redis.sock"):
        listening[name] = socket.socket(socket.AF_UNIX)
        listening[name].bind(str(run / name))
        listening[name].listen(1)
    listening["dead.sock"].close()
    listening["redis.sock"].close()
    assert sweep(stored).sockets == 0
    stored.age(*run.iterdir())
    assert sweep(stored).sockets == 1
    assert {path.name for path in run.iterdir()} == {"alive.sock", "redis.sock"}
    listening["alive.sock"].close()


def counted(sweeper: Sweeper, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    swept: list[float] = []
    monkeypatch.setattr(sweeper._janitor, "sweep", lambda: swept.append(time.monotonic()))
    return swept


def look(sweeper: Sweeper) -> None:
    sweeper.look()
    if sweeper._thread is not None:
        sweeper._thread.join(5)


def test_one_process_sweeps_at_a_time(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    sweepers = [Sweeper(stored.catalogue, stored.settings, name) for name in ("a", "b")]
    swept = [counted(sweeper, monkeypatch) for sweeper in sweepers]
    for _ in range(3):
        for sweeper in sweepers:
            look(sweeper)
    assert [len(times) for times in swept] == [1, 0]


def test_a_fork_waits_for_a_step_of_the_sweep_and_not_for_its_end(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeper = Sweeper(stored.catalogue, stored.settings, "fit-0")
    story: list[str] = []
    began, forked = threading.Event(), threading.Event()

    def long_sweep() -> None:
        began.set()
        story.append("step")
        while not forked.wait(0.001):
            sweeper._let_fork()

    monkeypatch.setattr(sweeper._janitor, "sweep", long_sweep)
    sweeper.look()
    began.wait(5)
    with sweeper._step:  # what os.fork takes first
        story.append("fork")
        forked.set()
    assert sweeper._thread is not None
    sweeper._thread.join(5)
    assert (story, sweeper._step.locked()) == (["step", "fork"], False)


def test_nothing_is_locked_between_two_steps(stored: Stored) -> None:
    def try_all_locks() -> None:
        locks = [stored.records.path, *stored.settings.data.glob("locks/*")]
        for path in locks:
            with path.open("rb+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    gone = stored.publish("gone", "b", created_ms=1)
    stored.publish("d", "a", ttl_s=1, created_ms=1)
    stored.path(gone).unlink()
    stored.context("unreferenced")
    leftovers(stored)
    stored.age(seconds=48 * HOUR_S)
    removed = Janitor(stored.catalogue, stored.settings, pause=try_all_locks).sweep()
    assert set(removed.counts()) == {"temporary", "uploads", "files", "versions", "datasets"}


def test_a_tenant_s_lock_ends_though_a_forked_process_has_its_descriptor(stored: Stored) -> None:
    inherited = []
    with stored.folder.locked("default"):
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(entry).endswith("locks/default"):
                    inherited.append(os.dup(int(entry.name)))
    with (stored.settings.data / "locks" / "default").open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert inherited
    for descriptor in inherited:
        os.close(descriptor)


def test_predict_workers_sweep_only_while_no_fit_worker_lives(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = stored.settings.model_copy(update={"sweep_every_s": 0.01})
    sweeper = Sweeper(stored.catalogue, settings, "predict-0", as_substitute=True)
    swept = counted(sweeper, monkeypatch)
    stored.catalogue.workers.register_fit(FitWorker("fit-0", "h", os.getpid(), "cpu", ("fit.small",), 1))
    look(sweeper)
    assert swept == []
    stored.catalogue.workers.leave("fit", "fit-0")

    def substitute() -> Any:
        look(sweeper)
        return swept

    wait_until(substitute, "a sweep by the predict worker", 5)
