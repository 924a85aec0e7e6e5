"""Which job goes next, what jobs of equal content do for one another, and what is refused before it waits."""

from __future__ import annotations

from typing import Any

import fakeredis
import pytest

from common.admission import UploadRoom
from common.catalogue import Catalogue, JobState
from common.catalogue.drain import DRAIN_LEAST_S, DRAIN_MOST_S, DRAIN_UNKNOWN_S, drain_s
from common.catalogue.jobs import Claim, Held, Joined, Moved, StaleClaim
from common.catalogue.records import FitWorker, Job, NewJob
from common.errors import Cancelled, Conflict, FitTimeout, InvalidTable, Overloaded, QueueFull
from common.names import new_id
from common.settings import Settings
from tests.unit.test_catalogue import version_of

SMALL, LARGE = "fit.small", "fit.large"


@pytest.fixture
def client() -> Any:
    return fakeredis.FakeRedis(decode_responses=True)


@pytest.fixture
def catalogue(client: Any) -> Catalogue:
    return Catalogue(client, Settings(lease_s=5, max_queued_jobs=40, max_queued_jobs_per_tenant=30))


def new(dataset: str = "d", **fields: Any) -> NewJob:
    given = {
        "id": new_id(), "tenant": "default", "dataset": dataset, "model": "m", "task": "classification",
        "target": "y", "options": {}, "queue": SMALL, "key": new_id(), "table": "t", "rows": 3, "columns": 2,
    }  # fmt: skip
    return NewJob(**{**given, **fields})


def submit(catalogue: Catalogue, dataset: str = "d", **fields: Any) -> Job:
    return catalogue.jobs.submit(new(dataset, **fields)).job


def claim(catalogue: Catalogue, queue: str = SMALL, worker: str = "w") -> Claim:
    claimed = catalogue.jobs.claim(queue, worker, 7, new_id(), f"{worker}:life")
    assert claimed is not None
    return claimed


def state(catalogue: Catalogue, job: Job) -> JobState:
    return catalogue.jobs.get("default", job.id).state


def live(catalogue: Catalogue, name: str, *queues: str) -> None:
    catalogue.workers.register_fit(FitWorker(name, "host", 1, "cpu", queues, 0))


# The same content at the same time


def test_two_jobs_of_the_same_content_run_once_and_both_succeed(catalogue: Catalogue) -> None:
    first, second = submit(catalogue, "a", key="k"), submit(catalogue, "b", key="k")
    assert catalogue.jobs.get("default", second.id).leader == first.id
    running = claim(catalogue)
    assert running.job.id == first.id
    assert catalogue.jobs.claim(SMALL, "other", 8, new_id()) is None
    catalogue.jobs.publish(running, version_of(running, key="k"), {})
    after = claim(catalogue)
    assert (after.job.id, after.job.leader) == (second.id, "")
    assert catalogue.jobs.known_context("default", "k") == "c"
    catalogue.jobs.publish(after, version_of(after, key="k"), {})
    assert [state(catalogue, job) for job in (first, second)] == [JobState.SUCCEEDED] * 2


def test_a_running_job_that_is_cancelled_goes_on_for_those_that_joined(catalogue: Catalogue) -> None:
    first, second, third = (submit(catalogue, name, key="k") for name in "abc")
    running = claim(catalogue)
    catalogue.jobs.report(running, "encoding", 0.5)
    assert catalogue.jobs.cancel("default", first.id).state is JobState.CANCELLED
    heir = catalogue.jobs.get("default", second.id)
    assert (heir.state, heir.phase, heir.fraction, heir.attempt) == (JobState.RUNNING, "encoding", 0.5, 1)
    assert catalogue.jobs.get("default", third.id).leader == second.id
    assert catalogue.jobs.held_by("w:life") == Held(second.id, running.token, 7)
    assert catalogue.jobs.renew(second.id, running.token)
    catalogue.jobs.report(running, "encoding", 0.6)
    assert running.job.id == second.id
    catalogue.jobs.publish(running, version_of(running, key="k"), {})
    assert claim(catalogue).job.id == third.id
    assert state(catalogue, second) is JobState.SUCCEEDED


