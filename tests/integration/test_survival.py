"""What is killed, restarted or cut off: nothing accepted is lost, nothing answered is wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from tabrelay.up.embedded import Stack
from tabrelay.up.stack import StackOptions
from tests.support import Service, children_of, numeric, wait_until

pytestmark = pytest.mark.integration

StartStack = Callable[..., Stack]

#: Options that make a small table's fit last long enough to be hit in the middle.
MANY_SECONDS = '{"n_estimators": 32}'


def process_of(stack: Stack, module: str) -> int:
    """The process that runs `python -m module`: the oldest one, which is the parent where there are several."""
    return min(pid for pid, command in children_of(stack.pid).items() if f"-m {module}" in command)


def leftovers(data: Path) -> list[str]:
    """Temporary files that something left behind."""
    uploads = [p.name for p in (data / "uploads").iterdir()] if (data / "uploads").exists() else []
    return uploads + [p.name for p in (data / "contexts").rglob(".tmp-*")]


@pytest.fixture(scope="module")
def restartable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One stack for all that kills or restarts: starting is what takes long."""
    data = tmp_path_factory.mktemp("sturdy") / "data"
    stack = Stack(StackOptions(port=0, data_dir=data, models=("tabicl-mini",), threads=1), quiet=True)
    yield stack
    stack.stop()


@pytest.fixture
def sturdy(restartable: Stack) -> Stack:
    """It, running."""
    with contextlib.suppress(RuntimeError):
        if alive(restartable.pid) and restartable.url:
            return restartable
    restartable.stop()
    return restartable.start()


def jobs_of(service: Service, dataset: str) -> list[dict[str, Any]]:
    """A dataset's jobs, newest first."""
    return list(service.http.get("/v1/jobs", params={"dataset": dataset}).json()["jobs"])


def versions_of(service: Service, dataset: str) -> list[int]:
    return [v["version"] for v in service.http.get(f"/v1/datasets/{dataset}").json()["versions"]]


def fit_child(stack: Stack) -> int:
    """The process that fits."""
    parent = process_of(stack, "fit_workers")
    (child,) = [pid for pid, command in children_of(parent).items() if "fit_workers" in command]
    return child


def test_killed_predict_worker_the_next_predict_is_answered_without_a_refit(sturdy: Stack) -> None:
    with Service(sturdy.url) as service:
        table = numeric()
        job = service.fit(table, "answered")
        rows = table.drop_columns(["y"]).slice(0, 5)
        before = service.predict("answered", rows)
        for _ in range(2):
            os.kill(process_of(sturdy, "predict_workers"), signal.SIGKILL)
            after = service.predict("answered", rows, deadline_ms=25_000)
            assert after["probabilities"] == before["probabilities"]
            assert after["context"] == job["context"]
        assert len(jobs_of(service, "answered")) == 1


