"""One fit from claim to publish. Runs in the Celery child; importing this loads torch."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded

from common import logs
from common.admission import estimate_fit_s, settle
from common.catalogue import Job, Phase
from common.catalogue.jobs import QUEUES, Claim, Joined, StaleClaim
from common.contexts.build import build_context, largest_difference
from common.errors import (
    Cancelled,
    CatalogueUnavailable,
    ContextGone,
    FilesBusy,
    FitTimeout,
    InternalError,
    InvalidTable,
    LicenceNotAccepted,
    ModelNotReady,
    StorageFull,
    TabrelayError,
)
from common.files import bury
from common.models.protocol import Adapter, Backbone, ModelSpec, TrainingTable
from common.models.registry import SCHEMA, check_table
from common.names import new_id
from common.service.fits import context_key, shown_schema, table_limits
from common.settings import Settings
from common.tables.canonical import read_canonical
from common.tables.overrides import Overrides
from common.tables.schema import TableSchema
from common.tables.target import Target, take_target
from common.wake import unheard
from fit_workers.one_shot import serve_lane
from fit_workers.publish import Publisher, Ready
from fit_workers.report import Reporter
from fit_workers.worker import Worker

log = logs.get("fit")

#: Seconds between two tries to hand a job back while the catalogue can't be reached.
GIVE_BACK_S = 0.5


@functools.cache
def _worker(name: str) -> Worker:
    return Worker.start(Settings.load(), name)


def warm_up(name: str) -> None:
    """Load torch and the default model's weights before the first job comes."""
    worker = _worker(name)
    spec = worker.registry.spec(worker.registry.default_model())
    for task in spec.files:
        with contextlib.suppress(ModelNotReady, LicenceNotAccepted):
            worker.backbone(spec.name, task)
    worker.parser.start()


def serve_one_shots(name: str) -> None:
    """Fit the one-shots that wait; their askers hear of it or run into their deadlines."""
    try:
        serve_lane(_worker(name))
    except CatalogueUnavailable as error:
        log.warning("the one-shot lane can't be reached", error=str(error))


def fit_next(name: str, holder: str, queue: str) -> list[str]:
    """Claim the next job of a queue and run it to its end; returns at once when nobody waits.

    Returns the queues that should be woken: a job's end may free others that waited for it or for this worker.
    """
    worker = _worker(name)
    try:
        claim = worker.catalogue.jobs.claim(queue, name, os.getpid(), new_id(), holder)
    except CatalogueUnavailable:
        # It may have gone through: the parent would renew a job's lease as long as this process lives.
        log.warning("a claim was not answered; this process ends, its parent sees to the job", queue=queue)
        os._exit(1)
    if claim is None:
        return []
    try:
        FitRun(worker, claim).run()
    finally:
        # The parent renews the lease while this process lives and holds the claim: let go of it, or die.
        try:
            worker.catalogue.jobs.let_go(holder, claim.token)
        except CatalogueUnavailable:
            log.warning(
                "the claim can't be let go; this process ends, its parent sees to the job", job=claim.job.id
            )
            os._exit(1)
    try:
        return unheard(worker.catalogue, QUEUES)
    except CatalogueUnavailable:
        return []  # the janitor looks again


@dataclass(frozen=True)
class Loaded:
    """A training table in memory, and what it makes the context's key."""

    job: Job
    spec: ModelSpec
    table: TrainingTable
    digest: str
    options: Mapping[str, Any]  # settled
    key: str


