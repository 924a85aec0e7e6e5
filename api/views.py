"""How things look over HTTP: JSON objects of jobs, datasets, workers and predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from common.catalogue.records import Dataset, FitWorker, Job, PredictWorker, Version
from common.models.registry import SPECS
from common.relay.wire import POINTS, Answer
from common.service.forecast import Outlook, progress
from common.service.one_shots import OneShotTold
from common.tables.target import Target


def when(ms: int | None) -> str | None:
    """Milliseconds since 1970 as ISO 8601 UTC."""
    if not ms:
        return None
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def job(job: Job, outlook: Outlook) -> dict[str, Any]:
    """A job."""
    error = None
    if job.error is not None:
        encoded = job.error.encode()
        error = {name: encoded[name] for name in ("code", "title", "detail", "errors")} | {
            "facts": encoded["facts"]
        }
    return {
        "id": job.id,
        "state": str(job.state),
        "phase": job.phase or None,
        "fraction": round(job.fraction, 4),
        "progress": round(progress(job), 4),
        "dataset": job.dataset,
        "version": job.version,
        "model": job.model,
        "task": job.task or None,
        "target": job.target,
        "options": dict(job.options),
        "licence": SPECS[job.model].licence if job.model in SPECS else None,
        "rows": job.rows or None,
        "columns": job.columns or None,
        "queue": job.queue,
        "priority": job.priority,
        "waits_for": job.leader or None,
        "deadline_at": when(job.deadline_ms),
        "ttl_s": job.ttl_s or None,
        "reason": job.reason or None,
        "retry_of": job.retry_of or None,
        "queue_position": outlook.position,
        "eta_s": outlook.eta_s,
        "attempt": job.attempt,
        "cancel_requested": job.cancel and not job.state.ended,
        "created_at": when(job.created_ms),
        "started_at": when(job.started_ms),
        "finished_at": when(job.finished_ms),
        "timings_ms": dict(job.timings),
        "context": job.context or None,
        "context_bytes": job.context_bytes or None,
        "precision": job.precision or None,
        "cache": job.cache or None,
        "largest_difference": job.largest_difference,
        "error": error,
    }


def dataset(entry: Dataset) -> dict[str, Any]:
    """A dataset as a line of a list."""
    current = entry.versions[entry.current]
    return {
        "name": entry.name,
        "version": entry.current,
        "model": current.model,
        "task": current.task,
        "rows": current.rows,
        "columns": current.columns,
        "bytes": current.context_bytes,
        "pinned": entry.pinned,
        "pending_jobs": entry.pending,
        "versions": len(entry.versions),
        "created_at": when(entry.created_ms),
        "updated_at": when(entry.updated_ms),
        "expires_at": when(entry.expires_ms),
    }


def dataset_in_full(
    entry: Dataset,
    workers: Sequence[PredictWorker],
    tiers: Mapping[str, Sequence[str]],
    pending: Sequence[Job] = (),
) -> dict[str, Any]:
    """A dataset with its versions, where each context is (`tiers` by context digest) and the jobs on their way."""
    current = entry.versions[entry.current]
    return {
        **dataset(entry),
        "target": current.target,
        "schema": current.schema,
        "jobs": [
            {"id": job.id, "state": str(job.state), "version": job.version, "reason": job.reason or None}
            for job in pending
        ],
        "versions": [_version(version, workers, tiers) for _, version in sorted(entry.versions.items())],
    }


def _version(
    version: Version, workers: Sequence[PredictWorker], tiers: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    held = [w.name for w in workers if any(r.context == version.context for r in w.residents)]
    return {
        "version": version.version,
        "context": version.context,
        "bytes": version.context_bytes,
        "rows": version.rows,
        "columns": version.columns,
        "model": version.model,
        "task": version.task,
        "licence": version.licence,
        "job": version.job,
        "fit_s": version.fit_s,
        "created_at": when(version.created_ms),
        "options": dict(version.options),
        "precision": version.precision,
        "cache": version.cache,
        "largest_difference": version.largest_difference,
        "tiers": list(tiers.get(version.context, ())),
        "resident_on": held,
    }


def predict_worker(worker: PredictWorker, tenant: str) -> dict[str, Any]:
    """A predict worker; of its contexts only the tenant's own by name."""
    return {
        "name": worker.name,
        "kind": "predict",
        "host": worker.host,
        "device": worker.device,
        "models": list(worker.models),
        "budget_bytes": worker.budget_bytes,
        "used_bytes": worker.used_bytes,
        "headroom_bytes": max(worker.budget_bytes - worker.used_bytes, 0),
        "in_flight": worker.in_flight,
        "served": worker.served,
        "started_at": when(worker.started_ms),
        "contexts": [
            {"context": r.context, "bytes": r.bytes, "tier": r.tier}
            for r in worker.residents
            if r.tenant == tenant
        ],
    }


def fit_worker(worker: FitWorker) -> dict[str, Any]:
    """A fit worker."""
    return {
        "name": worker.name,
        "kind": "fit",
        "host": worker.host,
        "device": worker.device,
        "queues": list(worker.queues),
        "busy": bool(worker.job),
        "started_at": when(worker.started_ms),
    }


def predictions(answer: Answer, output: str, threshold: float | None) -> list[Any]:
    """One prediction a row: a label, or the point estimate that `output` names, else the mean.

    The label is the most probable one; with a threshold, which is for two classes, the second one from there on.
    """
    numbers = answer.prediction
    if numbers.probabilities is not None:
        codes = np.argmax(numbers.probabilities, axis=1)
        if threshold is not None:
            codes = (numbers.probabilities[:, 1] >= threshold).astype(np.int64)
        return Target.decode(answer.target).labels(codes)
    values = getattr(numbers, output) if output in POINTS else numbers.mean
    return [] if values is None else list(values.tolist())


def prediction(
    name: str,
    version: Version,
    answer: Answer,
    output: str,
    threshold: float | None,
    timings_ms: Mapping[str, float],
) -> dict[str, Any]:
    """An answer as JSON."""
    return {
        "dataset": name,
        "version": version.version,
        "context": answer.context,
        "model": version.model,
        "licence": version.licence,
        "task": version.task,
        **_numbers(answer, output, threshold),
        "worker": answer.worker,
        "timings_ms": dict(timings_ms),
    }


def one_shot(found: OneShotTold, timings_ms: Mapping[str, float]) -> dict[str, Any]:
    """An answer to a one-shot as JSON."""
    answer = found.told.answer
    return {
        "context": answer.context,
        "reused": found.told.reused,
        "model": found.spec.name,
        "licence": found.spec.licence,
        "task": found.task,
        "n_estimators": found.told.members,
        **_numbers(answer, found.output, None),
        "worker": answer.worker,
        "timings_ms": dict(timings_ms),
    }


def _numbers(answer: Answer, output: str, threshold: float | None) -> dict[str, Any]:
    numbers = answer.prediction
    body: dict[str, Any] = {"predictions": predictions(answer, output, threshold)}
    if numbers.probabilities is not None:
        body["classes"] = list(Target.decode(answer.target).classes)
        if output == "proba":
            body["probabilities"] = np.ascontiguousarray(numbers.probabilities)
        if threshold is not None:
            body["threshold"] = threshold
    else:
        for point in POINTS:
            if (values := getattr(numbers, point)) is not None:
                body[point] = np.ascontiguousarray(values)
        if numbers.quantiles is not None:
            body["levels"] = list(answer.quantiles)
            body["quantiles"] = np.ascontiguousarray(numbers.quantiles)
    return body
