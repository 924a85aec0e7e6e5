"""Remaining time and progress: from measurement, from the job's own pace, never rising while it runs evenly."""

from __future__ import annotations

import itertools
from typing import Any

import fakeredis
import pytest

from common.catalogue import Catalogue, Job, JobState, Phase
from common.catalogue.records import FitWorker, NewJob
from common.catalogue.speed import RATIO_BOUNDS, Measured
from common.names import new_id
from common.service.forecast import Forecaster, progress, queued_s, running_s
from common.settings import Settings


def job(state: JobState = JobState.RUNNING, **fields: Any) -> Job:
    given = {"estimate_s": 20.0, "started_ms": 1_000_000, "phase_ms": 1_000_000, "attempt": 1, **fields}
    return Job(
        id="j", tenant="default", dataset="d", version=1, model="m", task="", target="y", options={},
        queue="fit.small", state=state, **given,
    )  # fmt: skip


def test_progress_rises_evenly_through_all_phases() -> None:
    seen = [
        progress(job(phase=str(phase), fraction=fraction)) for phase in Phase for fraction in (0.0, 0.5, 1.0)
    ]
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0.0, 1.0)
    assert progress(job(JobState.QUEUED)) == 0.0
    assert progress(job(JobState.SUCCEEDED, fraction=1.0)) == 1.0
    assert progress(job(phase="polishing", fraction=0.5)) == 0.0


def test_before_the_encoding_tells_its_pace_the_measured_ratio_speaks() -> None:
    loading = job(phase=Phase.LOADING)
    assert running_s(loading, 1_004_000, None, ratio=2.0) == pytest.approx(36.0)
    assert running_s(loading, 1_004_000, None, ratio=1.0) == pytest.approx(16.0)
    early = job(phase=Phase.ENCODING, fraction=0.1, phase_ms=1_001_000)
    assert running_s(early, 1_004_000, None, ratio=2.0) == pytest.approx(36.0)


def test_an_estimate_that_was_far_too_low_gives_way_to_the_pace() -> None:
    half = job(phase=Phase.ENCODING, fraction=0.5, phase_ms=1_002_000, estimate_s=5.0)
    assert running_s(half, 1_042_000, None, ratio=1.0) == pytest.approx(40.0 + 82 * 0.05)
    tenth = job(phase=Phase.ENCODING, fraction=0.05, phase_ms=1_002_000, estimate_s=3.0)
    assert running_s(tenth, 1_004_000, None, ratio=1.0) == pytest.approx(38.0 + 42 * 0.05)
    fifth = job(phase=Phase.ENCODING, fraction=0.2, phase_ms=1_002_000, estimate_s=30.0)
    told = running_s(fifth, 1_018_000, None, ratio=1.0)
    assert told is not None
    assert 12 < told < 68


def test_remaining_time_shrinks_all_the_way_when_the_estimate_is_right() -> None:
    """40 s in 32 blocks: also between two reports, when nothing but time has changed."""
    seen: list[float] = []
    begins = {Phase.LOADING: 0, Phase.ENCODING: 1_000, Phase.WRITING: 39_000, Phase.PUBLISHING: 39_800}
    for ms in range(0, 40_000, 100):
        phase = max((p for p, at in begins.items() if at <= ms), key=lambda p: begins[p])
        blocks = (ms - 1_000) * 32 // 38_000 if phase is Phase.ENCODING else 0
        told = 1_001_000 + blocks * 38_000 // 32
        running = job(phase=phase, fraction=blocks / 32, phase_ms=1_000_000 + begins[phase], estimate_s=20.0)
        left = running_s(running, 1_000_000 + ms, told, ratio=2.0)
        assert left is not None
        seen.append(left)
        assert left == pytest.approx((40_000 - ms) / 1000, abs=1.5)
    assert max(later - earlier for earlier, later in itertools.pairwise(seen)) < 0.5


def test_a_job_without_estimate_says_nothing_until_its_pace_is_known() -> None:
    raw = job(phase=Phase.LOADING, estimate_s=0.0)
    assert running_s(raw, 1_004_000, None, ratio=1.0) is None
    assert running_s(job(started_ms=None), 1_004_000, None, ratio=1.0) is None
    encoding = job(phase=Phase.ENCODING, fraction=0.5, estimate_s=0.0)
    assert running_s(encoding, 1_010_000, None, ratio=1.0) == pytest.approx(11.0)