def test_restarted_stack_finds_its_datasets_and_answers_without_a_refit(sturdy: Stack) -> None:
    table = numeric(seed=3)
    rows = table.drop_columns(["y"]).slice(0, 5)
    with Service(sturdy.url) as service:
        ids = [service.fit(table, "found")["id"], service.fit(numeric(seed=4), "found")["id"]]
        before = {version: service.predict("found", rows, version=version) for version in (1, 2)}
        known = service.http.get("/v1/datasets").json()["datasets"]
    sturdy.stop()
    sturdy.start()
    with Service(sturdy.url) as service:
        for version, answer in before.items():
            again = service.predict("found", rows, version=version)
            assert again["probabilities"] == answer["probabilities"]
            assert again["context"] == answer["context"]
        assert service.predict("found", rows)["version"] == 2
        assert versions_of(service, "found") == [1, 2]
        assert service.http.get("/v1/datasets").json()["datasets"] == known
        assert [(job["id"], job["state"]) for job in jobs_of(service, "found")] == [
            (ids[1], "succeeded"),
            (ids[0], "succeeded"),
        ]
        shared = service.fit(table, "found-elsewhere")
        assert shared["context"] == before[1]["context"]
        assert "encoding" not in shared["timings_ms"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_in_mid_fit_the_job_goes_on_after_the_next_start(
    sturdy: Stack, number: signal.Signals
) -> None:
    dataset = f"stopped-{number.name}"
    with Service(sturdy.url) as service:
        submitted = service.submit(
            numeric(rows=600, columns=16, seed=number), dataset, options=MANY_SECONDS
        ).json()
        wait_until(lambda: service.job(submitted["id"])["phase"] == "encoding", "encoding")
    everything = children_of(sturdy.pid)
    began = time.monotonic()
    os.kill(sturdy.pid, number)
    wait_until(lambda: not any(alive(pid) for pid in everything), "the end of every process", 12)
    assert time.monotonic() - began < 11
    sturdy.stop()
    sturdy.start()
    with Service(sturdy.url) as service:
        job = service.end_of(submitted["id"], 150)
        assert (job["state"], job["attempt"]) == ("succeeded", 1)
        assert versions_of(service, dataset) == [1]
    assert leftovers(sturdy.data_dir) == []


def test_killed_fit_child_the_job_ends_succeeded_once(sturdy: Stack) -> None:
    with Service(sturdy.url) as service:
        submitted = service.submit(
            numeric(rows=600, columns=16, seed=5), "killed", options=MANY_SECONDS
        ).json()
        wait_until(lambda: service.job(submitted["id"])["phase"] == "encoding", "encoding")
        os.kill(fit_child(sturdy), signal.SIGKILL)
        job = service.end_of(submitted["id"], 150)
        assert (job["state"], job["attempt"]) == ("succeeded", 2)
        assert versions_of(service, "killed") == [1]
        assert leftovers(sturdy.data_dir) == []


def test_killed_processes_leave_no_temporary_file(sturdy: Stack) -> None:
    data = sturdy.data_dir
    with Service(sturdy.url) as service:
        job = service.submit(numeric(rows=800, columns=20), "written").json()
        wait_until(lambda: list((data / "contexts").rglob(".tmp-*")), "a context being written", 60, 0.001)
        os.kill(fit_child(sturdy), signal.SIGKILL)
        assert list((data / "contexts").rglob(".tmp-*")), "killed too late to see anything"
        with half_an_upload(sturdy.url):
            wait_until(lambda: list((data / "uploads").iterdir()), "the upload's file")
            apis = [pid for pid, command in children_of(sturdy.pid).items() if "-m api" in command]
            os.kill(max(apis), signal.SIGKILL)
        wait_until(lambda: answers(service), "the API to be back", 30)
        ended = service.end_of(job["id"], 60)
        assert (ended["state"], ended["attempt"]) == ("succeeded", 2)
        assert versions_of(service, "written") == [1]
    if leftovers(data):  # at the latest the next start removes them
        sturdy.stop()
        sturdy.start()
        wait_until(lambda: not leftovers(data), f"{leftovers(data)} to be removed after a restart", 15)


@contextlib.contextmanager
def half_an_upload(url: str) -> Iterator[None]:
    """A fit whose file is still on its way."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    head = (
        b"POST /v1/fits HTTP/1.1\r\nHost: here\r\nContent-Length: 50000000\r\n"
        b"Content-Type: multipart/form-data; boundary=cut\r\n\r\n"
        b'--cut\r\nContent-Disposition: form-data; name="file"; filename="t.csv"\r\n\r\n'
    )
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head + b"1,2\n" * 200_000)
        yield


def answers(service: Service) -> bool:
    """Whether the API answers at all."""
    with contextlib.suppress(httpx.HTTPError):
        return service.http.get("/livez").status_code == 200
    return False


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


@pytest.mark.parametrize("how", ["gone", pytest.param("hung", marks=pytest.mark.slow)])
def test_redis_stopped_resident_contexts_answer_and_fits_are_refused_in_words(
    how: str, private_stack: StartStack, outside_redis: tuple[str, Callable[[], subprocess.Popen[bytes]]]
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
        if how == "gone":
            server.terminate()
            server.wait(10)
        else:
            server.send_signal(signal.SIGSTOP)
        for _ in range(20):
            began = time.monotonic()
            assert service.predict("d", rows)["probabilities"] == before
            assert time.monotonic() - began < 5
        began = time.monotonic()
        refused = service.submit(table, "other")
        assert time.monotonic() - began < 20
        assert (refused.status_code, refused.json()["code"]) == (503, "catalogue_unavailable")
        assert int(refused.headers["Retry-After"]) >= 1
        assert service.http.get("/readyz").status_code == 503
        assert service.http.get("/livez").status_code == 200
        if how == "gone":
            start()
        else:
            server.send_signal(signal.SIGCONT)
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