class FitRun:
    """One attempt at one job."""

    def __init__(self, worker: Worker, claim: Claim) -> None:
        self._worker = worker
        self._claim = claim
        self._reporter = Reporter(worker.catalogue, claim)
        self._log = log.bind(job=claim.job.id, dataset=claim.job.dataset, attempt=claim.job.attempt)

    @property
    def _job(self) -> Job:
        """The job that the claim is for now."""
        return self._claim.job

    def run(self) -> None:
        """Fit, publish and end the job; whatever goes wrong is the job's error, never the worker's end."""
        try:
            self._fit()
        except Joined as joined:
            self._log.info("another job fits the same content", why=str(joined))
        except StaleClaim as stale:
            self._log.warning("the job is no longer ours; this attempt changes nothing", why=str(stale))
        except SoftTimeLimitExceeded:
            limit = self._worker.settings.fit_time_limit_s
            self._end(FitTimeout(f"the fit took longer than {limit:.0f} s (TABRELAY_FIT_TIME_LIMIT_S)"))
        except (CatalogueUnavailable, FilesBusy) as error:
            self._give_back(error)
        except TabrelayError as error:
            self._end(error)
        except MemoryError:
            self._end(InternalError("the fit needed more memory than this worker has"))
        except OSError as error:
            self._log.exception("fit failed")
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            self._end(StorageFull() if full else InternalError())
        except Exception:
            self._log.exception("fit failed")
            self._end(InternalError("the fit failed; the fit worker's log has the cause"))

    def _give_back(self, error: TabrelayError) -> None:
        """A fault of what is around the job and not of the job: it goes back, the attempt uncounted.

        When that can't be said within the lease this process ends, and its parent sees to the job.
        """
        self._log.warning("the job goes back to its queue", code=error.code, why=str(error))
        ends = time.monotonic() + self._worker.settings.lease_s
        while True:
            try:
                self._worker.catalogue.jobs.hand_back(self._job.id, self._claim.token)
                return
            except CatalogueUnavailable:
                if time.monotonic() > ends:
                    os._exit(1)
                time.sleep(GIVE_BACK_S)

    def _end(self, error: TabrelayError) -> None:
        try:
            self._worker.catalogue.jobs.fail(self._claim, error, self._reporter.done())
        except StaleClaim as stale:
            self._log.warning("the job is no longer ours; its error is not recorded", why=str(stale))
            return
        except CatalogueUnavailable as unreachable:
            self._give_back(unreachable)
            return
        self._log.info("job cancelled" if isinstance(error, Cancelled) else "job failed", code=error.code)
        if self._job.upload is not None:
            self._worker.folder.upload(self._job.upload.id).unlink(missing_ok=True)
        bury(self._worker.folder, self._worker.catalogue, self._job.tenant)

    def _fit(self) -> None:
        began = time.monotonic()
        self._reporter.phase(Phase.LOADING)
        loaded = self._load()
        adapter, backbone = self._worker.backbone(loaded.spec.name, loaded.table.target.task)
        publisher = Publisher(self._worker, self._claim, self._reporter)
        known = self._known(loaded, adapter, backbone)
        if known is not None:
            self._log.info("the same fit exists; its context is published again", context=known.digest[:12])
            publisher.publish(known)
            return
        self._reporter.phase(Phase.PREPROCESSING)
        fitted = adapter.fit(loaded.table, backbone, loaded.options, self._reporter.fitting)
        self._reporter.phase(Phase.WRITING)
        built = build_context(
            self._worker.store,
            loaded.job.tenant,
            self._claim.token,
            adapter,
            backbone,
            fitted,
            loaded.table,
            table_digest=loaded.digest,
            key=loaded.key,
            options=loaded.job.options,
            timings_ms=self._reporter.timings_ms,
            on_verify=lambda: self._reporter.phase(Phase.VERIFYING),
        )
        with built:
            ready = Ready.of_new(built, fit_s=time.monotonic() - began)
            publisher.publish(ready)

    def _load(self) -> Loaded:
        """Read the table, parsing the raw upload first where the API did not."""
        worker = self._worker
        job = self._parse() if self._job.upload is not None else self._job
        table = read_canonical(worker.folder.table(job.tenant, job.table), job.table)
        column = take_target(table, job.target)
        target = Target.infer(column, job.target, job.task or None)
        overrides = Overrides.decode(job.options.get(SCHEMA))
        schema = TableSchema.infer(table, job.target, overrides=overrides)
        spec = worker.registry.spec(job.model)
        check_table(spec, table.num_rows, len(schema.columns), target)
        training = TrainingTable(schema.features(table), schema, target, target.encode_labels(column))
        options = self._settled(spec, job, target)
        key = self._key(spec, job, target, options)
        if key != job.key:
            # Other weights or another release than the API saw: the context is that of what is here now.
            worker.catalogue.jobs.adopt(self._claim, job.table, key)
        return Loaded(job, spec, training, job.table, options, key)

    def _settled(self, spec: ModelSpec, job: Job, target: Target) -> dict[str, Any]:
        shape = {"rows": job.rows, "columns": job.columns, "classes": len(target.classes)}
        return settle(spec, job.options, **shape, settings=self._worker.settings)

    def _key(self, spec: ModelSpec, job: Job, target: Target, options: Mapping[str, Any]) -> str:
        weights = self._worker.registry.weights(spec.name, target.task)
        return context_key(
            table=job.table,
            target=target.name,
            task=target.task,
            spec=spec,
            weights=weights.digest,
            options=options,
        )

    def _parse(self) -> Job:
        """Parse a raw upload in the bounded child; its faults carry the same codes as in the API."""
        worker, job, upload = self._worker, self._job, self._job.upload
        if upload is None:
            return job
        raw = worker.folder.upload(upload.id)
        if not raw.exists():
            raise InvalidTable("the uploaded file is no longer there; submit the fit again")
        parsed = worker.parser.parse_training(
            raw,
            upload.format,
            job.target,
            job.task or None,
            worker.folder.uploads(),
            table_limits(worker.settings),
            encoding=upload.encoding,
            schema=job.options.get(SCHEMA),
        )
        try:
            spec = worker.registry.spec(job.model)
            check_table(spec, parsed.rows, parsed.columns - 1, parsed.target)
            job = replace(
                job,
                task=parsed.target.task,
                target=parsed.target.name,
                table=parsed.table_digest,
                rows=parsed.rows,
                columns=parsed.columns - 1,
                schema=shown_schema(parsed.schema),
                upload=None,
                estimate_s=estimate_fit_s(spec, parsed.rows, parsed.columns - 1, job.options),
            )
            key = self._key(spec, job, parsed.target, self._settled(spec, job, parsed.target))
            with worker.folder.locked(job.tenant):
                worker.folder.keep_table(job.tenant, job.table, parsed.path)
                worker.catalogue.jobs.adopt(
                    self._claim,
                    job.table,
                    key,
                    task=job.task,
                    target=job.target,
                    rows=job.rows,
                    columns=job.columns,
                    schema=job.schema,
                    estimate_s=job.estimate_s,
                )
        except Joined:
            raw.unlink(missing_ok=True)
            raise
        finally:
            parsed.path.unlink(missing_ok=True)
        raw.unlink(missing_ok=True)
        return replace(job, key=key)

    def _known(self, loaded: Loaded, adapter: Adapter, backbone: Backbone) -> Ready | None:
        """The context of an earlier fit with the same key, if its file is still whole."""
        digest = self._worker.catalogue.jobs.known_context(loaded.job.tenant, loaded.key)
        if digest is None:
            return None
        try:
            mapped = self._worker.store.open(loaded.job.tenant, digest)
        except ContextGone as error:
            self._log.warning(
                "the known context can't be used, it is fitted again", context=digest[:12], code=error.code
            )
            return None
        return Ready.of_known(digest, mapped, largest_difference(mapped, adapter, backbone, loaded.table))
