"""Fit jobs: submit, claim, report, end. Every change is one script; a stale claim changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import orjson
from redis.exceptions import LockError

from common import logs
from common.catalogue.connection import Client, Scripts, pairs
from common.catalogue.drain import drain_s
from common.catalogue.epoch import Epoch
from common.catalogue.records import Job, JobState, NewJob, Version
from common.errors import (
    Cancelled,
    CatalogueUnavailable,
    Conflict,
    FitTimeout,
    InvalidRequest,
    JobNotFound,
    QueueFull,
    TabrelayError,
    WorkerLost,
)
from common.settings import Settings

log = logs.get("catalogue")

#: The queues, small before large.
QUEUES = ("fit.small", "fit.large")
#: The queue whose last free worker no large fit may take.
SMALL = QUEUES[0]
#: How long a submission with an idempotency key may keep others with the same key out.
IN_FLIGHT_S = 180


class StaleClaim(Exception):
    """The job was given to another attempt, or ended; whatever this attempt does no longer counts."""


class Joined(StaleClaim):
    """Another job fits the same content; this one waits for it now, without a worker."""


class Moved(Exception):
    """The job was cancelled, and the claim went over to one that had joined it."""


@dataclass
class Claim:
    """A worker's time-limited hold of a running job; the token fences off earlier attempts.

    When the job is cancelled but others had joined it, the claim goes over to the first of those: `job` is then that one.
    """

    job: Job
    token: str


@dataclass(frozen=True)
class Held:
    """What the parent of a fit worker needs to know of the claim that its child works on."""

    job: str
    token: str
    pid: int


@dataclass(frozen=True)
class Submitted:
    """What became of a submission.

    `accepted`, `joined` (waits for a job that fits the same content), `known` (already current) or `repeated` (same key).
    """

    outcome: str
    job: Job


class Jobs:
    """The job side of the catalogue."""

    def __init__(self, client: Client, scripts: Scripts, settings: Settings, epoch: Epoch) -> None:
        self._client = client
        self._epoch = epoch
        self._scripts = scripts
        self._settings = settings
        self._prefix = settings.redis_prefix
        self._lease_ms = int(settings.lease_s * 1000)

    def submit(
        self, new: NewJob, *, idempotency_key: str = "", fingerprint: str = "", again: bool = False
    ) -> Submitted:
        """Accept a fit, with `again` also of what is current already.

        Raises QueueFull, or InvalidRequest for an idempotency key with another payload.
        """
        outcome, *detail = self._scripts.run(
            "submit",
            *(new.id, new.tenant, new.dataset, new.queue, new.key, idempotency_key, fingerprint),
            *(self._settings.max_queued_jobs, self._settings.max_queued_jobs_per_tenant),
            *(self._settings.jobs_kept, int(again), new.deadline_s, *new.fields()),
        )
        if outcome == "full":
            waiting, limit = int(detail[0]), int(detail[1])
            raise QueueFull(
                f"{waiting} fits are waiting, the most is {limit}",
                retry_after_s=self.retry_after_s(),
                limit=limit,
                size=waiting,
            )
        if outcome == "mismatch":
            raise InvalidRequest("this Idempotency-Key was used for another request; use a new one")
        return Submitted(outcome, self.get(new.tenant, detail[0]))

    @contextmanager
    def alone(self, tenant: str, idempotency_key: str) -> Iterator[None]:
        """Keep other submissions with this key out meanwhile; raises Conflict when one is under way."""
        if not idempotency_key:
            yield
            return
        lock = self._client.lock(
            f"{self._prefix}submitting:{tenant}:{idempotency_key}", timeout=IN_FLIGHT_S, blocking=False
        )
        if not lock.acquire():
            raise Conflict("a request with this Idempotency-Key is being worked on", retry_after_s=1)
        try:
            yield
        finally:
            try:
                lock.release()
            except (
                LockError,
                CatalogueUnavailable,
            ) as error:  # it ends by itself, and what was accepted stays so
                log.warning("an idempotency key was not given back", error=str(error))

    def retry_after_s(self) -> float:
        """Seconds until a place in the queue is likely to be free, from how fast running jobs ended lately."""
        ends = [int(at) for at in self._client.lrange(f"{self._prefix}drained", 0, -1)]
        return drain_s(ends, self._now_ms())

    def get(self, tenant: str, job_id: str) -> Job:
        """The tenant's job; raises JobNotFound, also for a job of somebody else, or CatalogueEmptied."""
        stored = self._client.hgetall(f"{self._prefix}job:{job_id}")
        if not stored:
            self._epoch.explain_absence()
        if not stored or stored["tenant"] != tenant:
            raise JobNotFound(f"there is no job {job_id!r}")
        return Job.decode(stored)

    def find(self, job_id: str) -> Job | None:
        """A job of whatever tenant, for the service's own use; None when there is none."""
        stored = self._client.hgetall(f"{self._prefix}job:{job_id}")
        return Job.decode(stored) if stored else None

    def page(
        self, tenant: str, *, state: str | None, dataset: str | None, limit: int, cursor: str | None
    ) -> tuple[list[Job], str | None]:
        """The tenant's jobs, newest first, and a cursor when there are more."""
        index = f"{self._prefix}jobs:{tenant}"
        start = 0
        if cursor:
            rank = self._client.zrevrank(index, cursor)
            if rank is None:
                raise InvalidRequest(
                    "the cursor names a job that is no longer kept; list again from the start"
                )
            start = int(rank) + 1
        found: list[Job] = []
        while len(found) < limit:
            ids = self._client.zrevrange(index, start, start + 199)
            for job_id in ids:
                start += 1
                stored = self._client.hgetall(f"{self._prefix}job:{job_id}")
                if (
                    not stored
                    or (state and stored["state"] != state)
                    or (dataset and stored["dataset"] != dataset)
                ):
                    continue
                found.append(Job.decode(stored))
                if len(found) == limit:
                    more = self._client.zcard(index) > start
                    return found, found[-1].id if more else None
            if len(ids) < 200:
                break
        return found, None

    def position(self, job: Job) -> int | None:
        """Place of a waiting job in its queue, from 1; None when it does not wait."""
        if job.state is not JobState.QUEUED:
            return None
        rank = self._client.zrank(f"{self._prefix}queued:{job.queue}", job.id)
        return None if rank is None else int(rank) + 1

    def waiting(self, queue: str) -> int:
        """How many jobs wait in a queue."""
        return int(self._client.zcard(f"{self._prefix}queued:{queue}"))

    def cancel(self, tenant: str, job_id: str) -> Job:
        """Cancel; raises JobNotFound, or Conflict for a job that has ended otherwise."""
        job = self.get(tenant, job_id)
        self._scripts.run("cancel", job.id)
        if job.state in (JobState.SUCCEEDED, JobState.FAILED):
            raise Conflict(f"the job has already {job.state}")
        return self.get(tenant, job_id)

    def pending(self, tenant: str, dataset: str) -> list[Job]:
        """The jobs that wait or run for a dataset, oldest version first."""
        ids = self._client.smembers(f"{self._prefix}pending:{tenant}:{dataset}")
        stored = [self._client.hgetall(f"{self._prefix}job:{job_id}") for job_id in ids]
        return sorted((Job.decode(entry) for entry in stored if entry), key=lambda job: job.version)

    def dead(self, tenant: str) -> list[Job]:
        """The tenant's jobs that ended because their worker died each time, newest first."""
        found = []
        for job_id in self._client.lrange(f"{self._prefix}dead:{tenant}", 0, -1):
            stored = self._client.hgetall(f"{self._prefix}job:{job_id}")
            if stored:
                found.append(Job.decode(stored))
        return found

    def undead(self, tenant: str, job_id: str) -> None:
        """Take a job from the dead-letter list; its table is no longer kept for it."""
        self._scripts.run("undead", tenant, job_id)

    def claim(self, queue: str, worker: str, pid: int, token: str, holder: str = "") -> Claim | None:
        """Give the next job of a queue to a worker, with a lease; None when nobody waits.

        `holder` is one life of that worker: after a restart the same name, and even the same process id, may be there
        again, and must not keep the lease of a job that died with the life before.
        """
        flat = self._scripts.run("claim", queue, worker, holder or worker, pid, token, self._lease_ms, SMALL)
        return Claim(Job.decode(pairs(flat)), token) if flat else None

    def renew(self, job_id: str, token: str) -> bool:
        """Renew the lease; False when the claim is no longer ours."""
        return bool(self._scripts.run("renew", job_id, token, self._lease_ms))

    def report(self, claim: Claim, phase: str, fraction: float, **fields: str | int | float) -> None:
        """Report a phase; raises Cancelled, FitTimeout, or StaleClaim when the claim is no longer ours."""
        flat = [part for pair in fields.items() for part in pair]
        self._run(claim, "report", phase, round(fraction, 4), *flat)

    def adopt(self, claim: Claim, table: str, key: str, **fields: str | int | float) -> None:
        """Note the parsed table of a job that came with a raw upload.

        Raises Joined when another job fits the same content, StaleClaim, Cancelled or FitTimeout.
        """
        flat = [part for pair in fields.items() for part in pair]
        self._run(claim, "adopt", table, key, *flat)

    def publish(self, claim: Claim, version: Version, timings_ms: Mapping[str, float]) -> None:
        """Publish and end as succeeded; raises StaleClaim, Cancelled or FitTimeout, and then nothing has changed.

        Raises Moved when the work belongs to another job now: make that one's version and publish it.
        """
        outcome = self._scripts.run(
            "publish",
            *(claim.job.id, claim.token, version.context, version.encode()),
            *(self._settings.versions_kept, orjson.dumps(dict(timings_ms)).decode()),
        )
        if self._follow(claim, outcome):
            raise Moved
        self._check(claim, outcome)

    def fail(self, claim: Claim, error: TabrelayError, timings_ms: Mapping[str, float]) -> None:
        """End as failed, or as cancelled when that is what the error says."""
        state = JobState.CANCELLED if isinstance(error, Cancelled) else JobState.FAILED
        encoded = "" if state is JobState.CANCELLED else orjson.dumps(error.encode()).decode()
        timings = orjson.dumps(dict(timings_ms)).decode()
        self._run(claim, "finish", state, encoded, timings, int(isinstance(error, FitTimeout)))

    def _run(self, claim: Claim, script: str, *arguments: Any) -> None:
        """Run a script of a claim; once more for the job that the claim went over to."""
        outcome = self._scripts.run(script, claim.job.id, claim.token, *arguments)
        if self._follow(claim, outcome):
            outcome = self._scripts.run(script, claim.job.id, claim.token, *arguments)
        self._check(claim, outcome)

    def _follow(self, claim: Claim, outcome: Any) -> bool:
        word, _, heir = str(outcome).partition(":")
        if word != "moved":
            return False
        claim.job = self.get(claim.job.tenant, heir)
        return True

    def hand_back(self, job_id: str, token: str) -> str:
        """Put a running job back at the head of its queue; the attempt does not count."""
        return self._release(job_id, token, 0, 1)

    def release_dead(self, job_id: str, token: str = "") -> str:
        """Requeue a job whose worker died, or end it as worker_lost; without a token only past its lease."""
        most = self._settings.max_attempts
        phase = self._client.hget(f"{self._prefix}job:{job_id}", "phase")
        lost = WorkerLost(
            f"the fit's worker died {most} times, last while {phase or 'starting'}", phase=phase
        )
        return self._release(job_id, token, most, 0, lost)

    def _release(
        self, job_id: str, token: str, most: int, hand_back: int, lost: WorkerLost | None = None
    ) -> str:
        late = FitTimeout("the job's deadline passed (deadline_s)")
        errors = ["" if error is None else orjson.dumps(error.encode()).decode() for error in (lost, late)]
        kept = self._settings.dead_letters_kept
        return str(self._scripts.run("release", job_id, token, most, hand_back, *errors, kept))

    def end_overdue(self) -> list[str]:
        """End the waiting jobs whose deadline has passed; their ids."""
        late = FitTimeout("the job's deadline passed while it waited (deadline_s)")
        error = orjson.dumps(late.encode()).decode()
        found = self._client.zrangebyscore(
            f"{self._prefix}deadlines", "-inf", f"({self._now_ms()}", start=0, num=100
        )
        return [job_id for job_id in found if self._scripts.run("overdue", job_id, error)]

    def overstayed(self, held: Held, grace_s: float) -> str:
        """Why the child of a claim must be ended by force: `cancel`, `deadline`, or "" when it need not."""
        cancelled, deadline = self._client.hmget(f"{self._prefix}job:{held.job}", "cancel_ms", "deadline_ms")
        if not cancelled and not deadline:
            return ""
        ends = {"cancel": cancelled, "deadline": deadline}
        now_ms = self._now_ms()
        late = [why for why, at in ends.items() if at and now_ms > int(at) + grace_s * 1000]
        return late[0] if late else ""

    def expired(self) -> list[tuple[str, str]]:
        """Running jobs whose lease has run out, each with the token of the claim that held it."""
        ids = self._client.zrangebyscore(
            f"{self._prefix}running", "-inf", f"({self._now_ms()}", start=0, num=100
        )
        return [(job_id, self._client.hget(f"{self._prefix}job:{job_id}", "token") or "") for job_id in ids]

    def _now_ms(self) -> int:
        seconds, micros = self._client.time()
        return int(seconds) * 1000 + int(micros) // 1000

    def let_go(self, holder: str, token: str) -> None:
        """The holder's child no longer works on this claim: its lease is not renewed any more."""
        held = self.held_by(holder)
        if held is not None and held.token == token:
            self._client.delete(f"{self._prefix}holds:{holder}")

    def held_by(self, holder: str) -> Held | None:
        """The claim that a holder's child works on."""
        held = self._client.get(f"{self._prefix}holds:{holder}")
        if not held:
            return None
        job_id, token, pid = str(held).split(" ")
        return Held(job_id, token, int(pid))

    def known_context(self, tenant: str, key: str) -> str | None:
        """Digest of the tenant's context that was made from exactly this key."""
        found: Any = self._client.hget(f"{self._prefix}keys:{tenant}", key)
        return found or None

    @staticmethod
    def _check(claim: Claim, outcome: Any) -> None:
        if outcome == "cancel":
            raise Cancelled
        if outcome == "overdue":
            raise FitTimeout("the job's deadline passed (deadline_s)")
        if outcome == "joined":
            raise Joined(f"job {claim.job.id} waits for another one that fits the same content")
        if outcome != "ok":
            raise StaleClaim(f"job {claim.job.id}: {outcome}")


__all__ = ["QUEUES", "Claim", "Held", "Jobs", "Joined", "Moved", "StaleClaim", "Submitted"]
