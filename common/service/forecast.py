"""When a job will have ended, and how far it is: from what this host measured and what the job has done so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.catalogue import Catalogue, Job, JobState, Phase
from common.catalogue.records import FitWorker
from common.catalogue.speed import Measured

#: Where each phase begins and ends in a job's progress; of 3,000 x 30 with 32 members encoding took 94 %.
SPANS: Mapping[str, tuple[float, float]] = {
    Phase.LOADING: (0.0, 0.02),
    Phase.PREPROCESSING: (0.02, 0.05),
    Phase.ENCODING: (0.05, 0.92),
    Phase.WRITING: (0.92, 0.96),
    Phase.VERIFYING: (0.96, 0.98),
    Phase.PUBLISHING: (0.98, 1.0),
}
#: Seconds after a phase's begin that the rest of the job takes, as a share of what came before it.
TAILS: Mapping[str, float] = {Phase.WRITING: 0.05, Phase.VERIFYING: 0.02, Phase.PUBLISHING: 0.01}
#: Fractions of the encoding between which its own pace replaces the estimate.
TRUST_FROM, TRUST_FULLY = 0.1, 0.4
#: The least that a running job is said to take still.
LEAST_S = 0.1


@dataclass(frozen=True)
class Outlook:
    """What is expected of a job."""

    position: int | None = None  # place in its queue, from 1
    eta_s: float | None = None  # None when nothing is known or to come


def progress(job: Job) -> float:
    """How much of a job is done, over all phases; it never falls within an attempt."""
    if job.state is JobState.SUCCEEDED:
        return 1.0
    begins, ends = SPANS.get(job.phase, (0.0, 0.0))
    return begins + min(max(job.fraction, 0.0), 1.0) * (ends - begins)


def running_s(job: Job, now_ms: int, told_ms: int | None, ratio: float) -> float | None:
    """Seconds that a running job takes still; `told_ms` is when it reported its fraction, now if that isn't known.

    Before a tenth is encoded the estimate times `ratio` speaks, from four tenths the encoding's own pace; sooner the
    more of the estimated time has passed, and alone when all of it has.
    """
    if not job.started_ms:
        return None
    elapsed_s = max(now_ms - job.started_ms, 0) / 1000
    tail = TAILS.get(job.phase)
    if tail is not None and job.phase_ms:
        before_s = (job.phase_ms - job.started_ms) / 1000
        return max(before_s * tail - (now_ms - job.phase_ms) / 1000, LEAST_S)
    expected_s = job.estimate_s * ratio
    by_estimate = max(expected_s - elapsed_s, LEAST_S) if expected_s > 0 else None
    passed = elapsed_s / expected_s if expected_s > 0 else 1.0
    trusted_from = TRUST_FROM if passed < 1 else 0.0
    if job.phase != Phase.ENCODING or not job.phase_ms or job.fraction <= trusted_from:
        return by_estimate
    told_ms = min(max(told_ms or now_ms, job.phase_ms), now_ms)
    encoded_s = (told_ms - job.phase_ms) / 1000
    whole_s = encoded_s / job.fraction
    left_s = (
        whole_s * (1 - job.fraction) + (whole_s + (job.phase_ms - job.started_ms) / 1000) * TAILS["writing"]
    )
    by_pace = max(left_s - (now_ms - told_ms) / 1000, LEAST_S)
    if by_estimate is None:
        return by_pace
    trust = min(max((job.fraction - TRUST_FROM) / (TRUST_FULLY - TRUST_FROM), passed), 1.0)
    return trust * by_pace + (1 - trust) * by_estimate


def queued_s(
    job: Job, position: int | None, mean_s: float | None, servers: int, ratio: float
) -> float | None:
    """Seconds until a waiting job has ended: a mean job for each place before it, then its own work."""
    own_s = job.estimate_s * ratio or mean_s
    if not own_s:
        return None
    return (position or 1) * (mean_s or own_s) / max(servers, 1) + own_s


class Forecaster:
    """Outlooks of the jobs of one answer; what they share is read once."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._measured: Measured | None = None
        self._workers: list[FitWorker] | None = None

    def of(self, job: Job, now_ms: int, told_ms: int | None = None) -> Outlook:
        """The outlook of one job; `told_ms` is when it reported its fraction, looked up when not given."""
        if job.state.ended:
            return Outlook()
        measured = self._read()
        if job.state is JobState.RUNNING:
            ratio = measured.ratio(job.model, self._device(job.worker))
            if told_ms is None and job.phase == Phase.ENCODING and job.fraction > 0:
                told = self._catalogue.events.last(job.id)
                told_ms = told.at_ms if told is not None else None
            return Outlook(eta_s=_rounded(running_s(job, now_ms, told_ms, ratio)))
        position = self._catalogue.jobs.position(job)
        servers = sum(job.queue in worker.queues for worker in self._fit_workers())
        mean_s, ratio = measured.mean_s(job.queue), measured.ratio(job.model)
        return Outlook(position, _rounded(queued_s(job, position, mean_s, servers, ratio)))

    def _read(self) -> Measured:
        if self._measured is None:
            self._measured = self._catalogue.speed.read()
        return self._measured

    def _fit_workers(self) -> list[FitWorker]:
        if self._workers is None:
            self._workers = self._catalogue.workers.fit()
        return self._workers

    def _device(self, worker: str) -> str:
        return next((known.device for known in self._fit_workers() if known.name == worker), "")


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)
