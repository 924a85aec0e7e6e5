"""What the catalogue stores, as frozen dataclasses; times are milliseconds of Redis' own clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import orjson

from common.errors import TabrelayError, decode


class JobState(StrEnum):
    """Where a fit job stands."""

    QUEUED = "queued"  # accepted, waits for a fit worker
    RUNNING = "running"  # a worker holds its lease
    SUCCEEDED = "succeeded"  # its context is published
    FAILED = "failed"  # ended with an error
    CANCELLED = "cancelled"  # ended because somebody asked

    @property
    def ended(self) -> bool:
        """True when nothing will change any more."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class Phase(StrEnum):
    """What a running job does; the order is the order of work."""

    LOADING = "loading"  # reads the table, parses it when it was too big for the API
    PREPROCESSING = "preprocessing"  # columns to numbers, ensemble members
    ENCODING = "encoding"  # the model reads the training table; nearly all of the time
    WRITING = "writing"  # streams the context to disk
    VERIFYING = "verifying"  # reads it back and compares answers
    PUBLISHING = "publishing"  # record file, catalogue, prefetch


class Priority(StrEnum):
    """Which jobs of a queue go first."""

    INTERACTIVE = "interactive"  # somebody waits
    BATCH = "batch"  # goes when nobody does, and every fifth time


class Reason(StrEnum):
    """Why the service itself asked for a fit."""

    UPGRADE = "upgrade"  # the context is of another release or other weights
    DAMAGED = "damaged"  # the context's file does not match its digest
    LOST = "lost"  # the context's file is gone


@dataclass(frozen=True)
class Upload:
    """A raw file that a fit worker still has to parse."""

    id: str  # the job's id; names the file under `uploads/`
    format: str
    encoding: str | None = None


@dataclass(frozen=True)
class Job:
    """One requested fit."""

    id: str
    tenant: str
    dataset: str
    version: int
    model: str
    task: str  # "" until the table is parsed, when the request named none
    target: str
    options: Mapping[str, Any]
    queue: str
    state: JobState
    key: str = ""  # context key; "" until the table is parsed
    table: str = ""  # digest of the canonical table; "" until it is parsed
    upload: Upload | None = None
    rows: int = 0
    columns: int = 0  # features, the target not counted
    schema: str = ""  # JSON of the table's schema; "" until the table is parsed, or when that is long
    phase: str = ""
    fraction: float = 0.0
    attempt: int = 0
    token: str = ""
    worker: str = ""
    cancel: bool = False
    priority: str = "interactive"
    leader: str = ""  # the job that fits the same content, whose end this one waits for
    deadline_ms: int | None = None
    ttl_s: float = 0.0  # the dataset's time to live after this fit; 0: for ever
    reason: str = ""  # why the service itself asked for it: a Reason
    retry_of: str = ""
    estimate_s: float = 0.0
    created_ms: int = 0
    started_ms: int | None = None
    finished_ms: int | None = None
    phase_ms: int | None = None
    timings: Mapping[str, float] = field(default_factory=dict)  # milliseconds a phase
    context: str = ""
    context_bytes: int = 0
    precision: str = ""  # of the context, and below; "" and None until it is published
    cache: str = ""
    largest_difference: float | None = None
    error: TabrelayError | None = None

    @classmethod
    def decode(cls, stored: Mapping[str, str]) -> Job:
        """From a Redis hash."""

        def parsed(name: str) -> Any:
            return orjson.loads(stored[name]) if stored.get(name) else None

        def optional_int(name: str) -> int | None:
            return int(stored[name]) if stored.get(name) else None

        upload, error = parsed("upload"), parsed("error")
        return cls(
            id=stored["id"],
            tenant=stored["tenant"],
            dataset=stored["dataset"],
            version=int(stored["version"]),
            model=stored["model"],
            task=stored.get("task", ""),
            target=stored["target"],
            options=parsed("options") or {},
            queue=stored["queue"],
            state=JobState(stored["state"]),
            key=stored.get("key", ""),
            table=stored.get("table", ""),
            upload=Upload(**upload) if upload else None,
            rows=int(stored.get("rows") or 0),
            columns=int(stored.get("columns") or 0),
            schema=stored.get("schema", ""),
            phase=stored.get("phase", ""),
            fraction=float(stored.get("fraction") or 0),
            attempt=int(stored.get("attempt") or 0),
            token=stored.get("token", ""),
            worker=stored.get("worker", ""),
            cancel=stored.get("cancel") == "1",
            priority=stored.get("priority") or "interactive",
            leader=stored.get("leader", ""),
            deadline_ms=optional_int("deadline_ms"),
            ttl_s=float(stored.get("ttl_s") or 0),
            reason=stored.get("reason", ""),
            retry_of=stored.get("retry_of", ""),
            estimate_s=float(stored.get("estimate_s") or 0),
            created_ms=int(stored["created_ms"]),
            started_ms=optional_int("started_ms"),
            finished_ms=optional_int("finished_ms"),
            phase_ms=optional_int("phase_ms"),
            timings=parsed("timings") or {},
            context=stored.get("context", ""),
            context_bytes=int(stored.get("context_bytes") or 0),
            precision=stored.get("precision", ""),
            cache=stored.get("cache", ""),
            largest_difference=parsed("largest_difference"),
            error=decode(error) if error else None,
        )


