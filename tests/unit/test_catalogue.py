"""The catalogue's scripts, each promise once, against a Redis double that runs the real Lua."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import fakeredis
import pytest

from common.catalogue import Catalogue, JobState, Version
from common.catalogue.jobs import Claim, Held, StaleClaim
from common.catalogue.recordfile import RecordFile
from common.catalogue.records import NewJob
from common.errors import (
    Cancelled,
    Conflict,
    DatasetNotFound,
    InternalError,
    InvalidRequest,
    JobNotFound,
    QueueFull,
)
from common.names import new_id
from common.settings import Settings

QUEUE = "fit.small"


@pytest.fixture
def settings() -> Settings:
    return Settings(max_queued_jobs=3, versions_kept=2, jobs_kept=5, lease_s=0.2)


@pytest.fixture
def client() -> Any:
    return fakeredis.FakeRedis(decode_responses=True)


@pytest.fixture
def catalogue(client: Any, settings: Settings) -> Catalogue:
    return Catalogue(client, settings)


def new(dataset: str = "d", *, tenant: str = "default", key: str = "k", table: str = "t") -> NewJob:
    return NewJob(
        id=new_id(), tenant=tenant, dataset=dataset, model="m", task="classification", target="y",
        options={"n_estimators": 8}, queue=QUEUE, key=key, table=table, rows=3, columns=2,
    )  # fmt: skip


def version_of(claim: Claim, context: str = "c", key: str = "k", table: str = "t") -> Version:
    job = claim.job
    return Version(
        version=job.version, context=context, key=key, table=table, job=job.id, model="m", task="classification",
        rows=3, columns=2, context_bytes=10, created_ms=1, schema={}, target={},
    )  # fmt: skip


@pytest.fixture
def claimed(catalogue: Catalogue) -> Callable[..., Claim]:
    def claim(dataset: str = "d", **fields: Any) -> Claim:
        catalogue.jobs.submit(new(dataset, **fields))
        found = catalogue.jobs.claim(QUEUE, "w", 1, new_id())
        assert found is not None
        return found

    return claim


def test_a_submitted_job_waits_with_its_version_and_place(catalogue: Catalogue) -> None:
    first, second = (catalogue.jobs.submit(new(key=k)).job for k in ("a", "b"))
    assert (first.state, first.version, second.version) == (JobState.QUEUED, 1, 2)
    assert (catalogue.jobs.position(first), catalogue.jobs.position(second)) == (1, 2)


def test_the_queue_is_bounded(catalogue: Catalogue) -> None:
    for i in range(3):
        catalogue.jobs.submit(new(key=str(i)))
    with pytest.raises(QueueFull) as refused:
        catalogue.jobs.submit(new(key="4"))
    assert refused.value.facts["limit"] == 3
    assert refused.value.retry_after_s


def test_content_that_is_already_current_is_known(
    catalogue: Catalogue, claimed: Callable[..., Claim]
) -> None:
    claim = claimed()
    catalogue.jobs.publish(claim, version_of(claim), {})
    again = catalogue.jobs.submit(new())
    assert (again.outcome, again.job.id) == ("known", claim.job.id)
    assert catalogue.jobs.submit(new("other")).outcome == "accepted"
    assert catalogue.jobs.known_context("default", "k") == "c"
    assert catalogue.jobs.known_context("stranger", "k") is None


def test_content_is_not_known_while_a_later_job_is_pending(
    catalogue: Catalogue, claimed: Callable[..., Claim]
) -> None:
    claim = claimed()
    catalogue.jobs.publish(claim, version_of(claim), {})
    catalogue.jobs.submit(new(key="later"))
    assert catalogue.jobs.submit(new()).outcome == "accepted"


def test_an_idempotency_key_answers_with_the_same_job_or_refuses_another_payload(
    catalogue: Catalogue,
) -> None:
    first = catalogue.jobs.submit(new(), idempotency_key="i", fingerprint="f")
    again = catalogue.jobs.submit(new(), idempotency_key="i", fingerprint="f")
    assert (again.outcome, again.job.id) == ("repeated", first.job.id)
    with pytest.raises(InvalidRequest):
        catalogue.jobs.submit(new(), idempotency_key="i", fingerprint="g")


def test_tenants_take_turns(client: Any) -> None:
    catalogue = Catalogue(client, Settings())
    for i in range(3):
        catalogue.jobs.submit(new(tenant="many", key=str(i)))
    catalogue.jobs.submit(new(tenant="one"))
    order = [claim.job.tenant for _ in range(4) if (claim := catalogue.jobs.claim(QUEUE, "w", 1, new_id()))]
    assert order == ["many", "one", "many", "many"]
    assert catalogue.jobs.claim(QUEUE, "w", 1, new_id()) is None


def test_a_stranger_sees_no_job_and_no_dataset(catalogue: Catalogue, claimed: Callable[..., Claim]) -> None:
    claim = claimed()
    catalogue.jobs.publish(claim, version_of(claim), {})
    with pytest.raises(JobNotFound):
        catalogue.jobs.get("stranger", claim.job.id)
    with pytest.raises(DatasetNotFound):
        catalogue.datasets.get("stranger", "d")
    assert catalogue.datasets.names("stranger", after=None, limit=9) == []


def test_a_stale_claim_can_neither_report_nor_publish_nor_fail(
    catalogue: Catalogue, claimed: Callable[..., Claim]
) -> None:
    old = claimed()
    assert catalogue.jobs.release_dead(old.job.id, old.token) == QUEUE
    fresh = catalogue.jobs.claim(QUEUE, "w", 2, new_id())
    assert fresh is not None
    assert fresh.job.attempt == 2
    for change in (
        lambda: catalogue.jobs.report(old, "encoding", 0.5),
        lambda: catalogue.jobs.publish(old, version_of(old), {}),
        lambda: catalogue.jobs.fail(old, InternalError(), {}),
        lambda: catalogue.jobs.adopt(old, "t", "k"),
    ):
        with pytest.raises(StaleClaim):
            change()
    assert not catalogue.jobs.renew(old.job.id, old.token)
    assert catalogue.jobs.renew(fresh.job.id, fresh.token)


def test_an_expired_lease_can_not_publish_and_goes_back_to_the_queue(
    catalogue: Catalogue, claimed: Callable[..., Claim], client: Any
) -> None:
    claim = claimed()
    client.zadd("tabrelay:running", {claim.job.id: 1})
    with pytest.raises(StaleClaim):
        catalogue.jobs.publish(claim, version_of(claim), {})
    assert catalogue.jobs.expired() == [(claim.job.id, claim.token)]
    assert catalogue.jobs.release_dead(claim.job.id) == QUEUE
    assert catalogue.jobs.get("default", claim.job.id).state is JobState.QUEUED


def test_a_renewed_lease_lasts_from_now_on(
    catalogue: Catalogue, client: Any, claimed: Callable[..., Claim], settings: Settings
) -> None:
    claim = claimed()
    client.zadd("tabrelay:running", {claim.job.id: 1})
    before = time.time() * 1000
    assert catalogue.jobs.renew(claim.job.id, claim.token)
    assert client.zscore("tabrelay:running", claim.job.id) >= before + settings.lease_s * 1000 - 50
    assert not catalogue.jobs.renew(claim.job.id, new_id())
    catalogue.jobs.publish(claim, version_of(claim), {})
    assert not catalogue.jobs.renew(claim.job.id, claim.token)


def test_a_stranger_can_neither_hand_back_nor_release_a_living_claim(
    catalogue: Catalogue, claimed: Callable[..., Claim]
) -> None:
    claim = claimed()
    assert catalogue.jobs.hand_back(claim.job.id, new_id()) == ""
    assert catalogue.jobs.release_dead(claim.job.id, new_id()) == ""
    assert catalogue.jobs.get("default", claim.job.id).state is JobState.RUNNING
    catalogue.jobs.publish(claim, version_of(claim), {})
    assert catalogue.jobs.hand_back(claim.job.id, claim.token) == ""
    assert catalogue.jobs.release_dead(claim.job.id, claim.token) == ""
    assert catalogue.jobs.get("default", claim.job.id).state is JobState.SUCCEEDED


def test_a_cancelled_job_whose_worker_dies_ends_cancelled_and_is_not_tried_again(
    catalogue: Catalogue, claimed: Callable[..., Claim]
) -> None:
    claim = claimed()
    catalogue.jobs.cancel("default", claim.job.id)
    catalogue.jobs.release_dead(claim.job.id, claim.token)
    assert catalogue.jobs.claim(QUEUE, "w", 1, new_id()) is None
    assert catalogue.jobs.get("default", claim.job.id).state is JobState.CANCELLED


def test_a_living_lease_is_not_taken_without_its_token(
    catalogue: Catalogue, client: Any, claimed: Callable[..., Claim]
) -> None:
    claim = claimed()
    client.zadd("tabrelay:running", {claim.job.id: 10**14})
    assert catalogue.jobs.release_dead(claim.job.id) == ""
    assert catalogue.jobs.get("default", claim.job.id).state is JobState.RUNNING


def test_after_the_last_attempt_a_job_fails_as_worker_lost_and_is_noted(
    catalogue: Catalogue, client: Any
) -> None:
    job = catalogue.jobs.submit(new()).job
    for attempt in (1, 2, 3):
        claim = catalogue.jobs.claim(QUEUE, "w", 1, new_id())
        assert claim is not None
        assert claim.job.attempt == attempt
        catalogue.jobs.report(claim, "encoding", 0.1)
        outcome = catalogue.jobs.release_dead(job.id, claim.token)
    assert outcome == "failed"
    ended = catalogue.jobs.get("default", job.id)
    assert ended.state is JobState.FAILED
    assert ended.error is not None
    assert (ended.error.code, ended.error.facts["phase"]) == ("worker_lost", "encoding")
    assert [dead.id for dead in catalogue.jobs.dead("default")] == [job.id]
    assert catalogue.datasets.is_referred("default", "table", "t")
    catalogue.jobs.undead("default", job.id)
    assert catalogue.jobs.dead("default") == []
    assert catalogue.datasets.is_dying("default", "table", "t")


def test_a_job_handed_back_stands_first_and_its_attempt_does_not_count(
    catalogue: Catalogue, claimed: Callable[..., Claim]
) -> None:
    claim = claimed()
    other = catalogue.jobs.submit(new(key="other")).job
    assert catalogue.jobs.hand_back(claim.job.id, claim.token) == QUEUE
    again = catalogue.jobs.claim(QUEUE, "w", 1, new_id())
    assert again is not None
    assert (again.job.id, again.job.attempt) == (claim.job.id, 1)
    assert catalogue.jobs.position(other) == 1


def test_a_restarted_worker_does_not_hold_what_its_life_before_claimed(catalogue: Catalogue) -> None:
    catalogue.jobs.submit(new())
    claim = catalogue.jobs.claim(QUEUE, "fit-0", 7, "token", "fit-0:first")
    assert claim is not None
    assert catalogue.jobs.held_by("fit-0:first") == Held(claim.job.id, "token", 7)
    assert catalogue.jobs.held_by("fit-0:second") is None
    catalogue.jobs.let_go("fit-0:first", "another")
    assert catalogue.jobs.held_by("fit-0:first") is not None
    catalogue.jobs.let_go("fit-0:first", "token")
    assert catalogue.jobs.held_by("fit-0:first") is None


def test_a_slower_older_fit_never_takes_the_pointer_back(
    catalogue: Catalogue, claimed: Callable[..., Claim]
) -> None:
    older, newer = claimed(key="a"), claimed(key="b")
    catalogue.jobs.publish(newer, version_of(newer, "new", "b"), {})
    catalogue.jobs.publish(older, version_of(older, "old", "a"), {})
    dataset = catalogue.datasets.get("default", "d")
    assert (dataset.current, sorted(dataset.versions)) == (2, [1, 2])


def test_versions_beyond_those_kept_end_and_their_files_may_go(
    catalogue: Catalogue, claimed: Callable[..., Claim]
) -> None:
    for name in "abc":
        claim = claimed(key=name, table=f"t{name}")
        catalogue.jobs.publish(claim, version_of(claim, f"c{name}", name, f"t{name}"), {})
    assert sorted(catalogue.datasets.get("default", "d").versions) == [2, 3]
    assert catalogue.datasets.dying("default") == [("context", "ca"), ("table", "ta")]
    assert catalogue.jobs.known_context("default", "a") is None
    catalogue.datasets.buried("default", "context", "ca")
    assert catalogue.datasets.dying("default") == [("table", "ta")]


def test_a_pinned_dataset_keeps_every_version(catalogue: Catalogue, claimed: Callable[..., Claim]) -> None:
    for name in "abc":
        claim = claimed(key=name)
        catalogue.jobs.publish(claim, version_of(claim, f"c{name}", name), {})
        catalogue.datasets.pin("default", "d", True)
    assert sorted(catalogue.datasets.get("default", "d").versions) == [1, 2, 3]


def test_the_contexts_of_pinned_datasets_are_told_until_the_pin_or_the_dataset_ends(
    catalogue: Catalogue, claimed: Callable[..., Claim]
) -> None:
    for name in "ab":
        claim = claimed(name, key=name)
        catalogue.jobs.publish(claim, version_of(claim, f"c{name}", name), {})
        assert catalogue.datasets.pinned_contexts() == ({("default", "ca")} if name == "b" else set())
        catalogue.datasets.pin("default", name, True)
    assert catalogue.datasets.pinned_contexts() == {("default", "ca"), ("default", "cb")}
    catalogue.datasets.pin("default", "a", False)
    assert catalogue.datasets.pinned_contexts() == {("default", "cb")}
    catalogue.datasets.delete("default", "b")
    assert catalogue.datasets.pinned_contexts() == set()


def test_a_file_that_two_datasets_share_goes_with_the_last_of_them(
    catalogue: Catalogue, claimed: Callable[..., Claim]
) -> None:
    for dataset in ("one", "two"):
        claim = claimed(dataset)
        catalogue.jobs.publish(claim, version_of(claim), {})
    catalogue.datasets.delete("default", "one")
    assert catalogue.datasets.dying("default") == []
    assert catalogue.datasets.is_referred("default", "context", "c")
    catalogue.datasets.delete("default", "two")
    assert catalogue.datasets.dying("default") == [("context", "c"), ("table", "t")]


def test_a_new_job_brings_a_dying_table_back(catalogue: Catalogue, claimed: Callable[..., Claim]) -> None:
    claim = claimed()
    catalogue.jobs.fail(claim, InternalError(), {})
    assert catalogue.datasets.is_dying("default", "table", "t")
    catalogue.jobs.submit(new())
    assert not catalogue.datasets.is_dying("default", "table", "t")


def test_cancel_ends_a_waiting_job_at_once_and_a_running_one_at_its_next_report(
    catalogue: Catalogue, claimed: Callable[..., Claim]
) -> None:
    running = claimed(key="a")
    waiting = catalogue.jobs.submit(new(key="b")).job
    assert catalogue.jobs.cancel("default", waiting.id).state is JobState.CANCELLED
    assert catalogue.jobs.cancel("default", running.job.id).cancel
    with pytest.raises(Cancelled):
        catalogue.jobs.report(running, "encoding", 0.5)
    with pytest.raises(Cancelled):
        catalogue.jobs.publish(running, version_of(running), {})
    catalogue.jobs.fail(running, Cancelled(), {})
    assert catalogue.jobs.get("default", running.job.id).state is JobState.CANCELLED
    assert catalogue.jobs.claim(QUEUE, "w", 1, new_id()) is None


def test_a_succeeded_job_can_not_be_cancelled(catalogue: Catalogue, claimed: Callable[..., Claim]) -> None:
    claim = claimed()
    catalogue.jobs.publish(claim, version_of(claim), {})
    with pytest.raises(Conflict):
        catalogue.jobs.cancel("default", claim.job.id)


def test_a_failed_refit_leaves_the_old_version(catalogue: Catalogue, claimed: Callable[..., Claim]) -> None:
    first = claimed(key="a")
    catalogue.jobs.publish(first, version_of(first, key="a"), {})
    second = claimed(key="b", table="t2")
    catalogue.jobs.fail(second, InternalError("broke"), {"loading": 1.0})
    dataset = catalogue.datasets.get("default", "d")
    assert (dataset.current, dataset.pending) == (1, 0)
    ended = catalogue.jobs.get("default", second.job.id)
    assert ended.error is not None
    assert (ended.error.detail, ended.timings) == ("broke", {"loading": 1.0})


def test_delete_cancels_what_would_publish_into_it(
    catalogue: Catalogue, claimed: Callable[..., Claim]
) -> None:
    running = claimed(key="a")
    waiting = catalogue.jobs.submit(new(key="b")).job
    catalogue.datasets.delete("default", "d")
    assert catalogue.jobs.get("default", waiting.id).state is JobState.CANCELLED
    with pytest.raises(Cancelled):
        catalogue.jobs.publish(running, version_of(running), {})
    with pytest.raises(DatasetNotFound):
        catalogue.datasets.get("default", "d")


def test_changes_are_told_by_mark(catalogue: Catalogue, claimed: Callable[..., Claim]) -> None:
    mark, _ = catalogue.datasets.changed_since(0)
    claimed("seen")
    later, changed = catalogue.datasets.changed_since(mark)
    assert later > mark
    assert changed == [("default", "seen")]
    assert catalogue.datasets.changed_since(later) == (later, [])


def test_the_list_of_jobs_pages_and_forgets_the_oldest_ended_ones(client: Any) -> None:
    catalogue = Catalogue(client, Settings(jobs_kept=5))
    for i in range(8):
        catalogue.jobs.submit(new(key=str(i)))
        claim = catalogue.jobs.claim(QUEUE, "w", 1, new_id())
        assert claim is not None
        catalogue.jobs.fail(claim, InternalError(), {})
    page, cursor = catalogue.jobs.page("default", state=None, dataset=None, limit=3, cursor=None)
    rest, end = catalogue.jobs.page("default", state=None, dataset=None, limit=50, cursor=cursor)
    assert (len(page), len(rest), end) == (3, 2, None)
    assert catalogue.jobs.page("default", state="queued", dataset=None, limit=3, cursor=None) == ([], None)


def test_the_record_file_survives_a_torn_line(tmp_path: Any) -> None:
    records = RecordFile(tmp_path)
    records.delete("default", "a")
    with records.path.open("ab") as file:
        file.write(b'{"op": "torn')
    records.pin("default", "b", True)
    lines = [line for line in records.path.read_bytes().splitlines() if b"torn" not in line]
    assert len(lines) == 2
    assert oct(records.path.stat().st_mode & 0o777) == "0o600"
