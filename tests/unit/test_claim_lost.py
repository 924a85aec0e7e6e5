"""What a fit child does when the catalogue, or the tenant's lock, is away: no job is held for ever, none fails for it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fakeredis
import pytest

from common import files
from common.catalogue import Catalogue, Job, JobState
from common.catalogue.jobs import Jobs
from common.errors import CatalogueUnavailable, FilesBusy, InvalidTable, TabrelayError
from common.names import new_id
from common.settings import Settings
from fit_workers import fit
from tests.unit.test_catalogue import QUEUE, new


class Ended(Exception):
    """The process would have ended here."""


def test_a_child_whose_claim_was_not_answered_ends_so_that_its_parent_gives_the_job_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def claim(*_: object) -> None:
        raise CatalogueUnavailable

    def end(status: int) -> None:
        raise Ended(status)

    worker = SimpleNamespace(catalogue=SimpleNamespace(jobs=SimpleNamespace(claim=claim)))
    monkeypatch.setattr(fit, "_worker", lambda _: worker)
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(Ended):
        fit.fit_next("fit-0", "fit-0:life", "fit.small")


@pytest.fixture
def catalogue() -> Catalogue:
    return Catalogue(fakeredis.FakeRedis(decode_responses=True), Settings(lease_s=0.05))


def attempt(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch, error: TabrelayError) -> Job:
    """The job after an attempt whose work raised this."""
    job = catalogue.jobs.submit(new()).job
    claim = catalogue.jobs.claim(QUEUE, "w", 1, new_id())
    assert claim is not None

    def work(_: fit.FitRun) -> None:
        raise error

    monkeypatch.setattr(fit.FitRun, "_fit", work)
    monkeypatch.setattr(fit, "GIVE_BACK_S", 0.01)
    worker: Any = SimpleNamespace(catalogue=catalogue, settings=Settings(lease_s=0.05))
    fit.FitRun(worker, claim).run()
    return catalogue.jobs.get("default", job.id)


@pytest.mark.parametrize("error", [CatalogueUnavailable(), FilesBusy()])
def test_a_fault_of_what_is_around_a_job_puts_it_back_uncounted(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch, error: TabrelayError
) -> None:
    job = attempt(catalogue, monkeypatch, error)
    assert (job.state, job.attempt, catalogue.jobs.position(job)) == (JobState.QUEUED, 0, 1)


def test_a_child_that_can_t_give_its_job_back_within_the_lease_ends(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise CatalogueUnavailable

    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(Jobs, "hand_back", away)
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(Ended):
        attempt(catalogue, monkeypatch, CatalogueUnavailable())


def test_an_error_that_can_t_be_recorded_is_found_again_by_the_next_attempt(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise CatalogueUnavailable

    monkeypatch.setattr(Jobs, "fail", away)
    assert attempt(catalogue, monkeypatch, InvalidTable()).state is JobState.QUEUED


def test_a_tenant_s_lock_is_waited_for_only_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOCK_S", 0.05)
    folder = files.DataFolder(Settings(data_dir=tmp_path))
    with folder.locked("default"):
        with pytest.raises(FilesBusy), folder.locked("default"):
            pass
        with folder.locked("other"):
            pass
    with folder.locked("default"):
        pass