def test_a_waiting_job_counts_the_mean_of_each_before_it_and_the_workers() -> None:
    waiting = job(JobState.QUEUED)
    assert queued_s(waiting, 3, 4.0, 1, ratio=0.5) == pytest.approx(3 * 4 + 10)
    assert queued_s(waiting, 3, 4.0, 2, ratio=0.5) == pytest.approx(3 * 4 / 2 + 10)
    assert queued_s(waiting, 2, None, 0, ratio=1.0) == pytest.approx(2 * 20 + 20)
    assert queued_s(job(JobState.QUEUED, estimate_s=0.0), 2, 4.0, 1, ratio=1.0) == pytest.approx(12)
    assert queued_s(job(JobState.QUEUED, estimate_s=0.0), 2, None, 1, ratio=1.0) is None


@pytest.fixture
def catalogue() -> Catalogue:
    return Catalogue(fakeredis.FakeRedis(decode_responses=True), Settings())


def test_speed_is_learned_by_model_and_device_and_large_fits_say_more(catalogue: Catalogue) -> None:
    assert catalogue.speed.read() == Measured()
    assert Measured().ratio("m", "cpu") == 1.0
    catalogue.speed.fitted("m", "cpu", "fit.small", estimated_s=10, real_s=20)
    catalogue.speed.fitted("m", "cuda:0", "fit.small", estimated_s=10, real_s=1)
    measured = catalogue.speed.read()
    assert measured.ratio("m", "cpu") == 2.0
    assert measured.ratio("m", "cuda:0") == 0.1
    assert 0.1 < measured.ratio("m", "cuda:7") < 2.0
    assert measured.ratio("other", "cpu") == 1.0
    assert measured.mean_s("fit.small") == pytest.approx(20 + 0.2 * (1 - 20))
    assert measured.mean_s("fit.large") is None
    before = measured.ratio("m", "cpu")
    catalogue.speed.fitted("m", "cpu", "fit.small", estimated_s=0.3, real_s=3)
    small = catalogue.speed.read().ratio("m", "cpu") - before
    catalogue.speed.fitted("m", "cpu", "fit.small", estimated_s=30, real_s=300)
    assert catalogue.speed.read().ratio("m", "cpu") - before > 5 * small > 0
    for _ in range(50):
        catalogue.speed.fitted("m", "cpu", "fit.small", estimated_s=30, real_s=1e9)
    assert catalogue.speed.read().ratio("m", "cpu") <= RATIO_BOUNDS[1]


def test_a_republished_context_moves_the_queue_s_mean_alone(catalogue: Catalogue) -> None:
    catalogue.speed.republished("fit.small", real_s=0.2)
    measured = catalogue.speed.read()
    assert (measured.mean_s("fit.small"), measured.ratio("m")) == (0.2, 1.0)


def test_outlooks_use_what_the_job_s_own_worker_measured(catalogue: Catalogue) -> None:
    for name, device in (("f0", "cpu"), ("f1", "cuda:0")):
        catalogue.workers.register_fit(FitWorker(name, "h", 1, device, ("fit.small",), 0))
    catalogue.speed.fitted("m", "cpu", "fit.small", estimated_s=10, real_s=20)
    catalogue.speed.fitted("m", "cuda:0", "fit.small", estimated_s=10, real_s=1)
    for key in "ab":
        catalogue.jobs.submit(
            NewJob(
                id=new_id(),
                tenant="default",
                dataset="d",
                model="m",
                task="classification",
                target="y",
                options={},
                queue="fit.small",
                key=key,
                estimate_s=10.0,
            )
        )
    claim = catalogue.jobs.claim("fit.small", "f1", 1, "t")
    assert claim is not None
    outlook = Forecaster(catalogue)
    running = outlook.of(claim.job, claim.job.started_ms or 0)
    assert (running.position, running.eta_s) == (None, 1.0)
    (waiting,), _ = catalogue.jobs.page("default", state="queued", dataset=None, limit=5, cursor=None)
    told = outlook.of(waiting, claim.job.started_ms or 0)
    assert told.position == 1
    assert told.eta_s is not None
    assert told.eta_s > 10 * 0.1
