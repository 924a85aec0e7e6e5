"""Fit jobs: submit, claim, report, end. Every change is one script; a stale claim changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from common.catalogue.connection import Client, Scripts, pairs
from common.catalogue.records import Job, JobState, NewJob, Version
from common.errors import (
    Cancelled,
    Conflict,
    InvalidRequest,
    JobNotFound,
    QueueFull,
    TabrelayError,
    WorkerLost,
)
from common.settings import Settings

#: The queues, small before large.
QUEUES = ("fit.small", "fit.large")


class StaleClaim(Exception):
    """The job was given to another attempt, or ended; whatever this attempt does no longer counts."""


@dataclass(frozen=True)
class Claim:
    """A worker's time-limited hold of a running job; the token fences off earlier attempts."""

    job: Job
    token: str


@dataclass(frozen=True)
class Submitted:
    """What became of a submission: `accepted`, `known` (already current) or `repeated` (same key)."""

    outcome: str
    job: Job


class Jobs:
    """The job side of the catalogue."""

    def __init__(self, client: Client, scripts: Scripts, settings: Settings) -> None:
        self._client = client
        self._scripts = scripts
        self._settings = settings
        self._prefix = settings.redis_prefix
        self._lease_ms = int(settings.lease_s * 1000)

    def submit(self, new: NewJob, *, idempotency_key: str = "", fingerprint: str = "") -> Submitted:
        """Accept a fit; raises QueueFull, or InvalidRequest for an idempotency key with another payload."""
        outcome, detail = self._scripts.run(
            "submit",
            *(new.id, new.tenant, new.dataset, new.queue, new.key, idempotency_key, fingerprint),
            *(self._settings.max_queued_jobs, self._settings.jobs_kept, *new.fields()),
        )
        if outcome == "full":
            limit = self._settings.max_queued_jobs
            raise QueueFull(f"{detail} fits are waiting, the most is {limit}", retry_after_s=10, limit=limit)
        if outcome == "mismatch":
            raise InvalidRequest("this Idempotency-Key was used for another request; use a new one")
        return Submitted(outcome, self.get(new.tenant, detail))

    def get(self, tenant: str, job_id: str) -> Job:
        """The tenant's job; raises JobNotFound, also for a job of somebody else."""
        stored = self._client.hgetall(f"{self._prefix}job:{job_id}")
        if not stored or stored["tenant"] != tenant:
            raise JobNotFound(f"there is no job {job_id!r}")
        return Job.decode(stored)

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

    def claim(self, queue: str, worker: str, pid: int, token: str, holder: str = "") -> Claim | None:
        """Give the next job of a queue to a worker, with a lease; None when nobody waits.

        `holder` is one life of that worker: after a restart the same name, and even the same process id, may be there
        again, and must not keep the lease of a job that died with the life before.
        """
        flat = self._scripts.run("claim", queue, worker, holder or worker, pid, token, self._lease_ms)
        return Claim(Job.decode(pairs(flat)), token) if flat else None

    def renew(self, job_id: str, token: str) -> bool:
        """Renew the lease; False when the claim is no longer ours."""
        return bool(self._scripts.run("renew", job_id, token, self._lease_ms))

    def report(self, claim: Claim, phase: str, fraction: float, **fields: str | int | float) -> None:
        """Report a phase; raises Cancelled when somebody cancelled, StaleClaim when it is no longer ours."""
        flat = [part for pair in fields.items() for part in pair]
        outcome = self._scripts.run("report", claim.job.id, claim.token, phase, round(fraction, 4), *flat)
        self._check(outcome)

    def adopt(self, claim: Claim, table: str, key: str, **fields: str | int | float) -> None:
        """Note the parsed table of a job that came with a raw upload."""
        flat = [part for pair in fields.items() for part in pair]
        self._check(self._scripts.run("adopt", claim.job.id, claim.token, table, key, *flat))

    def publish(self, claim: Claim, version: Version, timings_ms: Mapping[str, float]) -> None:
        """Publish and end as succeeded; raises StaleClaim or Cancelled and then nothing has changed."""
        outcome = self._scripts.run(
            "publish",
            *(claim.job.id, claim.token, version.context, version.encode()),
            *(self._settings.versions_kept, orjson.dumps(dict(timings_ms)).decode()),
        )
        self._check(outcome)

    def fail(self, claim: Claim, error: TabrelayError, timings_ms: Mapping[str, float]) -> None:
        """End as failed, or as cancelled when that is what the error says."""
        state = JobState.CANCELLED if isinstance(error, Cancelled) else JobState.FAILED
        encoded = "" if state is JobState.CANCELLED else orjson.dumps(error.encode()).decode()
        timings = orjson.dumps(dict(timings_ms)).decode()
        self._check(self._scripts.run("finish", claim.job.id, claim.token, state, encoded, timings))

    def hand_back(self, job_id: str, token: str) -> str:
        """Put a running job back at the head of its queue; the attempt does not count."""
        return str(self._scripts.run("release", job_id, token, 0, 1, ""))

    def release_dead(self, job_id: str, token: str = "") -> str:
        """Requeue a job whose worker died, or end it as worker_lost; without a token only past its lease."""
        most = self._settings.max_attempts
        phase = self._client.hget(f"{self._prefix}job:{job_id}", "phase")
        lost = WorkerLost(
            f"the fit's worker died {most} times, last while {phase or 'starting'}", phase=phase
        )
        error = orjson.dumps(lost.encode()).decode()
        return str(self._scripts.run("release", job_id, token, most, 0, error))

    def expired(self) -> list[str]:
        """Running jobs whose lease has run out."""
        seconds, micros = self._client.time()
        now_ms = seconds * 1000 + micros // 1000
        return list(
            self._client.zrangebyscore(f"{self._prefix}running", "-inf", f"({now_ms}", start=0, num=100)
        )

    def let_go(self, holder: str, token: str) -> None:
        """The holder's child no longer works on this claim: its lease is not renewed any more."""
        held = self.held_by(holder)
        if held is not None and held[1] == token:
            self._client.delete(f"{self._prefix}holds:{holder}")

    def held_by(self, holder: str) -> tuple[str, str, int] | None:
        """Job, token and process id of the claim that a holder's child works on."""
        held = self._client.get(f"{self._prefix}holds:{holder}")
        if not held:
            return None
        job_id, token, pid = str(held).split(" ")
        return job_id, token, int(pid)

    def known_context(self, tenant: str, key: str) -> str | None:
        """Digest of the tenant's context that was made from exactly this key."""
        found: Any = self._client.hget(f"{self._prefix}keys:{tenant}", key)
        return found or None

    @staticmethod
    def _check(outcome: Any) -> None:
        if outcome == "cancel":
            raise Cancelled
        if outcome != "ok":
            raise StaleClaim(str(outcome))


__all__ = ["QUEUES", "Claim", "Jobs", "StaleClaim", "Submitted"]
