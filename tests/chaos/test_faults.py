"""One kind of fault each: kills by the hundred, a stopped worker, a poison table, a killed Redis, a full disk."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from common.settings import Settings
from tabrelay.up.embedded import Stack
from tabrelay.up.redis_server import prepare
from tests.chaos.expected import Content
from tests.chaos.invariants import Ended, Report, check_catalogue, check_files, check_jobs, check_versions
from tests.chaos.load import Accepted, History
from tests.chaos.nemesis import fill, small_disk
from tests.chaos.world import TENANT, World, now_ms, send
from tests.support import Service, check_problem, numeric, wait_until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.chaos,
    pytest.mark.timeout(600),
    # The HTTP client leaves the socket of a connection that was reset to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

StartStack = Callable[..., Stack]
SEED = int(os.environ.get("CHAOS_SEED", "20250726"))


def submit(service: Service, history: History, content: Content, dataset: str) -> str:
    """An accepted job; its acceptance is written down."""
    response = service.submit(content.table(), dataset, options=content.options())
    assert response.status_code == 202, response.text
    job = str(response.json()["id"])
    history.accepted[job] = Accepted(job, dataset, content, now_ms())
    return job


def check_all(world: World, history: History, fsync: str = "everysec") -> Report:
    """What holds when all is quiet."""
    report, ended = Report(), Ended.read(world)
    check_jobs(report, world, ended, history, [], fsync=fsync)
    check_versions(report, ended)
    check_files(report, world, ended, set())
    check_catalogue(report, world)
    report.show()
    return report


# 200 kills

KILLS = 200
JOBS = 60
FIT_WORKERS = 4
#: A child that is killed before it has loaded torch costs little, and proves as much.
YOUNG_S = 1.5
#: Two workers in turn never get a child up, so that the other two get work done in between.
TURN_S = 12.0
ENDS_WITHIN_S = 60.0


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_two_hundred_kills_lose_nothing(private_stack: StartStack) -> None:
    stack = private_stack(
        fit_workers=FIT_WORKERS,
        environ={
            "TABRELAY_MAX_ATTEMPTS": "10000",
            "TABRELAY_LEASE_S": "6",
            "TABRELAY_LEASE_RENEW_S": "1",
            "TABRELAY_VERSIONS_KEPT": "100",
        },
    )
    world, history, rng = World(stack), History(), np.random.default_rng(SEED)
    killed: Counter[str] = Counter()
    last_kill: dict[str, int] = {}
    with Service(stack.url) as service:
        world.wait_all_up(FIT_WORKERS, 1)
        feeding = threading.Thread(target=feed, args=(stack.url, history, killed))
        feeding.start()
        began = time.monotonic()
        while killed.total() < KILLS:
            spent = time.monotonic() - began
            turn = int(spent / TURN_S)
            kill_one(world, rng, killed, last_kill, {f"fit-{(turn + i) % FIT_WORKERS}" for i in range(2)})
            time.sleep(float(rng.uniform(0.1, 0.4)))
        took = time.monotonic() - began
        feeding.join()
        for job in history.accepted:
            service.end_of(job, 240)
        world.wait_all_up(FIT_WORKERS, 1)
        ends = [ended_after(world, job, at) for job, at in last_kill.items()]
    report = check_all(world, history)
    states = Counter(world.redis.hget(world.key("job", job), "state") for job in history.accepted)
    back = sorted(ends)
    print(
        f"seed {SEED}: {killed.total()} kills {dict(killed)} in {took:.0f} s, {len(history.accepted)} jobs {dict(states)}, "
        f"{len(last_kill)} jobs lost a worker; from the last kill until running again, less the wait for a turn: "
        f"median {back[len(back) // 2]:.1f} s, worst {back[-1]:.1f} s; {time.monotonic() - began:.0f} s in all"
    )
    assert report.faults == []
    assert len(history.accepted) >= JOBS
    assert states == {"succeeded": len(history.accepted)}
    assert back[-1] <= ENDS_WITHIN_S


def feed(url: str, history: History, killed: Counter[str]) -> None:
    """Jobs over the whole length of the killing, and some beyond the needed number where it takes longer."""
    with Service(url) as service:
        number = 0
        while killed.total() < KILLS or number < JOBS:
            if number < JOBS * (killed.total() + 20) / KILLS:
                content = Content(120 + 20 * (number % 7), 8, 5000 + number, 32 if number % 5 == 0 else 8)
                submit(service, history, content, f"d{number % 8}")
                number += 1
            time.sleep(0.1)


def kill_one(
    world: World, rng: np.random.Generator, killed: Counter[str], last_kill: dict[str, int], victims: set[str]
) -> None:
    """A victim's child that is coming up, as long as there is one; else any child at work, or a parent with its child."""
    names = {p.pid: worker_of(p.pid) for p in world.fit_parents()}
    children = world.fit_children()
    working = world.working()
    young = [p.pid for p in children if p.age_s < YOUNG_S and names.get(p.parent) in victims]
    draw = rng.random()
    if young and draw < 0.8:
        kind, pids = "child coming up", young
    elif working and 0.8 <= draw < 0.92:
        kind, pids = "child at work", sorted(working)
    elif names and draw > 0.985:
        kind, pids = "parent", sorted(names)
    else:
        return
    pid = pids[int(rng.integers(len(pids)))]
    held = world.held()
    hit = {pid, *(p.pid for p in children if p.parent == pid)}
    at = now_ms()
    if send(pid, signal.SIGKILL):
        killed[kind] += 1
        for job in {held[p] for p in hit if p in held}:
            last_kill[job] = at


