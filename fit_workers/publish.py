"""Publishing: rename, record file, one catalogue transaction; then host tier and prefetch.

The publish happens under the tenant's lock, so that no file is unlinked between its rename and the script that
refers to it. A refused publish leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common import logs
from common.catalogue import Job, JobState, Phase, Version
from common.catalogue.jobs import Claim, Moved, StaleClaim
from common.errors import CatalogueUnavailable, Overloaded, TabrelayError, Unavailable
from common.files import bury
from common.placement import HoldersFirst
from common.relay.client import Lost, Refused
from common.relay.wire import Question
from common.retention import Retention
from fit_workers.report import Reporter
from fit_workers.worker import Worker

if TYPE_CHECKING:
    from common.contexts.build import Built
    from common.contexts.manifest import Manifest
    from common.contexts.reader import MappedContext

log = logs.get("fit")

#: How long a prefetch may hold up the next fit: one that loads, and one that finds no worker.
PREFETCH_S = 30.0
UNREACHED_S = 5.0
#: Seconds between tries to publish while the catalogue can't be reached.
RETRY_S = 0.5


@dataclass(frozen=True)
class Ready:
    """A context that may be published: fresh from a fit, or known from an earlier one."""

    digest: str
    manifest: Manifest
    nbytes: int
    fit_s: float
    largest_difference: float
    built: Built | None = None

    @classmethod
    def of_new(cls, built: Built, fit_s: float) -> Ready:
        """A context in its temporary file."""
        fit_s = round(fit_s, 3)
        return cls(built.digest, built.manifest, built.nbytes, fit_s, built.largest_difference, built)

    @classmethod
    def of_known(cls, digest: str, mapped: MappedContext, difference: float) -> Ready:
        """A context that an earlier fit published."""
        return cls(digest, mapped.manifest, mapped.nbytes, 0.0, difference)


class Publisher:
    """Publishes for one claim."""

    def __init__(self, worker: Worker, claim: Claim, reporter: Reporter) -> None:
        self._worker = worker
        self._claim = claim
        self._reporter = reporter

    def publish(self, ready: Ready) -> None:
        """Publish and end the job; raises StaleClaim, Cancelled or FitTimeout, and then nothing was published.

        When the job was cancelled but others had joined it, the first of those is published in its place.
        """
        worker = self._worker
        self._reporter.phase(Phase.PUBLISHING)
        tenant = self._claim.job.tenant
        with self._room_for(tenant, ready), worker.folder.locked(tenant):
            worker.catalogue.epoch.require()
            if ready.built is not None:
                ready.built.publish()
            try:
                version = self._publish_for_whom_it_is(ready)
            except CatalogueUnavailable:
                raise  # it may have gone through: the file stays until it is known to be nobody's
            except BaseException:
                self._withdraw(ready)
                raise
        job = self._claim.job
        log.info(
            "published",
            job=job.id,
            dataset=job.dataset,
            version=version.version,
            context=version.context[:12],
            bytes=version.context_bytes,
        )
        self._learn(job, ready)
        self._after(job, version)

    def _publish_for_whom_it_is(self, ready: Ready) -> Version:
        records = self._worker.records
        while True:
            job = self._claim.job
            version = self._version(job, ready)
            records.intend(job.tenant, job.dataset, version)
            try:
                self._commit(version)
            except Moved:
                records.aborted(job.tenant, job.dataset, version.version)
                continue
            except CatalogueUnavailable:
                raise  # it may have gone through: the intent stays open, and rebuild decides by what it finds
            except BaseException:
                records.aborted(job.tenant, job.dataset, version.version)
                raise
            records.published(job.tenant, job.dataset, version.version)
            return version

    def _version(self, job: Job, ready: Ready) -> Version:
        manifest = ready.manifest
        return Version(
            version=job.version,
            context=ready.digest,
            key=manifest.key,
            table=manifest.table,
            job=job.id,
            model=manifest.model,
            task=manifest.task,
            rows=manifest.rows,
            columns=manifest.columns,
            context_bytes=ready.nbytes,
            created_ms=int(time.time() * 1000),
            schema=manifest.schema,
            target=manifest.target,
            licence=self._worker.registry.spec(manifest.model).licence,
            fit_s=ready.fit_s,
            options=manifest.options,
            ttl_s=job.ttl_s,
            precision=manifest.precision,
            cache=manifest.cache,
            largest_difference=ready.largest_difference,
        )

    def _room_for(self, tenant: str, ready: Ready) -> contextlib.AbstractContextManager[None]:
        """Room within the disk budget, kept until the publish is through; raises StorageFull."""
        if ready.built is None:
            return contextlib.nullcontext()
        worker = self._worker
        retention = Retention(worker.catalogue, worker.folder, worker.records, worker.settings)
        return retention.room_for(tenant, ready.digest, ready.nbytes)

    def _learn(self, job: Job, ready: Ready) -> None:
        """Remember what the job took beside what was estimated, for the remaining time of later ones."""
        speed, real_s = self._worker.catalogue.speed, sum(self._reporter.timings_ms.values()) / 1000
        try:
            if ready.built is None:
                speed.republished(job.queue, real_s=real_s)
                return
            device = self._worker.settings.device
            speed.fitted(job.model, device, job.queue, estimated_s=job.estimate_s, real_s=real_s)
        except CatalogueUnavailable:
            log.warning("the fit's speed is not remembered, the catalogue can't be reached", job=job.id)

    def _commit(self, version: Version) -> None:
        """The one transaction; tried again while the catalogue can't be reached and the lease may still hold."""
        jobs = self._worker.catalogue.jobs
        until = time.monotonic() + self._worker.settings.lease_s
        timings = self._reporter.done()
        while True:
            try:
                jobs.publish(self._claim, version, timings)
                return
            except CatalogueUnavailable:
                if time.monotonic() > until:
                    raise
                time.sleep(RETRY_S)
            except StaleClaim:
                # An earlier try may have gone through although its answer was lost.
                job = jobs.get(self._claim.job.tenant, self._claim.job.id)
                if job.state is JobState.SUCCEEDED and job.attempt == self._claim.job.attempt:
                    return
                raise

    def _withdraw(self, ready: Ready) -> None:
        """Remove the file of a refused publish, unless another version refers to the same content."""
        if ready.built is None:
            return
        job = self._claim.job
        try:
            catalogue = self._worker.catalogue
            # Asked in this order: one that was emptied after the first answer fails the second.
            referred = catalogue.datasets.is_referred(job.tenant, "context", ready.digest)
            if not catalogue.epoch.matches():
                return  # an emptied catalogue knows of no reference; the file may be another version's too
        except CatalogueUnavailable:
            return  # without the catalogue nothing may be removed; the file is found by its missing reference
        if not referred:
            for path in self._worker.folder.tiers(job.tenant, "context", ready.digest):
                path.unlink(missing_ok=True)

    def _after(self, job: Job, version: Version) -> None:
        """Host tier, prefetch, removal of what the new version replaced: none of it can undo the publish."""
        worker = self._worker
        try:
            worker.store.copy_to_host(
                job.tenant, version.context, worker.catalogue.datasets.pinned_contexts()
            )
            bury(worker.folder, worker.catalogue, job.tenant)
            self._prefetch(job.tenant, version)
        except (TabrelayError, OSError) as error:
            log.warning("published, but not prefetched", job=job.id, error=str(error))

    def _prefetch(self, tenant: str, version: Version) -> None:
        """Have the placed predict worker load the context, so that the first predict is warm."""
        question = Question(tenant, version.context, version.model, version.task, "prefetch", PREFETCH_S)
        until = time.monotonic() + UNREACHED_S
        while True:
            workers = self._worker.catalogue.workers.predict()
            for placed in HoldersFirst().order(tenant, version, workers):
                try:
                    self._worker.connections.prefetch(placed.address, question, PREFETCH_S)
                    return
                except (Refused, Lost, Unavailable, Overloaded):
                    continue
            if not workers or time.monotonic() > until:
                log.warning("published, but no predict worker loaded it", context=version.context[:12])
                return
            time.sleep(RETRY_S)  # one that was restarted listens again soon