def test_a_publish_of_a_job_that_was_cancelled_meanwhile_is_done_again_for_its_heir(
    catalogue: Catalogue,
) -> None:
    first, second = submit(catalogue, "a", key="k"), submit(catalogue, "b", key="k")
    running = claim(catalogue)
    stale = version_of(running, key="k")
    catalogue.jobs.cancel("default", first.id)
    with pytest.raises(Moved):
        catalogue.jobs.publish(running, stale, {})
    assert catalogue.datasets.get("default", "a").versions == {}
    catalogue.jobs.publish(running, version_of(running, key="k"), {})
    assert catalogue.datasets.get("default", "b").current == 1
    assert state(catalogue, second) is JobState.SUCCEEDED


def test_every_heir_may_be_cancelled_in_turn(catalogue: Catalogue) -> None:
    jobs = [submit(catalogue, name, key="k") for name in "abcd"]
    running = claim(catalogue)
    for job in jobs[:3]:
        catalogue.jobs.cancel("default", job.id)
    catalogue.jobs.report(running, "encoding", 0.5)
    assert running.job.id == jobs[3].id
    catalogue.jobs.cancel("default", jobs[3].id)
    with pytest.raises(Cancelled):
        catalogue.jobs.report(running, "encoding", 0.6)
    catalogue.jobs.fail(running, Cancelled(), {})
    assert {state(catalogue, job) for job in jobs} == {JobState.CANCELLED}


def test_a_waiting_job_that_is_cancelled_leaves_its_place_to_those_that_joined(catalogue: Catalogue) -> None:
    first, second = submit(catalogue, "a", key="k"), submit(catalogue, "b", key="k")
    third = submit(catalogue, "c", key="k")
    catalogue.jobs.cancel("default", first.id)
    catalogue.jobs.cancel("default", third.id)
    assert claim(catalogue).job.id == second.id
    assert catalogue.jobs.claim(SMALL, "w", 7, new_id()) is None
    assert catalogue.jobs.waiting(SMALL) == 0


def test_a_fault_of_the_content_is_the_fault_of_all_that_joined(catalogue: Catalogue) -> None:
    first, second = submit(catalogue, "a", key="k"), submit(catalogue, "b", key="k")
    running = claim(catalogue)
    catalogue.jobs.fail(running, InvalidTable("no"), {})
    for job in (first, second):
        ended = catalogue.jobs.get("default", job.id)
        assert ended.error is not None
        assert (ended.state, ended.error.code) == (JobState.FAILED, "invalid_table")
    assert submit(catalogue, "c", key="k").leader == ""


def test_a_deadline_is_the_fault_of_one_job_alone(catalogue: Catalogue) -> None:
    first = submit(catalogue, "a", key="k", deadline_s=0.001)
    second = submit(catalogue, "b", key="k")
    running = claim(catalogue)
    with pytest.raises(FitTimeout):
        catalogue.jobs.report(running, "encoding", 0.5)
    catalogue.jobs.fail(running, FitTimeout(), {})
    assert claim(catalogue).job.id == second.id
    assert state(catalogue, first) is JobState.FAILED


def test_a_raw_upload_that_turns_out_to_be_known_content_waits_for_it(catalogue: Catalogue) -> None:
    raw = submit(catalogue, "raw", key="", table="")
    parsing = claim(catalogue)
    leader = submit(catalogue, "a", key="k")
    with pytest.raises(Joined):
        catalogue.jobs.adopt(parsing, "t", "k", rows=3)
    waiting = catalogue.jobs.get("default", raw.id)
    assert (waiting.state, waiting.leader, waiting.attempt, waiting.rows) == (
        JobState.QUEUED,
        leader.id,
        0,
        3,
    )
    with pytest.raises(StaleClaim):
        catalogue.jobs.report(parsing, "encoding", 0.1)
    running = claim(catalogue)
    catalogue.jobs.publish(running, version_of(running, key="k"), {})
    assert claim(catalogue).job.id == raw.id


