"""Jobs whose worker is gone are found by whoever looks, once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import fakeredis
import pytest

from common.catalogue import Catalogue, JobState
from common.catalogue.records import FitWorker
from common.contexts.store import ContextStore
from common.lost_jobs import LostJobs
from common.names import new_id
from common.settings import Settings
from tests.unit.test_catalogue import QUEUE, new


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, lease_s=0.02, janitor_every_s=0.01, host_tier_bytes=0)


@pytest.fixture
def catalogue(settings: Settings) -> Catalogue:
    return Catalogue(fakeredis.FakeRedis(decode_responses=True), settings)


def test_an_expired_lease_frees_its_job_and_what_the_attempt_was_writing(
    catalogue: Catalogue, settings: Settings
) -> None:
    job = catalogue.jobs.submit(new()).job
    claim = catalogue.jobs.claim(QUEUE, "w", 1, new_id())
    assert claim is not None
    left = ContextStore(settings).temporary("default", claim.token)
    left.write_bytes(b"half")
    other = ContextStore(settings).temporary("default", new_id())
    other.write_bytes(b"somebody else's")
    time.sleep(0.05)
    assert LostJobs(catalogue, settings, "w").look() == [QUEUE]
    assert catalogue.jobs.get("default", job.id).state is JobState.QUEUED
    assert (left.exists(), other.exists()) == (False, True)


def test_a_lost_wake_up_is_told_again_and_one_on_its_way_is_not(
    catalogue: Catalogue, settings: Settings
) -> None:
    catalogue.jobs.submit(new())
    looking = LostJobs(catalogue, settings, "w")
    assert looking.look() == [QUEUE]
    catalogue.client.lpush(f"{settings.redis_prefix}celery:{QUEUE}", "a wake-up")
    time.sleep(0.02)
    assert looking.look() == []


def test_one_process_looks_at_a_time(catalogue: Catalogue, settings: Settings) -> None:
    catalogue.jobs.submit(new())
    slow = settings.model_copy(update={"janitor_every_s": 30.0})
    assert LostJobs(catalogue, slow, "a").look() == [QUEUE]
    assert LostJobs(catalogue, slow, "b").look() == []


def test_without_any_fit_worker_a_predict_worker_ends_what_is_overdue(
    catalogue: Catalogue, settings: Settings
) -> None:
    late: Any = new()
    object.__setattr__(late, "deadline_s", 0.001)
    job = catalogue.jobs.submit(late).job
    substitute = LostJobs(catalogue, settings, "predict", as_substitute=True)
    catalogue.workers.register_fit(FitWorker("fit-0", "host", 1, "cpu", (QUEUE,), 0))
    time.sleep(0.02)
    substitute.look()
    assert catalogue.jobs.get("default", job.id).state is JobState.QUEUED
    catalogue.workers.leave("fit", "fit-0")
    time.sleep(0.02)
    substitute.look()
    ended = catalogue.jobs.get("default", job.id)
    assert ended.error is not None
    assert (ended.state, ended.error.code) == (JobState.FAILED, "timeout")
