"""Fitting again what was accepted before: a job that ended without a result, a context that can't be used any more."""

from __future__ import annotations

from common import logs
from common.admission import estimate_fit_s, settle
from common.catalogue import Catalogue, Job, Version
from common.catalogue.jobs import Submitted
from common.catalogue.records import JobState, NewJob, Priority, Reason, Upload
from common.errors import (
    CatalogueUnavailable,
    Conflict,
    ContextDamaged,
    ContextGone,
    ContextIncompatible,
    InvalidRequest,
    TabrelayError,
)
from common.files import DataFolder
from common.models.registry import Registry
from common.names import new_id
from common.service.fits import Wake, context_key, queue_of
from common.settings import Settings

log = logs.get("refits")


class RefitService:
    """Submits fits from tables that are kept."""

    def __init__(self, catalogue: Catalogue, registry: Registry, settings: Settings, wake: Wake) -> None:
        self._catalogue = catalogue
        self._registry = registry
        self._settings = settings
        self._folder = DataFolder(settings)
        self._wake = wake

    def retry(self, tenant: str, job_id: str) -> Submitted:
        """The same fit once more, as a new job; the old one leaves the dead-letter list.

        Raises JobNotFound, Conflict (it has not failed, or its table is no longer kept), QueueFull.
        """
        old = self._catalogue.jobs.get(tenant, job_id)
        if old.state not in (JobState.FAILED, JobState.CANCELLED):
            raise Conflict(f"the job is {old.state}; only a failed or cancelled one can be retried")
        job = new_id()
        new = NewJob(
            id=job,
            tenant=tenant,
            dataset=old.dataset,
            model=old.model,
            task=old.task,
            target=old.target,
            options=old.options,
            queue=old.queue,
            key=old.key,
            table=old.table,
            upload=None if old.upload is None else Upload(job, old.upload.format, old.upload.encoding),
            rows=old.rows,
            columns=old.columns,
            schema=old.schema,
            estimate_s=old.estimate_s,
            priority=old.priority,
            ttl_s=old.ttl_s,
            retry_of=old.id,
        )
        submitted = self._submit_upload(old, new) if new.upload else self._submit_kept(new)
        self._catalogue.jobs.undead(tenant, old.id)
        self._wake_for(submitted)
        return submitted

    def refit(self, tenant: str, dataset: str, version: Version, gone: ContextGone) -> Job | None:
        """Fit a dataset's current version again because its context is gone; None when that is impossible.

        A fit that is under way for the dataset is answer enough. The new context has the next version number.
        """
        if not self._settings.refit_on_upgrade:
            return None
        try:
            found = self._catalogue.datasets.get(tenant, dataset)
            pending = self._catalogue.jobs.pending(tenant, dataset)
            if pending:
                return pending[0]
            if found.current != version.version or not self._folder.table(tenant, version.table).exists():
                return None
            submitted = self._submit_kept(self._again(tenant, dataset, version, gone))
            self._wake_for(submitted)
        except TabrelayError as error:
            log.warning("a dataset could not be fitted again", dataset=dataset, error=str(error))
            return None
        log.info(
            "a dataset is fitted again", dataset=dataset, job=submitted.job.id, reason=submitted.job.reason
        )
        return submitted.job

    def _again(self, tenant: str, dataset: str, version: Version, gone: ContextGone) -> NewJob:
        spec = self._registry.spec(version.model)
        weights = self._registry.weights(spec.name, version.task)
        target = str(version.target["name"])
        settled = settle(
            spec,
            version.options,
            rows=version.rows,
            columns=version.columns,
            classes=len(version.target["classes"]),
            settings=self._settings,
        )
        estimate_s = estimate_fit_s(spec, version.rows, version.columns, version.options)
        return NewJob(
            id=new_id(),
            tenant=tenant,
            dataset=dataset,
            model=spec.name,
            task=version.task,
            target=target,
            options=version.options,
            queue=queue_of(estimate_s, self._settings),
            key=context_key(
                table=version.table,
                target=target,
                task=version.task,
                spec=spec,
                weights=weights.digest,
                options=settled,
            ),
            table=version.table,
            rows=version.rows,
            columns=version.columns,
            estimate_s=estimate_s,
            priority=Priority.INTERACTIVE,
            reason=_reason(gone),
        )

    def _submit_kept(self, new: NewJob) -> Submitted:
        with self._folder.locked(new.tenant):
            if not new.table or not self._folder.table(new.tenant, new.table).exists():
                raise Conflict("the job's table is no longer kept; submit the fit again")
            return self._catalogue.jobs.submit(new, again=True)

    def _submit_upload(self, old: Job, new: NewJob) -> Submitted:
        """The raw upload goes over to the new job under its id; it goes back when that is refused."""
        if old.upload is None or new.upload is None:
            raise InvalidRequest("the job has no upload")
        before, after = self._folder.upload(old.upload.id), self._folder.upload(new.upload.id)
        try:
            before.rename(after)
        except FileNotFoundError as error:
            raise Conflict("the job's upload is no longer kept; submit the fit again") from error
        try:
            return self._catalogue.jobs.submit(new, again=True)
        except CatalogueUnavailable:
            raise  # it may be accepted although the answer is lost
        except BaseException:
            after.rename(before)
            raise

    def _wake_for(self, submitted: Submitted) -> None:
        if submitted.outcome == "accepted":
            self._wake(submitted.job.queue)


def _reason(gone: ContextGone) -> Reason:
    if isinstance(gone, ContextIncompatible):
        return Reason.UPGRADE
    return Reason.DAMAGED if isinstance(gone, ContextDamaged) else Reason.LOST