def test_a_job_does_not_join_one_that_is_being_cancelled(catalogue: Catalogue) -> None:
    first = submit(catalogue, "a", key="k")
    claim(catalogue)
    catalogue.jobs.cancel("default", first.id)
    assert submit(catalogue, "b", key="k").leader == ""


def test_deleting_a_dataset_hands_its_running_fit_to_the_dataset_that_joined(catalogue: Catalogue) -> None:
    submit(catalogue, "a", key="k")
    second = submit(catalogue, "b", key="k")
    running = claim(catalogue)
    catalogue.datasets.delete("default", "a")
    catalogue.jobs.report(running, "encoding", 0.9)
    assert running.job.id == second.id


def test_a_dead_leader_s_requeue_keeps_those_that_joined_waiting(catalogue: Catalogue) -> None:
    first = submit(catalogue, "a", key="k")
    second = submit(catalogue, "b", key="k")
    running = claim(catalogue)
    assert catalogue.jobs.release_dead(first.id, running.token) == SMALL
    assert claim(catalogue).job.id == first.id
    assert catalogue.jobs.get("default", second.id).leader == first.id


# Whose turn it is


def test_a_tenant_that_cancels_what_it_submits_gains_no_turns(catalogue: Catalogue, client: Any) -> None:
    for number in range(3):
        withdrawn = submit(catalogue, f"a{number}", tenant="a")
        catalogue.jobs.cancel("a", withdrawn.id)
    assert client.keys("*turns*") == []
    mine = [submit(catalogue, f"a{number}", tenant="a") for number in range(2)]
    other = submit(catalogue, "b", tenant="b")
    assert [claim(catalogue).job.id for _ in range(3)] == [mine[0].id, other.id, mine[1].id]


def test_one_tenant_s_many_jobs_do_not_starve_another_s_one(catalogue: Catalogue) -> None:
    for i in range(20):
        submit(catalogue, f"d{i}", tenant="crowd")
    submit(catalogue, "one", tenant="single")
    assert [claim(catalogue).job.tenant for _ in range(3)] == ["crowd", "single", "crowd"]


def test_interactive_jobs_go_before_batch_ones_which_never_starve(catalogue: Catalogue) -> None:
    batch = submit(catalogue, "batch", priority="batch")
    for i in range(12):
        submit(catalogue, f"d{i}")
    assert catalogue.jobs.position(batch) == 13
    order = [claim(catalogue).job.dataset for _ in range(6)]
    assert order == ["d0", "d1", "d2", "d3", "batch", "d4"]


def test_an_interactive_job_brings_the_batch_job_that_it_joined_forward(catalogue: Catalogue) -> None:
    leader = submit(catalogue, "a", key="k", priority="batch")
    submit(catalogue, "other", priority="batch")
    submit(catalogue, "b", key="k")
    assert catalogue.jobs.position(catalogue.jobs.get("default", leader.id)) == 1
    assert claim(catalogue).job.id == leader.id


def test_a_large_fit_never_takes_the_last_worker_that_serves_small_ones(catalogue: Catalogue) -> None:
    live(catalogue, "w1", SMALL, LARGE)
    live(catalogue, "w2", SMALL, LARGE)
    submit(catalogue, "l1", queue=LARGE)
    submit(catalogue, "l2", queue=LARGE)
    submit(catalogue, "s1")
    first = claim(catalogue, LARGE, "w1")
    assert catalogue.jobs.claim(LARGE, "w2", 8, new_id()) is None
    assert claim(catalogue, SMALL, "w2").job.dataset == "s1"
    catalogue.jobs.fail(first, InvalidTable("no"), {})
    assert claim(catalogue, LARGE, "w1").job.dataset == "l2"


def test_a_worker_of_large_fits_only_takes_them_whatever_the_others_do(catalogue: Catalogue) -> None:
    live(catalogue, "small", SMALL)
    live(catalogue, "large", LARGE)
    submit(catalogue, "l1", queue=LARGE)
    assert claim(catalogue, LARGE, "large").job.dataset == "l1"


