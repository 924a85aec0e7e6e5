"""Minutes of clients and faults; afterwards nothing accepted is lost, doubled, damaged or answered wrongly."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tabrelay.up.embedded import Stack
from tests.chaos.expected import Content
from tests.chaos.invariants import (
    Ended,
    Report,
    check_answers,
    check_catalogue,
    check_files,
    check_jobs,
    check_memory,
    check_versions,
    tell_log,
)
from tests.chaos.load import ENDED, Client, History
from tests.chaos.nemesis import Nemesis, small_disk
from tests.chaos.world import World
from tests.support import Service, wait_until

SECONDS = float(os.environ.get("CHAOS_SECONDS", "90"))
#: `everysec`, the default, or `always`.
FSYNC = os.environ.get("CHAOS_FSYNC", "everysec")
SEED = int(os.environ.get("CHAOS_SEED", "20250726"))
#: What is waited for afterwards besides; a run of 30 minutes compares more answers.
AFTERWARDS_S = 400 + SECONDS / 2

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.chaos,
    pytest.mark.timeout(SECONDS + AFTERWARDS_S),
    # The HTTP client leaves the socket of a connection that was reset to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

MIB = 1024**2
FIT_WORKERS, PREDICT_WORKERS, CLIENTS, DATASETS = 2, 2, 4, 6
LEASE_S = 4.0
#: How long the backlog may take once all is well: every client leaves three jobs, some of seconds.
SETTLE_S = 150.0
DISK_MIB = 1024


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, bool]]:
    """The data folder, and whether it is a small file system of its own."""
    folder = tmp_path / "data"
    with small_disk(folder, DISK_MIB) as mounted:
        yield folder, mounted


def test_chaos(disk: tuple[Path, bool], private_stack: Callable[..., Stack]) -> None:
    print(f"CHAOS_SEED={SEED} CHAOS_SECONDS={SECONDS:g} CHAOS_FSYNC={FSYNC}", flush=True)
    folder, mounted = disk
    stack = private_stack(
        data_dir=folder,
        fit_workers=FIT_WORKERS,
        predict_workers=PREDICT_WORKERS,
        environ={
            "TABRELAY_MAX_ATTEMPTS": "10000",
            "TABRELAY_LEASE_S": str(LEASE_S),
            "TABRELAY_LEASE_RENEW_S": "1",
            "TABRELAY_REDIS_APPENDFSYNC": FSYNC,
        },
    )
    world = World(stack)
    report, history = Report(), History()
    with Service(stack.url) as service:
        warm = Content(200, 20, 1, 8)
        service.fit(warm.table(), "warm")
        service.predict("warm", warm.table().drop_columns(["y"]).slice(0, 4))
        world.wait_all_up(FIT_WORKERS, PREDICT_WORKERS)
        before = world.memory_mib()
        nemesis = Nemesis(
            world, SEED, fit=FIT_WORKERS, predict=PREDICT_WORKERS, lease_s=LEASE_S, small_disk=mounted
        )
        break_and_load(stack.url, history, nemesis)
        settle(service, world, history, report)
        probe(service, history, report, nemesis.damaged)
        ended = Ended.read(world)
        check_jobs(report, world, ended, history, nemesis.redis_killed_ms, fsync=FSYNC)
        check_versions(report, ended)
        check_files(report, world, ended, nemesis.damaged)
        check_catalogue(report, world)
        check_answers(report, ended, history)
        check_memory(report, before, world.memory_mib())
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    usage = sum(sizes), max(sizes)
    stack.stop()
    tell_log(report, Path(shutil.copy(folder / "up.log", folder.parent)))
    left = world.of_this_stack()
    report.require(not left, f"still running after stop(): {left}")
    report.notes.append(
        f"disk: {usage[0] / MIB:.0f} MiB at the end; the largest file {usage[1] / MIB:.0f} MiB"
    )
    report.notes.append(f"the nemesis did {dict(nemesis.done)}, damaged {len(nemesis.damaged)} contexts")
    report.notes.append(f"clients were told {dict(sorted(history.statuses.items()))}")
    report.faults += history.faults + nemesis.faults
    report.show()
    assert report.faults == [], f"CHAOS_SEED={SEED}"


def break_and_load(url: str, history: History, nemesis: Nemesis) -> None:
    """Clients and nemesis for the run's length; the clients go on a little longer."""
    stop_nemesis, stop_clients = threading.Event(), threading.Event()
    clients = [Client(number, SEED, url, history, DATASETS) for number in range(1, CLIENTS + 1)]
    threads = [threading.Thread(target=client.run, args=(stop_clients,)) for client in clients]
    breaking = threading.Thread(target=nemesis.run, args=(stop_nemesis,))
    try:
        for thread in [*threads, breaking]:
            thread.start()
        time.sleep(SECONDS)
    finally:
        stop_nemesis.set()
        breaking.join()
        stop_clients.set()
        for thread in threads:
            thread.join()


def settle(service: Service, world: World, history: History, report: Report) -> None:
    """Everything runs again and every job has ended, within a bound; what has not is for the checker to tell."""
    began = time.monotonic()
    wait_until(lambda: service.http.get("/readyz").status_code == 200, "readiness after the faults", 60)
    world.wait_all_up(FIT_WORKERS, PREDICT_WORKERS, 60)
    report.notes.append(f"all was up again {time.monotonic() - began:.1f} s after the last fault")

    def none_open() -> bool:
        jobs = (world.redis.hget(key, "state") for key in world.keys("job"))
        return all(state in ENDED for state in jobs) and not world.working()

    try:
        wait_until(none_open, "the end of every job", SETTLE_S)
    except AssertionError:
        report.notes += world.snapshot()
    report.notes.append(f"the queue was empty {time.monotonic() - began:.1f} s after the last fault")


def probe(service: Service, history: History, report: Report, damaged: set[str]) -> None:
    """Each dataset answers, or says that its context is damaged and answers again after a re-fit."""
    client = Client(0, SEED, service.url, history, DATASETS)
    for name in [entry["name"] for entry in service.http.get("/v1/datasets?limit=500").json()["datasets"]]:
        if name == "warm":
            continue
        response = client.predict_from(name, 0, 3)
        if response is None or response.status_code == 200:
            continue
        told = response.json()
        shown = service.http.get(f"/v1/datasets/{name}").json()
        context = next(v for v in shown["versions"] if v["version"] == shown["version"])
        report.require(
            told["code"] == "context_damaged" and context["context"] in damaged, f"{name} is broken: {told}"
        )
        job = history.accepted.get(context["job"])
        if job is None:
            continue
        again = service.submit(job.content.table(), name, options=job.content.options())
        ended = service.end_of(again.json()["id"]) if again.status_code in (200, 202) else again.json()
        if ended.get("state") == "succeeded":
            history.accepted.setdefault(ended["id"], replace(job, job=ended["id"]))
        response = client.predict_from(name, 0, 3)
        report.require(
            response is not None and response.status_code == 200,
            f"{name} had a damaged context; the same table, sent again, was answered with {again.status_code} and "
            f"job {ended}, and a predict then with {response and response.text[:200]}",
        )
    fresh = Content(150, 8, 77, 8)
    report.require(service.fit(fresh.table(), "fresh")["state"] == "succeeded", "a new fit failed")
    report.require(
        service.ask("fresh", fresh.table().drop_columns(["y"]).slice(0, 4)).is_success, "no answer"
    )
