"""Jobs that wait for one another, are cut off, refused, retried or asked for by the service itself."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tabrelay.up.embedded import Stack
from tests.integration.oracle import CHECKPOINTS
from tests.support import Service, check_problem, children_of, numeric, wait_until

pytestmark = pytest.mark.integration

StartStack = Callable[..., Stack]
SLOW = {"options": '{"n_estimators": 32}'}


def slow(seed: int) -> Any:
    """A table whose fit takes some seconds with 32 estimators."""
    return numeric(rows=700, columns=14, seed=seed)


def encoding(service: Service, job: str) -> None:
    wait_until(lambda: service.job(job)["phase"] == "encoding", "encoding")


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("priority", "urgent", "interactive, batch"),
        ("deadline_s", "0", "above 0"),
        ("deadline_s", "soon", "a number of seconds"),
        ("deadline_s", "nan", "a number of seconds"),
        ("deadline_s", "1e9", "at most 604800"),
        ("ttl_s", "-5", "above 0"),
    ],
)
def test_terms_of_a_fit_are_checked_by_name(service: Service, field: str, value: str, says: str) -> None:
    check_problem(service.submit(numeric(), "terms", **{field: value}), 422, "invalid_request", field, says)


def test_terms_inside_a_json_fit_count_and_are_shown(service: Service) -> None:
    body = {"dataset": "terms", "target": "y", "columns": ["a", "y"], "rows": [[i, i % 2] for i in range(30)]}
    job = service.http.post(
        "/v1/fits", json={**body, "priority": "batch", "deadline_s": 90, "ttl_s": 3600}
    ).json()
    assert (job["priority"], job["ttl_s"]) == ("batch", 3600)
    assert job["deadline_at"] is not None
    service.end_of(job["id"])
    check_problem(
        service.http.post("/v1/fits", json={**body, "deadline_s": True}), 422, "invalid_request", "deadline_s"
    )


def test_the_same_content_under_two_names_is_encoded_once(service: Service) -> None:
    busy = service.submit(slow(1), "busy", **SLOW).json()
    first = service.submit(numeric(seed=101), "twin-a").json()
    second = service.submit(numeric(seed=101), "twin-b").json()
    assert second["waits_for"] == first["id"]
    jobs = [service.end_of(job["id"]) for job in (first, second)]
    assert [job["state"] for job in jobs] == ["succeeded", "succeeded"]
    assert ["encoding" in job["timings_ms"] for job in jobs] == [True, False]
    assert jobs[0]["context"] == jobs[1]["context"]
    service.end_of(busy["id"])


def test_a_cancelled_job_s_work_goes_on_for_the_one_that_joined(service: Service) -> None:
    first = service.submit(slow(2), "left", **SLOW).json()
    encoding(service, first["id"])
    second = service.submit(slow(2), "heir", **SLOW).json()
    assert second["waits_for"] == first["id"]
    before = service.job(first["id"])["fraction"]
    assert service.http.delete(f"/v1/jobs/{first['id']}").json()["state"] == "cancelled"
    heir = service.job(second["id"])
    assert (heir["state"], heir["attempt"]) == ("running", 1)
    assert heir["fraction"] >= before
    job = service.end_of(second["id"])
    assert (job["state"], job["attempt"]) == ("succeeded", 1)
    assert service.predict("heir", slow(2).drop_columns(["y"]).slice(0, 3))["context"] == job["context"]
    assert service.http.get("/v1/datasets/left").status_code == 404


def test_a_running_and_a_waiting_job_past_their_deadline_fail_as_timeout(service: Service) -> None:
    running = service.submit(slow(3), "late", deadline_s="1.5", **SLOW).json()
    waiting = service.submit(slow(4), "later", deadline_s="0.5", **SLOW).json()
    for job in (running, waiting):
        ended = service.end_of(job["id"], 30)
        assert (ended["state"], ended["error"]["code"]) == ("failed", "timeout")
    assert service.fit(numeric(seed=102), "on-time")["state"] == "succeeded"


def test_a_cancelled_job_is_retried_as_a_new_one_and_a_succeeded_one_is_not(
    service: Service, stack: Stack
) -> None:
    kept = service.fit(slow(5), "kept")
    first = service.submit(slow(5), "again", **SLOW).json()
    encoding(service, first["id"])
    service.http.delete(f"/v1/jobs/{first['id']}")
    service.end_of(first["id"])
    again = service.http.post(f"/v1/jobs/{first['id']}/retry")
    assert (again.status_code, again.json()["retry_of"]) == (202, first["id"])
    service.http.delete(f"/v1/jobs/{again.json()['id']}")
    service.end_of(again.json()["id"])
    assert service.http.delete("/v1/datasets/kept").status_code == 204
    refused = service.http.post(f"/v1/jobs/{again.json()['id']}/retry")
    check_problem(refused, 409, "conflict", says="no longer kept")
    check_problem(service.http.post(f"/v1/jobs/{kept['id']}/retry"), 409, "conflict", says="succeeded")
    assert service.http.post("/v1/jobs/nobody/retry").status_code == 404


def test_a_cancelled_waiting_job_leaves_no_table_behind(service: Service, stack: Stack) -> None:
    busy = service.submit(slow(6), "busy", **SLOW).json()
    tables = stack.data_dir / "tables" / "default"
    before = set(tables.iterdir())
    waiting = service.submit(numeric(seed=103), "never").json()
    assert len(set(tables.iterdir()) - before) == 1
    service.http.delete(f"/v1/jobs/{waiting['id']}")
    assert set(tables.iterdir()) == before
    service.end_of(busy["id"])


@pytest.mark.slow
def test_a_child_that_does_not_heed_a_cancel_is_ended_by_force_and_leaves_nothing(
    private_stack: StartStack,
) -> None:
    stack = private_stack(environ={"TABRELAY_CANCEL_GRACE_S": "1"})
    with Service(stack.url) as service:
        job = service.submit(slow(7), "stuck", **SLOW).json()
        encoding(service, job["id"])
        fits = [pid for pid, command in children_of(stack.pid).items() if "-m fit_workers" in command]
        os.kill(max(fits), signal.SIGSTOP)
        service.http.delete(f"/v1/jobs/{job['id']}")
        assert service.end_of(job["id"], 12)["state"] == "cancelled"
        assert service.fit(numeric(), "next")["state"] == "succeeded"
        assert list((stack.data_dir / "contexts").rglob(".tmp-*")) == []
        tables = stack.data_dir / "tables" / "default"
        wait_until(lambda: len(list(tables.iterdir())) == 1, "only the second table to be left")


@pytest.mark.slow
def test_large_fits_leave_one_of_two_workers_to_small_ones(private_stack: StartStack) -> None:
    stack = private_stack(environ={"TABRELAY_LARGE_FIT_S": "1"}, fit_workers=2)
    with Service(stack.url) as service:
        large = [service.submit(slow(200 + i), f"large-{i}", **SLOW).json() for i in range(3)]
        assert {job["queue"] for job in large} == {"fit.large"}
        encoding(service, large[0]["id"])
        small = [service.submit(numeric(seed=210 + i), f"small-{i}").json() for i in range(2)]
        ended = [service.end_of(job["id"]) for job in small]
        assert {job["queue"] for job in ended} == {"fit.small"}
        assert [service.job(job["id"])["state"] for job in large[1:]] == ["queued", "queued"]
        assert all(service.end_of(job["id"])["state"] == "succeeded" for job in large)


@pytest.mark.slow
def test_workers_serve_the_queues_that_they_are_told(private_stack: StartStack) -> None:
    stack = private_stack(
        environ={"TABRELAY_LARGE_FIT_S": "1"}, fit_workers=2, queues=("fit.small", "fit.large")
    )
    with Service(stack.url) as service:
        shown = service.http.get("/v1/workers").json()["fit"]
        assert [worker["queues"] for worker in shown] == [["fit.small"], ["fit.large"]]
        assert service.fit(slow(220), "large", **SLOW)["state"] == "succeeded"
        assert service.fit(numeric(seed=221), "small")["state"] == "succeeded"


def other_weights(folder: Path) -> Path:
    """The mini classifier with one weight changed."""
    path = folder / "other.ckpt"
    stored = torch.load(CHECKPOINTS / "tabicl-mini-classifier.ckpt", weights_only=True)
    name = next(iter(stored["state_dict"]))
    stored["state_dict"][name] = stored["state_dict"][name] * 1.001
    torch.save(stored, path)
    return path


def damage(path: Path) -> None:
    """Flip a byte in a copy that takes the file's place; the one that may be mapped stays as it is."""
    copy = path.with_name("damaged")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x20
    copy.write_bytes(content)
    shutil.copymode(path, copy)
    copy.replace(path)