def test_a_single_fit_worker_takes_large_fits(catalogue: Catalogue) -> None:
    live(catalogue, "only", SMALL, LARGE)
    submit(catalogue, "l1", queue=LARGE)
    assert claim(catalogue, LARGE, "only").job.dataset == "l1"


# Deadlines and cancels


def test_a_waiting_job_past_its_deadline_fails_as_timeout(catalogue: Catalogue, client: Any) -> None:
    late = submit(catalogue, "late", deadline_s=0.001)
    submit(catalogue, "patient", deadline_s=600)
    assert late.deadline_ms is not None
    assert catalogue.jobs.end_overdue() == [late.id]
    ended = catalogue.jobs.get("default", late.id)
    assert ended.error is not None
    assert (ended.state, ended.error.code) == (JobState.FAILED, "timeout")
    assert claim(catalogue).job.dataset == "patient"
    assert client.zcard("tabrelay:deadlines") == 1


def test_a_child_that_ignores_a_cancel_or_a_deadline_is_named_after_the_grace(catalogue: Catalogue) -> None:
    job = submit(catalogue, "a")
    running = claim(catalogue)
    held = catalogue.jobs.held_by("w:life")
    assert held is not None
    assert catalogue.jobs.overstayed(held, 0) == ""
    catalogue.jobs.cancel("default", job.id)
    assert catalogue.jobs.overstayed(held, 60) == ""
    assert catalogue.jobs.overstayed(held, -1) == "cancel"
    assert catalogue.jobs.release_dead(job.id, running.token) == "cancelled"
    late = submit(catalogue, "b", deadline_s=0.001)
    running = claim(catalogue)
    held = catalogue.jobs.held_by("w:life")
    assert held is not None
    assert catalogue.jobs.overstayed(held, 0) == "deadline"
    assert catalogue.jobs.release_dead(late.id, running.token) == "failed"
    ended = catalogue.jobs.get("default", late.id)
    assert ended.error is not None
    assert ended.error.code == "timeout"


# Bounds


def test_a_tenant_s_queue_is_bounded_beside_the_whole_one(catalogue: Catalogue) -> None:
    for i in range(30):
        submit(catalogue, f"d{i}", tenant="crowd", key="k" if i % 2 else new_id())
    with pytest.raises(QueueFull) as refused:
        submit(catalogue, "more", tenant="crowd")
    assert (refused.value.facts["limit"], refused.value.facts["size"]) == (30, 30)
    assert submit(catalogue, "theirs", tenant="single").state is JobState.QUEUED


def test_retry_after_of_a_full_queue_follows_how_fast_it_drains() -> None:
    assert drain_s([], 0) == DRAIN_UNKNOWN_S
    assert drain_s([100_000, 98_000, 96_000, 94_000], 100_000) == 2
    assert drain_s([100_000, 98_000], 130_000) == 16
    assert drain_s([10, 9, 8], 11) == DRAIN_LEAST_S
    assert drain_s([1], 10**9) == DRAIN_MOST_S


def test_uploads_in_flight_are_bounded_and_one_alone_always_passes() -> None:
    room = UploadRoom(100)
    room.take(500)
    with pytest.raises(Overloaded):
        room.take(1)
    room.give_back(500)
    room.take(60)
    room.take(40)


def test_an_idempotency_key_is_a_conflict_while_its_first_request_is_worked_on(catalogue: Catalogue) -> None:
    with (
        catalogue.jobs.alone("default", "once"),
        pytest.raises(Conflict),
        catalogue.jobs.alone("default", "once"),
    ):
        pass
    with catalogue.jobs.alone("default", "once"), catalogue.jobs.alone("other", "once"):
        pass


def test_many_waiting_jobs_are_kept_small(client: Any) -> None:
    """A job's own keys; the whole is measured on a real server by tests/integration/test_queue_bounds.py."""
    catalogue = Catalogue(client, Settings())
    job = submit(catalogue, "a")
    assert (
        sum(len(name) + len(value) for name, value in client.hgetall(f"tabrelay:job:{job.id}").items()) < 700
    )
    assert not client.exists(f"tabrelay:events:{job.id}")
