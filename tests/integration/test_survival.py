"""What is killed, restarted or cut off: nothing accepted is lost, nothing answered is wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from tabrelay.up.embedded import Stack
from tests.support import Service, children_of, numeric, wait_until

pytestmark = pytest.mark.integration

StartStack = Callable[..., Stack]


def process_of(stack: Stack, module: str) -> int:
    """The process that runs `python -m module`: the oldest one, which is the parent where there are several."""
    return min(pid for pid, command in children_of(stack.pid).items() if f"-m {module}" in command)


def leftovers(data: Path) -> list[str]:
    """Temporary files that something left behind."""
    uploads = [p.name for p in (data / "uploads").iterdir()] if (data / "uploads").exists() else []
    return uploads + [p.name for p in (data / "contexts").rglob(".tmp-*")]


def test_killed_predict_worker_the_next_predict_is_answered_without_a_refit(
    private_stack: StartStack,
) -> None:
    stack = private_stack()
    with Service(stack.url) as service:
        table = numeric()
        job = service.fit(table, "d")
        rows = table.drop_columns(["y"]).slice(0, 5)
        before = service.predict("d", rows)
        os.kill(process_of(stack, "predict_workers"), signal.SIGKILL)
        after = service.predict("d", rows)
        assert after["probabilities"] == before["probabilities"]
        assert after["context"] == job["context"]
        assert len(service.http.get("/v1/jobs").json()["jobs"]) == 1


def test_restarted_stack_finds_its_datasets_and_answers_without_a_refit(
    private_stack: StartStack, tmp_path: Path
) -> None:
    table = numeric()
    rows = table.drop_columns(["y"]).slice(0, 5)
    first = private_stack()
    with Service(first.url) as service:
        service.fit(table, "d")
        service.fit(numeric(seed=4), "d")
        before = service.predict("d", rows)
    first.stop()
    second = private_stack()
    with Service(second.url) as service:
        assert service.predict("d", rows)["probabilities"] == before["probabilities"]
        shown = service.http.get("/v1/datasets/d").json()
        assert [version["version"] for version in shown["versions"]] == [1, 2]
        assert [job["state"] for job in service.http.get("/v1/jobs").json()["jobs"]] == [
            "succeeded",
            "succeeded",
        ]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_stopped_in_mid_fit_the_job_goes_on_after_the_next_start(
    private_stack: StartStack, tmp_path: Path, number: signal.Signals
) -> None:
    stack = private_stack()
    with Service(stack.url) as service:
        submitted = service.submit(
            numeric(rows=1000, columns=20), "slow", options='{"n_estimators": 32}'
        ).json()
        wait_until(lambda: service.job(submitted["id"])["phase"] == "encoding", "encoding")
        with service.http.stream("GET", f"/v1/jobs/{submitted['id']}/events") as followed:
            assert followed.status_code == 200
            everything = children_of(stack.pid)
            began = time.monotonic()
            os.kill(stack.pid, number)
            wait_until(lambda: not any(alive(pid) for pid in everything), "the end of every process", 12)
            assert time.monotonic() - began < 11
    stack.stop()
    again = private_stack()
    with Service(again.url) as service:
        job = service.end_of(submitted["id"], 150)
        assert (job["state"], job["attempt"]) == ("succeeded", 1)
        assert len(service.http.get("/v1/datasets/slow").json()["versions"]) == 1
    assert leftovers(tmp_path / "data") == []


def test_killed_fit_child_the_job_ends_succeeded_once(private_stack: StartStack, tmp_path: Path) -> None:
    stack = private_stack()
    with Service(stack.url) as service:
        submitted = service.submit(
            numeric(rows=900, columns=20), "slow", options='{"n_estimators": 32}'
        ).json()
        wait_until(lambda: service.job(submitted["id"])["phase"] == "encoding", "encoding")
        parent = process_of(stack, "fit_workers")
        (child,) = [pid for pid, command in children_of(parent).items() if "fit_workers" in command]
        os.kill(child, signal.SIGKILL)
        job = service.end_of(submitted["id"], 150)
        assert (job["state"], job["attempt"]) == ("succeeded", 2)
        assert len(service.http.get("/v1/datasets/slow").json()["versions"]) == 1
    assert leftovers(tmp_path / "data") == []


@pytest.fixture
def outside_redis(tmp_path: Path) -> Iterator[tuple[str, Callable[[], subprocess.Popen[bytes]]]]:
    """A server that is not the stack's: its URL and how to start it."""
    from common.settings import Settings
    from tabrelay.up.redis_server import prepare

    settings = Settings(data_dir=tmp_path / "redis-data", run_dir=tmp_path / "r")
    server = prepare(settings)
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        running = subprocess.Popen(server.argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        started.append(running)

        def answers() -> bool:
            with contextlib.suppress(redis.RedisError), redis.from_url(server.url) as client:
                return bool(client.ping())
            return False

        wait_until(answers, "Redis to answer")
        return running

    yield server.url, start
    for running in started:
        running.kill()
        running.wait()


def test_redis_stopped_resident_contexts_answer_and_fits_are_refused_in_words(
    private_stack: StartStack, outside_redis: tuple[str, Callable[[], subprocess.Popen[bytes]]]
) -> None:
    url, start = outside_redis
    server = start()
    stack = private_stack(redis_url=url)
    with Service(stack.url) as service:
        table = numeric()
        service.fit(table, "d")
        rows = table.drop_columns(["y"]).slice(0, 5)
        before = service.predict("d", rows)["probabilities"]
        time.sleep(1.5)  # the snapshot has seen that no job is pending
        server.terminate()
        server.wait(10)
        for _ in range(5):
            assert service.predict("d", rows)["probabilities"] == before
        refused = service.submit(table, "other")
        assert (refused.status_code, refused.json()["code"]) == (503, "catalogue_unavailable")
        assert int(refused.headers["Retry-After"]) >= 1
        assert service.http.get("/readyz").status_code == 503
        assert service.http.get("/livez").status_code == 200
        start()
        wait_until(
            lambda: service.http.get("/readyz").status_code == 200, "readiness after Redis is back", 40
        )
        assert service.fit(numeric(seed=8), "other")["state"] == "succeeded"


def alive(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