def worker_of(pid: int) -> str:
    """The name of a worker's process."""
    with contextlib.suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(b"TABRELAY_WORKER_NAME="):
                return variable.partition(b"=")[2].decode()
    return ""


def ended_after(world: World, job: str, killed_ms: int) -> float:
    """Seconds from a job's last kill to its end, less its wait for a turn and its last attempt's own time."""
    events = [
        (int(stamp.partition("-")[0]), entry)
        for stamp, entry in world.redis.xrange(world.key("events", job))
        if int(stamp.partition("-")[0]) >= killed_ms
    ]
    waited, since, turned = 0, killed_ms, ""
    for at, entry in events:
        if turned in ("queued", "running"):
            waited += at - since
        since, turned = at, entry["state"]
    return (since - killed_ms - waited) / 1000


# A stopped worker


@pytest.mark.parametrize("who", ["child", "worker"])
def test_stopped_past_its_lease_the_late_attempt_is_refused_and_the_job_succeeds_once(
    private_stack: StartStack, tmp_path: Path, who: str
) -> None:
    stack = private_stack(fit_workers=2, environ={"TABRELAY_LEASE_S": "3", "TABRELAY_LEASE_RENEW_S": "1"})
    world, history = World(stack), History()
    with Service(stack.url) as service:
        world.wait_all_up(2, 1)
        job = submit(service, history, Content(900, 20, 1, 32), "slow")
        wait_until(lambda: service.job(job)["phase"] == "encoding", "encoding")
        (child,) = world.working()
        pids = [child] if who == "child" else [child, parent_of(world, child)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(lambda: service.job(job)["attempt"] == 2, "another attempt", 30)
            assert service.job(job)["state"] == "running"
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        ended = service.end_of(job, 120)
        assert (ended["state"], ended["attempt"]) == ("succeeded", 2)
        log = stack.data_dir / "up.log"
        wait_until(lambda: "the job is no longer ours" in log.read_text(), "the late attempt's end", 60)
        wait_until(lambda: not world.working(), "quiet")
        assert len(service.http.get("/v1/datasets/slow").json()["versions"]) == 1
        assert check_all(world, history).faults == []


def parent_of(world: World, child: int) -> int:
    """The Celery parent."""
    return next(p.parent for p in world.fit_children() if p.pid == child)


# A poison table


def test_poison_table_ends_as_worker_lost_and_others_flow_on(private_stack: StartStack) -> None:
    stack = private_stack(fit_workers=2)
    world, history = World(stack), History()
    kills: list[int] = []
    over = threading.Event()
    with Service(stack.url) as service:
        world.wait_all_up(2, 1)
        poison = submit(service, history, Content(900, 20, 2, 32), "poison")

        def kill_whoever_claims() -> None:
            while not over.wait(0.02):
                for pid, job in world.working().items():
                    if job == poison and pid not in kills and send(pid, signal.SIGKILL):
                        kills.append(pid)

        killing = threading.Thread(target=kill_whoever_claims)
        killing.start()
        try:
            others = [submit(service, history, Content(120, 6, 10 + i, 8), f"other-{i}") for i in range(8)]
            ended = service.end_of(poison, 120)
            for job in others:
                assert service.end_of(job)["state"] == "succeeded"
        finally:
            over.set()
            killing.join()
        assert (ended["state"], ended["error"]["code"], ended["attempt"]) == ("failed", "worker_lost", 3)
        assert len(kills) == 3
        assert poison in dead_letters(world)
        check_problem(service.ask("poison", numeric(8).drop_columns(["y"])), 404, "dataset_not_found")
        world.wait_all_up(2, 1)
        assert service.fit(Content(120, 6, 99, 8).table(), "after")["state"] == "succeeded"
        assert check_all(world, history).faults == []


def dead_letters(world: World) -> set[str]:
    """Every entry of the dead-letter lists, whatever they are kept in."""
    found: set[str] = set()
    for name in [world.key("dead"), *world.keys("dead")]:
        if world.redis.type(name) == "list":
            found |= set(world.redis.lrange(name, 0, -1))
        elif world.redis.type(name) == "zset":
            found |= set(world.redis.zrange(name, 0, -1))
    return found


# Redis killed

BACK_WITHIN_S = 15.0


def test_redis_killed_in_mid_run_everything_recovers_in_15_s(private_stack: StartStack) -> None:
    stack = private_stack(fit_workers=2, environ={"TABRELAY_REDIS_APPENDFSYNC": "always"})
    world, history, rng = World(stack), History(), np.random.default_rng(SEED)
    over = threading.Event()
    refused: Counter[int] = Counter()
    accepted_at: list[float] = []
    with Service(stack.url) as service:
        world.wait_all_up(2, 1)
        assert world.redis.config_get("appendfsync") == {"appendfsync": "always"}

        def produce() -> None:
            number = 0
            with Service(stack.url) as own:
                while not over.wait(0.1):
                    number += 1
                    content = Content(100, 6, 20_000 + number, 8)
                    response = own.submit(content.table(), f"d{number % 5}")
                    if response.status_code == 202:
                        job = response.json()["id"]
                        history.accepted[job] = Accepted(job, f"d{number % 5}", content, now_ms())
                        accepted_at.append(time.monotonic())
                    else:
                        refused[response.status_code] += 1

        producing = threading.Thread(target=produce)
        producing.start()
        backs = []
        try:
            for _ in range(3):
                time.sleep(float(rng.uniform(2, 5)))
                killed, before = time.monotonic(), finished(world)
                os.kill(world.redis_server()[0].pid, signal.SIGKILL)

                def both_work(since: float = killed, known: set[str] = before) -> bool:
                    return any(at > since for at in accepted_at) and bool(new_work(world, known))

                wait_until(both_work, "producers and workers after Redis was killed", BACK_WITHIN_S)
                backs.append(time.monotonic() - killed)
        finally:
            over.set()
            producing.join()
        for job in history.accepted:
            service.end_of(job, 180)
        states = Counter(service.job(job)["state"] for job in history.accepted)
        print(
            f"seed {SEED}: back after {', '.join(f'{s:.1f}' for s in backs)} s; {len(history.accepted)} jobs {dict(states)}; "
            f"refused {dict(refused)}"
        )
        assert set(refused) <= {503}
        assert states == {"succeeded": len(history.accepted)}
        assert check_all(world, history, fsync="always").faults == []


def finished(world: World) -> set[str]:
    """Jobs that have succeeded."""
    return {key for key in world.keys("job") if world.redis.hget(key, "state") == "succeeded"}


def new_work(world: World, known: set[str]) -> set[str]:
    """Jobs that succeeded since; empty while Redis is away."""
    return finished(world) - known if world.redis_answers() else set()


# A full disk


@pytest.fixture
def outside_redis(tmp_path: Path) -> Iterator[str]:
    """A server with its files elsewhere: its URL."""
    server = prepare(Settings(data_dir=tmp_path / "redis-data", run_dir=tmp_path / "r"))
    running = subprocess.Popen(server.argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(server.socket.exists, "Redis to answer")
    yield server.url
    running.kill()
    running.wait()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A data folder on a file system of 64 MiB."""
    folder = tmp_path / "data"
    with small_disk(folder, 64) as mounted:
        if not mounted:
            pytest.skip("mounting a small file system was refused; run as root to fill a disk")
        yield folder


def test_full_disk_is_storage_full_and_the_next_job_works(
    disk: Path, outside_redis: str, private_stack: StartStack
) -> None:
    stack = private_stack(data_dir=disk, redis_url=outside_redis)
    world = World(stack, redis_url=outside_redis)
    history = History()
    with Service(stack.url) as service:
        before = service.fit(numeric(120), "kept")
        rows = numeric(120).drop_columns(["y"]).slice(0, 5)
        answer = service.predict("kept", rows)["probabilities"]
        job = submit(service, history, Content(500, 12, 3, 32), "full")  # some 60 MiB
        wait_until(lambda: service.job(job)["phase"] == "encoding", "encoding")
        ballast = disk / "ballast"
        fill(ballast)
        ended = service.end_of(job)
        assert (ended["state"], ended["error"]["code"]) == ("failed", "storage_full"), ended
        fill(ballast)  # the job's own file is gone again
        refused = service.submit(numeric(200, seed=5), "refused")
        check_problem(refused, 507, "storage_full")
        names = {path.name for path in (disk / "contexts" / TENANT).iterdir()}
        assert names == {f"{before['context']}.safetensors"}
        assert list((disk / "uploads").iterdir()) == []
        assert service.predict("kept", rows)["probabilities"] == answer
        ballast.unlink()
        assert service.fit(numeric(150, seed=6), "after")["state"] == "succeeded"
        check: dict[str, Any] = service.predict("after", rows)
        assert len(check["probabilities"]) == 5
        report = check_all(world, history)
        orphans = [note for note in report.notes if "nothing refers to" in note or "temporary" in note]
        assert (report.faults, orphans) == ([], [])


def test_full_disk_with_redis_on_it_refuses_in_words_and_comes_back(
    disk: Path, private_stack: StartStack
) -> None:
    stack = private_stack(data_dir=disk)
    with Service(stack.url) as service:
        service.fit(numeric(120), "kept")
        rows = numeric(120).drop_columns(["y"]).slice(0, 5)
        answer = service.predict("kept", rows)["probabilities"]
        ballast = disk / "ballast"
        fill(ballast)
        told: Counter[str] = Counter()
        for i in range(20):
            for response in (
                service.submit(numeric(100, seed=50 + i), "refused"),
                service.http.delete("/v1/datasets/none"),
                service.http.put("/v1/datasets/kept/pin", json={"pinned": True}),
            ):
                told[f"{response.status_code} {code_of(response)}"] += 1
            assert service.predict("kept", rows)["probabilities"] == answer
            time.sleep(0.1)
        print(dict(told))
        assert {line.split()[0] for line in told} <= {"200", "404", "503", "507"}, told
        ballast.unlink()

        def accepted() -> bool:
            with contextlib.suppress(AssertionError):
                return service.fit(numeric(150, seed=6), "after")["state"] == "succeeded"
            return False

        wait_until(accepted, "a fit after the disk was freed", 30)


def code_of(response: httpx.Response) -> str:
    """The problem's code."""
    return str(response.json()["code"]) if response.status_code >= 400 else ""


# A file that rots


def test_rotten_context_never_answers_and_the_same_table_sent_again_mends_it(
    private_stack: StartStack,
) -> None:
    stack = private_stack()
    world = World(stack)
    table = numeric(120)
    rows = table.drop_columns(["y"]).slice(0, 5)
    with Service(stack.url) as service:
        job = service.fit(table, "d")
        answer = service.predict("d", rows)["probabilities"]
        (worker,) = world.predict_workers()
        os.kill(worker.pid, signal.SIGKILL)
        for folder in (world.data / "contexts", world.settings.host):
            if folder is not None:
                rot(folder / TENANT / f"{job['context']}.safetensors")
        check_problem(service.ask("d", rows), 410, "context_damaged")
        again = service.fit(table, "d")
        assert again["context"] != job["context"]
        told = service.predict("d", rows)
        assert (told["context"], told["probabilities"]) == (again["context"], answer)


def rot(path: Path) -> None:
    """Flip a bit in the middle; as a new file, so that nobody who maps the old one sees it."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    copy = path.with_name(".rotten")
    copy.write_bytes(content)
    os.replace(copy, path)
