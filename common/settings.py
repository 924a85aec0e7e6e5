"""Settings: one frozen model, read once from `TABRELAY_*` variables; units are in the names.

`docs/configuration.md` is generated from it (`python -m common.settings`).
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

PREFIX = "TABRELAY_"
#: Names that the client and the CLI read themselves.
CLIENT_NAMES = frozenset({"TABRELAY_URL", "TABRELAY_API_KEY"})
MIB = 1024**2
GIB = 1024**3


class UnknownSetting(ValueError):
    """A `TABRELAY_` variable that no setting reads, most likely a typing mistake."""


class Settings(BaseSettings):
    """What every Tabrelay process reads at its start."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore")

    # Places
    data_dir: Path = Field(
        Path("data"), description="Folder of tables, contexts, uploads and the record file."
    )
    host_dir: Path | None = Field(
        None, description="Folder of the host tier; a folder of its own under `/dev/shm` when not given."
    )
    run_dir: Path | None = Field(
        None,
        description="Folder of the predict workers' sockets; `run` under `data_dir` when that is short enough.",
    )
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0", description="Redis or Valkey: `redis://`, `rediss://`, `unix://`."
    )
    redis_prefix: str = Field("tabrelay:", description="What every Redis key starts with.")

    redis_appendfsync: str = Field(
        "everysec",
        pattern="^(everysec|always)$",
        description="When the embedded Redis fsyncs what it took: `everysec`, or `always`, before each answer.",
    )

    # Models
    default_model: str = Field(
        "auto",
        description="Model of a fit that names none; `auto`: `tabicl-v2` when its weights are there, else `tabicl-mini`.",
    )
    model_paths: dict[str, str] = Field(
        default_factory=dict,
        description='Local weights, JSON: `{"tabicl-v2": "folder or file", "tabicl-v2:regressor": "file"}`.',
    )
    accept_license: str = Field(
        "",
        description="Models whose licence is accepted, comma-separated: `tabpfn-v2.5,tabpfn-v3`; `GET /v1/models` shows the licences.",
    )
    device: str = Field("cpu", description="This worker's device: `cpu` or `cuda:0`.")
    threads: int = Field(1, ge=1, le=256, description="Compute threads of a worker.")

    # API
    api_bind: str = Field("127.0.0.1:8000", description="Where the API listens: `host:port` or `unix:/path`.")
    api_processes: int = Field(1, ge=1, le=64, description="API processes.")
    api_threads: int = Field(32, ge=2, le=512, description="Threads of an API process.")
    max_event_streams: int = Field(
        16,
        ge=1,
        description="Most event streams that an API process holds open, each on one of its threads; fewer than those.",
    )
    snapshot_refresh_s: float = Field(1.0, gt=0, description="How old the API's routing snapshot may grow.")
    predict_deadline_s: float = Field(30.0, gt=0, description="Deadline of a predict that names none.")
    max_predict_deadline_s: float = Field(600.0, gt=0, description="Largest deadline a predict may ask for.")
    max_wait_s: float = Field(30.0, ge=0, description="Largest `Prefer: wait` that is honoured.")

    # Limits on what comes in
    max_upload_bytes: int = Field(2 * GIB, ge=1, description="Largest table file of a fit.")
    max_inline_parse_bytes: int = Field(
        16 * MIB, ge=1, description="Files up to this size are parsed before the answer."
    )
    max_predict_bytes: int = Field(64 * MIB, ge=1, description="Largest body of a predict.")
    max_predict_rows: int = Field(100_000, ge=1, description="Most rows of one predict.")
    max_rows: int = Field(1_000_000, ge=1, description="Most rows of a training table, whatever the model.")
    max_columns: int = Field(2_000, ge=1, description="Most columns of a table.")
    max_cells: int = Field(50_000_000, ge=1, description="Most rows x columns of a training table.")
    max_queued_jobs: int = Field(10_000, ge=1, description="Most fit jobs waiting in all queues.")
    max_queued_jobs_per_tenant: int = Field(1_000, ge=1, description="Most fit jobs of one tenant waiting.")
    max_upload_bytes_in_flight: int = Field(
        4 * GIB, ge=1, description="Bytes of fits that an API process receives at once."
    )

    # One-shot predicts
    one_shot_max_rows: int = Field(
        1024, ge=2, description="Most rows of a one-shot predict, training and evaluation together."
    )
    one_shot_max_columns: int = Field(100, ge=1, description="Most columns of a one-shot predict.")
    one_shot_max_cells: int = Field(
        80_000,
        ge=1,
        description="Most rows x columns of a one-shot predict, training and evaluation together.",
    )
    one_shot_estimators: int = Field(
        1, ge=1, le=32, description="Ensemble members of a one-shot predict that names no `n_estimators`."
    )
    one_shot_device_s: float = Field(
        0.05,
        ge=0,
        description="One-shots estimated up to this run on a predict worker, larger ones on a fit worker.",
    )
    one_shot_backlog_s: float = Field(
        0.4, gt=0, description="Estimated seconds of one-shots that a predict worker holds at once."
    )
    one_shots_waiting: int = Field(
        8,
        ge=1,
        description="Most one-shots that wait for a fit worker; each holds a thread of the API meanwhile.",
    )
    one_shot_context_bytes: int = Field(
        256 * MIB,
        ge=0,
        description="Bytes of one-shots' contexts that a predict worker keeps for repeated tables.",
    )

    # Parser child
    parser_memory_bytes: int = Field(4 * GIB, ge=256 * MIB, description="Address space of a parser child.")
    parser_timeout_s: float = Field(
        60.0, gt=0, description="Longest time a parser child may work on one file."
    )
    parser_uses: int = Field(
        200, ge=1, description="Files a parser child reads before a fresh one replaces it."
    )

    # Fit jobs
    queues: str = Field(
        "fit.small,fit.large", description="Queues that this fit worker serves, comma-separated."
    )
    large_fit_s: float = Field(60.0, gt=0, description="Fits estimated above this go to `fit.large`.")
    lease_s: float = Field(15.0, gt=0, description="A fit worker's lease on its job.")
    lease_renew_s: float = Field(5.0, gt=0, description="How often the lease is renewed.")
    janitor_every_s: float = Field(
        2.0, gt=0, description="How often expired leases and lost wake-ups are looked for."
    )
    max_attempts: int = Field(
        3, ge=1, le=10_000, description="Times a job is tried before it fails as `worker_lost`."
    )
    fit_time_limit_s: float = Field(7200.0, gt=0, description="Longest time of one attempt at a fit.")
    max_deadline_s: float = Field(
        7 * 86400.0, gt=0, description="Largest `deadline_s` of a fit, from its submission."
    )
    cancel_grace_s: float = Field(
        10.0, gt=0, description="A fit that goes on so long after a cancel or its deadline is ended by force."
    )
    dead_letters_kept: int = Field(
        100,
        ge=0,
        le=10_000,
        description="Jobs that ended as `worker_lost` whose tables are kept for a retry, a tenant.",
    )
    refit_on_upgrade: bool = Field(
        True,
        description="Fit a dataset again from its kept table when its context is refused or damaged.",
    )
    jobs_kept: int = Field(10_000, ge=1, description="Ended jobs that a tenant's list keeps.")
    versions_kept: int = Field(2, ge=1, le=100, description="Versions of a dataset that are kept.")

    # What is removed, and when
    sweep_every_s: float = Field(60.0, gt=0, description="How often files that nobody needs are looked for.")
    sweep_age_s: float = Field(
        3600.0, ge=0, description="No file younger than this is swept, whoever needs it."
    )
    upload_ttl_s: float = Field(
        86_400.0, ge=0, description="Age at which a raw upload that no job needs is removed."
    )
    disk_budget_bytes: int = Field(
        0, ge=0, description="Most bytes of tables and contexts on disk; 0 is no limit but the disk's own."
    )

    # Predict workers
    worker_name: str = Field("", description="This worker's name; made from host and process id when empty.")
    predict_bind: str = Field(
        "", description="Where this predict worker listens: `unix:/path` or `host:port`."
    )
    predict_address: str = Field(
        "", description="Address under which the API reaches this worker; the bind when empty."
    )
    device_budget_bytes: int = Field(
        4 * GIB, ge=1, description="Bytes of contexts that a predict worker keeps loaded."
    )
    host_tier_bytes: int = Field(4 * GIB, ge=0, description="Bytes of contexts that the host tier keeps.")
    max_in_flight: int = Field(256, ge=1, description="Predicts that a predict worker holds at once.")
    max_rows_in_flight: int = Field(400_000, ge=1, description="Rows that a predict worker holds at once.")
    rows_per_forward: int = Field(256, ge=8, description="Most rows that one forward takes.")
    heartbeat_s: float = Field(1.0, gt=0, description="How often a worker registers.")
    worker_ttl_s: float = Field(5.0, gt=0, description="A worker not heard of for this long is gone.")

    log_format: str = Field("text", pattern="^(text|json)$", description="Log lines as `text` or `json`.")
    log_level: str = Field("INFO", description="Least level that is logged.")

    @model_validator(mode="after")
    def _streams_leave_a_thread(self) -> Self:
        if "max_event_streams" in self.model_fields_set and self.max_event_streams >= self.api_threads:
            raise ValueError("max_event_streams must be less than api_threads: each stream holds a thread")
        return self

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
        """Read the environment; a `TABRELAY_` name that nothing reads raises UnknownSetting."""
        names = os.environ if environ is None else environ
        known = {PREFIX + name.upper() for name in cls.model_fields} | CLIENT_NAMES
        unknown = sorted(name for name in names if name.startswith(PREFIX) and name not in known)
        if unknown:
            raise UnknownSetting(
                f"unknown setting {', '.join(unknown)}; docs/configuration.md lists the known ones"
            )
        return cls(**overrides)

    @cached_property
    def data(self) -> Path:
        """`data_dir`, absolute."""
        return self.data_dir.expanduser().absolute()

    @cached_property
    def host(self) -> Path | None:
        """The host tier's folder, or None where the machine has no `/dev/shm` and none was given."""
        if self.host_tier_bytes == 0:
            return None
        if self.host_dir is not None:
            return self.host_dir.expanduser().absolute()
        shm = Path("/dev/shm")  # noqa: S108  (the host tier is memory on purpose; its folders are 0700)
        return shm / f"tabrelay-{os.getuid()}-{self.data_digest}" if shm.is_dir() else None

    @cached_property
    def run(self) -> Path:
        """The sockets' folder; a Unix socket's path holds at most 107 bytes."""
        if self.run_dir is not None:
            return self.run_dir.expanduser().absolute()
        inside = self.data / "run"
        if len(os.fsencode(inside)) <= 80:
            return inside
        return Path(tempfile.gettempdir()) / f"tabrelay-{os.getuid()}-{self.data_digest}"

    @cached_property
    def data_digest(self) -> str:
        """12 hex digits that tell one data folder from another."""
        return hashlib.blake2b(os.fsencode(self.data), digest_size=6).hexdigest()

    @cached_property
    def event_streams(self) -> int:
        """`max_event_streams`; its default gives way to a small `api_threads`."""
        return min(self.max_event_streams, self.api_threads - 1)

    @cached_property
    def accepted_licences(self) -> frozenset[str]:
        """The models whose licence is accepted."""
        return frozenset(name.strip() for name in self.accept_license.split(",") if name.strip())

    @cached_property
    def queue_names(self) -> tuple[str, ...]:
        """The queues that this fit worker serves, in order."""
        return tuple(name.strip() for name in self.queues.split(",") if name.strip())


def reference() -> str:
    """The Markdown text of `docs/configuration.md`."""
    lines = [
        "# Configuration",
        "",
        "Generated by `python -m common.settings > docs/configuration.md`. Every process reads these variables once,",
        "at its start; an unknown `TABRELAY_` name refuses to start. `tabrelay up` sets what it needs itself.",
        "",
        "| variable | default | meaning |",
        "|---|---|---|",
    ]
    for name, field in Settings.model_fields.items():
        default = field.get_default(call_default_factory=True)
        shown = "" if default is None or default == "" else f"`{default}`"
        lines.append(f"| `{PREFIX}{name.upper()}` | {shown} | {field.description} |")
    lines += [
        "",
        "The client and the CLI read `TABRELAY_URL` and `TABRELAY_API_KEY`.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(reference())