@dataclass(frozen=True)
class NewJob:
    """What the service layer knows of a fit when it is submitted."""

    id: str
    tenant: str
    dataset: str
    model: str
    task: str
    target: str
    options: Mapping[str, Any]
    queue: str
    key: str = ""
    table: str = ""
    upload: Upload | None = None
    rows: int = 0
    columns: int = 0  # features, the target not counted
    schema: str = ""
    estimate_s: float = 0.0
    priority: str = Priority.INTERACTIVE
    deadline_s: float = 0.0  # from the submission; 0: none
    ttl_s: float = 0.0
    reason: str = ""
    retry_of: str = ""

    def fields(self) -> list[str | int | float]:
        """The hash fields that the submit script sets as given: name, value, ..."""
        rare: dict[str, str | float] = {
            "schema": self.schema,
            "ttl_s": self.ttl_s,
            "reason": self.reason,
            "retry_of": self.retry_of,
        }
        upload = orjson.dumps(asdict(self.upload)).decode() if self.upload else ""
        return [
            *("model", self.model, "task", self.task, "target", self.target),
            *("options", orjson.dumps(dict(self.options), option=orjson.OPT_SORT_KEYS).decode()),
            *("table", self.table, "upload", upload),
            *("rows", self.rows, "columns", self.columns, "estimate_s", round(self.estimate_s, 3)),
            *("priority", self.priority),
            *(part for name, value in rare.items() if value for part in (name, value)),
        ]


@dataclass(frozen=True)
class Version:
    """One published context of a dataset."""

    version: int
    context: str  # digest of the file
    key: str
    table: str  # digest of the canonical table
    job: str
    model: str
    task: str
    rows: int
    columns: int
    context_bytes: int
    created_ms: int
    schema: Mapping[str, Any]
    target: Mapping[str, Any]
    licence: str = ""
    fit_s: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    ttl_s: float = 0.0  # seconds after `created_ms` at which its dataset expires; 0 is never
    precision: str = "native"
    cache: str = "kv"
    #: Between the context's answers for a few training rows and those of the estimator as computed; of probabilities, or
    #: of means in standard deviations of the target. None for one of an earlier release.
    largest_difference: float | None = None

    def encode(self) -> str:
        """As the JSON text that the publish script stores."""
        return orjson.dumps(asdict(self)).decode()

    @classmethod
    def decode(cls, text: str | bytes) -> Version:
        """From that text."""
        return cls(**orjson.loads(text))


@dataclass(frozen=True)
class Dataset:
    """A tenant's name and its versions."""

    tenant: str
    name: str
    current: int  # 0 until a first fit succeeded
    pinned: bool
    pending: int  # jobs queued or running for it
    created_ms: int
    updated_ms: int
    versions: Mapping[int, Version]
    expires_ms: int = 0  # 0 is never

    def version(self, number: int | None) -> Version | None:
        """The version of this number, or the current one."""
        return self.versions.get(self.current if number is None else number)


@dataclass(frozen=True)
class Resident:
    """A context that a predict worker has loaded."""

    tenant: str
    context: str
    bytes: int
    tier: str


@dataclass(frozen=True)
class PredictWorker:
    """What a predict worker says of itself at each heartbeat."""

    name: str
    address: str  # "unix:/path" or "host:port"
    host: str
    pid: int
    device: str
    models: tuple[str, ...]
    budget_bytes: int
    used_bytes: int
    in_flight: int
    rows_in_flight: int
    served: int
    started_ms: int
    residents: tuple[Resident, ...]

    def encode(self) -> str:
        """As JSON text."""
        return orjson.dumps(asdict(self)).decode()

    @classmethod
    def decode(cls, text: str | bytes) -> PredictWorker:
        """From JSON text."""
        stored = orjson.loads(text)
        stored["models"] = tuple(stored["models"])
        stored["residents"] = tuple(Resident(**resident) for resident in stored["residents"])
        return cls(**stored)


@dataclass(frozen=True)
class FitWorker:
    """What a fit worker says of itself at each heartbeat."""

    name: str
    host: str
    pid: int
    device: str
    queues: tuple[str, ...]
    started_ms: int
    job: str = ""

    def encode(self) -> str:
        """As JSON text."""
        return orjson.dumps(asdict(self)).decode()

    @classmethod
    def decode(cls, text: str | bytes) -> FitWorker:
        """From JSON text."""
        stored = orjson.loads(text)
        stored["queues"] = tuple(stored["queues"])
        return cls(**stored)
