"""Jobs followed as server-sent events: everything in order, a cut that loses nothing, ends, bounds."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from common.catalogue.records import Phase
from tabrelay import Client
from tabrelay.client.sse import ServerEvent, lines, parse
from tests.support import Service, check_problem, numeric, wait_until

pytestmark = pytest.mark.integration

#: Some 2 s of encoding on an idle core, and some 11 s.
SLOW = {"rows": 1000, "columns": 12, "options": '{"n_estimators": 16}'}
SLOWER = {"rows": 2000, "columns": 20, "options": '{"n_estimators": 32}'}
LIMIT = 16


def submit(service: Service, dataset: str, seed: int, how: dict[str, Any]) -> str:
    table = numeric(rows=how["rows"], columns=how["columns"], seed=seed)
    response = service.submit(table, dataset, options=how["options"])
    assert response.status_code == 202, response.text
    return str(response.json()["id"])


@contextmanager
def opened(service: Service, job_id: str, last_id: str = "") -> Iterator[httpx.Response]:
    headers = {"Last-Event-ID": last_id} if last_id else {}
    with service.http.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as response:
        yield response


def follow(response: httpx.Response) -> Iterator[tuple[ServerEvent, dict[str, Any]]]:
    assert response.status_code == 200
    for event in parse(lines(response.iter_text())):
        yield event, json.loads(event.data)


@pytest.fixture
def busy(service: Service) -> Iterator[str]:
    """A job that runs for long; cancelled at the end."""
    job_id = submit(service, "busy", 900, SLOWER)
    wait_until(lambda: service.job(job_id)["state"] == "running", "running")
    yield job_id
    service.http.delete(f"/v1/jobs/{job_id}")
    service.end_of(job_id, 30)


def test_a_fit_is_followed_through_every_phase_and_a_cut_reader_misses_nothing(service: Service) -> None:
    first = submit(service, "before", 901, {"rows": 300, "columns": 8, "options": '{"n_estimators": 32}'})
    job_id = submit(service, "followed", 902, SLOW)
    with opened(service, job_id) as response:
        assert response.headers["content-type"] == "text/event-stream"
        assert response.headers["cache-control"] == "no-store"
        cut = []
        for event, job in follow(response):
            cut.append((event, job))
            if job["phase"] == "encoding":
                break
    last_id = [event.id for event, _ in cut if event.id][-1]
    assert last_id is not None
    time.sleep(1)
    with opened(service, job_id, last_id) as response:
        rest = list(follow(response))
    told = cut + rest
    states = [state for state, _ in itertools.groupby(job["state"] for _, job in told)]
    assert states in (["queued", "running", "succeeded"], ["running", "succeeded"])
    phases = [phase for phase, _ in itertools.groupby(job["phase"] for _, job in told if job["phase"])]
    assert phases == list(Phase)[-len(phases) :]
    assert {"encoding", "writing", "verifying", "publishing"} <= set(phases)
    progress = [job["progress"] for _, job in told]
    assert progress == sorted(progress)
    ids = [event.id for event, _ in told if event.id]
    assert len(set(ids)) == len(ids)
    event, job = told[-1]
    assert (event.name, job["state"], job["progress"], job["eta_s"]) == ("end", "succeeded", 1.0, None)
    assert job["context"]
    assert {event.name for event, _ in told[:-1]} == {"progress"}
    left = [job["eta_s"] for _, job in told if job["phase"] == "encoding" and job["fraction"] > 0.4]
    assert left[-1] < left[0]

    with opened(service, job_id, "0-0") as response:
        whole = [event.id for event, _ in follow(response)]
    assert [id for id in whole if id in ids] == [id for id in ids if id != "0-0"]
    with opened(service, job_id, str(ids[-1])) as response:
        assert response.status_code == 204
    with opened(service, job_id, "1-1") as response:
        assert [event.name for event, _ in follow(response)] == ["end"]
    assert service.end_of(first)["state"] == "succeeded"


def test_the_client_watches_over_the_stream(service: Service) -> None:
    with Client(service.url) as client:
        job = client.submit(numeric(seed=903).to_pandas(), "y", "watched-over-sse")
        seen = list(client.watch(job))
    assert (seen[0].state, seen[-1].state) == ("queued", "succeeded")
    assert "encoding" in [state.phase for state in seen]


def test_a_waiting_job_tells_its_place_and_a_cancel_ends_its_stream(service: Service, busy: str) -> None:
    before, waiting = (
        submit(service, f"waits-{i}", 904 + i, {"rows": 40, "columns": 3, "options": "{}"}) for i in range(2)
    )
    with opened(service, waiting) as response:
        events = follow(response)
        event, job = next(events)
        assert (event.name, job["state"], job["queue_position"]) == ("progress", "queued", 2)
        assert job["eta_s"] > 0
        service.http.delete(f"/v1/jobs/{before}")
        event, job = next(events)
        assert (event.name, event.id, job["queue_position"]) == ("progress", None, 1)
        service.http.delete(f"/v1/jobs/{waiting}")
        (ended,) = events
        assert (ended[0].name, ended[1]["state"]) == ("end", "cancelled")


def test_streams_are_bounded_unknown_jobs_are_not_found_and_a_reader_that_left_makes_room(
    service: Service, busy: str
) -> None:
    check_problem(service.http.get("/v1/jobs/unknown/events"), 404, "job_not_found")
    with ExitStack() as open_ones:
        leaving = open_ones.enter_context(ExitStack())
        leaving.enter_context(opened(service, busy))
        for _ in range(LIMIT - 1):
            open_ones.enter_context(opened(service, busy))
        refused = service.http.get(f"/v1/jobs/{busy}/events")
        check_problem(refused, 429, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        assert service.job(busy)["state"] == "running"
        leaving.close()

        def has_room() -> bool:
            with opened(service, busy) as response:
                return response.status_code == 200

        wait_until(has_room, "the place of the reader that left", 6)