@pytest.mark.slow
def test_a_refused_or_damaged_context_is_fitted_again_from_the_kept_table(
    private_stack: StartStack, tmp_path: Path
) -> None:
    table = numeric()
    rows = table.drop_columns(["y"]).slice(0, 4)
    first = private_stack()
    with Service(first.url) as service:
        service.fit(table, "d", options='{"n_estimators": 4, "seed": 7}')
        before = service.predict("d", rows)
    first.stop()
    second = private_stack(models=(f"tabicl-mini={other_weights(tmp_path)}",))
    with Service(second.url) as service:
        again = refused(service, rows, "context_incompatible", "upgrade")
        assert again["options"] == {"n_estimators": 4, "seed": 7, "precision": "auto", "cache": "auto"}
        upgraded = service.predict("d", rows)
        assert (upgraded["version"], upgraded["context"]) == (2, again["context"])
        assert upgraded["probabilities"] != before["probabilities"]

        disk = second.data_dir / "contexts" / "default" / f"{again['context']}.safetensors"
        (worker,) = [pid for pid, cmd in children_of(second.pid).items() if "-m predict_workers" in cmd]
        for copy in [disk, *Path("/dev/shm").glob(f"tabrelay-*/default/{disk.name}")]:
            damage(copy)
        os.kill(worker, signal.SIGKILL)
        mended = refused(service, rows, "context_damaged", "damaged")
        assert mended["context"] != again["context"]
        answer = service.predict("d", rows)
        assert (answer["version"], answer["probabilities"]) == (3, upgraded["probabilities"])


def refused(service: Service, rows: Any, code: str, reason: str) -> dict[str, Any]:
    """The dataset's context is refused with a job that fits it again, and that job's end."""
    response = service.ask(
        "d", rows, deadline_ms=120_000
    )  # a killed worker comes back slowly on a busy machine
    check_problem(response, 410, code, says="fitted again by job")
    assert int(response.headers["retry-after"]) >= 1
    job = response.json()["job"]
    shown = service.job(job)
    assert (shown["reason"], shown["dataset"]) == (reason, "d")
    if shown["state"] in ("queued", "running"):
        (pending,) = service.http.get("/v1/datasets/d").json()["jobs"]
        assert (pending["id"], pending["reason"]) == (job, reason)
    ended = service.end_of(job)
    assert ended["state"] == "succeeded", ended
    return ended
