"""What the client returns: frozen dataclasses read from the service's JSON.

Fields that a newer service adds are ignored and stay readable in `raw`; states and phases are plain text,
so an unknown one is no error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any, Self

from tabrelay.client.errors import FieldError, JobCancelled, JobFailed, field_errors

ENDED_STATES = frozenset({"succeeded", "failed", "cancelled"})


@dataclass(frozen=True, kw_only=True)
class _Answer:
    #: The JSON object as it came.
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def decode(cls, data: Mapping[str, Any]) -> Self:
        """Read the known fields; a missing or null one keeps its default."""
        known = {f.name for f in fields(cls)} - {"raw"}
        values = {name: value for name, value in data.items() if name in known and value is not None}
        return cls(**cls._convert(values), raw=dict(data))

    @classmethod
    def _convert(cls, values: dict[str, Any]) -> dict[str, Any]:
        for name in _TIMES & values.keys():
            values[name] = _time(values[name])
        return values


@dataclass(frozen=True)
class JobError:
    """Why a job failed."""

    code: str
    detail: str
    status: int | None = None
    errors: tuple[FieldError, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def decode(cls, data: Any) -> JobError:
        """Read the `error` of a job; a bare text is its detail."""
        if not isinstance(data, Mapping):
            return cls("error", str(data))
        return cls(
            code=str(data.get("code") or "error"),
            detail=str(data.get("detail") or data.get("title") or "the fit failed"),
            status=data.get("status"),
            errors=field_errors(data.get("errors")),
            facts=dict(data.get("facts") or {}),
        )


@dataclass(frozen=True, kw_only=True)
class Job(_Answer):
    """One requested fit."""

    id: str
    #: queued, running, succeeded, failed or cancelled.
    state: str
    #: loading, preprocessing, encoding, writing, verifying or publishing.
    phase: str | None = None
    #: How much of the phase is done, 0 to 1.
    fraction: float | None = None
    #: How much of the whole job is done, over all phases.
    progress: float | None = None
    dataset: str = ""
    version: int | None = None
    model: str | None = None
    task: str | None = None
    rows: int | None = None
    columns: int | None = None
    #: How each column is used; not in lists of jobs.
    schema: Mapping[str, Any] | None = None
    queue_position: int | None = None
    #: interactive or batch.
    priority: str | None = None
    #: The job that fits the same content, whose end this one waits for.
    waits_for: str | None = None
    deadline_at: datetime | None = None
    #: Why the service itself asked for the fit: upgrade, damaged or lost.
    reason: str | None = None
    retry_of: str | None = None
    #: Seconds that the rest is estimated to take.
    eta_s: float | None = None
    attempt: int | None = None
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    timings_ms: Mapping[str, float] = field(default_factory=dict)
    context_bytes: int | None = None
    #: native, fp16 or int8; and kv or repr.
    precision: str | None = None
    cache: str | None = None
    #: From the answers as computed: of a probability, or of a mean in standard deviations of the target.
    largest_difference: float | None = None
    context: str | None = None
    error: JobError | None = None

    @classmethod
    def _convert(cls, values: dict[str, Any]) -> dict[str, Any]:
        if "error" in values:
            values["error"] = JobError.decode(values["error"])
        return super()._convert(values)

    @property
    def ended(self) -> bool:
        """Whether the job will not change any more."""
        return self.state in ENDED_STATES or self.finished_at is not None

    @property
    def succeeded(self) -> bool:
        """Whether the dataset answers from this fit."""
        return self.state == "succeeded"

    @property
    def seconds(self) -> float | None:
        """Seconds from start to end, once it has ended."""
        if self.started_at is None or self.finished_at is None:
            return None
        return (self.finished_at - self.started_at).total_seconds()

    def raise_for_state(self) -> Self:
        """Return the job; raise JobFailed or JobCancelled when it ended without a result."""
        if self.state == "cancelled":
            raise JobCancelled(self)
        if self.ended and not self.succeeded:
            raise JobFailed(self)
        return self


@dataclass(frozen=True, kw_only=True)
class Version(_Answer):
    """One published fit of a dataset."""

    version: int
    context: str | None = None
    model: str | None = None
    task: str | None = None
    rows: int | None = None
    columns: int | None = None
    bytes: int | None = None
    precision: str | None = None
    cache: str | None = None
    largest_difference: float | None = None
    created_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class Dataset(_Answer):
    """A name that answers predicts from its current version."""

    name: str
    version: int | None = None
    model: str | None = None
    task: str | None = None
    rows: int | None = None
    columns: int | None = None
    bytes: int | None = None
    pinned: bool = False
    updated_at: datetime | None = None
    #: The kept versions; only `Client.dataset` fills it.
    versions: tuple[Version, ...] = ()
    version_count: int | None = None

    @classmethod
    def _convert(cls, values: dict[str, Any]) -> dict[str, Any]:
        versions = values.pop("versions", None)
        if isinstance(versions, list):
            values["versions"] = tuple(
                Version.decode(item) for item in versions if isinstance(item, dict) and "version" in item
            )
            values["version_count"] = len(versions)
        elif isinstance(versions, int):
            values["version_count"] = versions
        return super()._convert(values)


@dataclass(frozen=True, kw_only=True)
class Model(_Answer):
    """A model that fits may name."""

    name: str
    #: What it can be asked for.
    tasks: tuple[str, ...] = ()
    #: The tasks whose weights are there.
    ready_tasks: tuple[str, ...] = ()
    #: Whether fits that name no model use this one.
    default: bool = False
    licence: str | None = None

    @classmethod
    def decode(cls, data: Mapping[str, Any]) -> Self:
        """Read a model; its `ready` says for each task whether the weights are there."""
        ready = data.get("ready")
        by_task = ready if isinstance(ready, Mapping) else {}
        there = tuple(task for task, is_there in by_task.items() if is_there)
        model = super().decode({**data, "tasks": tuple(by_task), "ready_tasks": there})
        return replace(model, raw=dict(data))

    @property
    def ready(self) -> bool:
        """Whether it can be fitted for at least one task."""
        return bool(self.ready_tasks)


@dataclass(frozen=True)
class Readiness:
    """Whether the service takes work; `reasons` says why not."""

    ready: bool
    reasons: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.ready


_TIMES = frozenset({"created_at", "deadline_at", "started_at", "finished_at", "updated_at"})


def _time(value: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return None
