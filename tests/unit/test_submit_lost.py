"""A submission whose answer from Redis is lost may have been accepted: what its job needs stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakeredis
import pytest

from common.catalogue import Catalogue, JobState
from common.catalogue.jobs import Jobs
from common.errors import CatalogueUnavailable, QueueFull
from common.files import DataFolder
from common.models.registry import Registry
from common.service.fits import FitRequest, FitService
from common.settings import Settings
from common.tables.child import ParserChild
from tests.support import as_csv, numeric


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, default_model="tabicl-mini", max_inline_parse_bytes=20_000)


@pytest.fixture
def catalogue(settings: Settings) -> Catalogue:
    return Catalogue(fakeredis.FakeRedis(decode_responses=True), settings)


@pytest.fixture
def service(catalogue: Catalogue, settings: Settings) -> Iterator[FitService]:
    with ParserChild(2**31, 60, 10) as parser:
        yield FitService(catalogue, Registry(settings), parser, settings, lambda _: None)


def request(settings: Settings, rows: int) -> FitRequest:
    path = DataFolder(settings).uploads() / ".incoming"
    path.write_bytes(as_csv(numeric(rows=rows)))
    return FitRequest("default", path, "csv", dataset="d", target="y")


@pytest.mark.parametrize("rows", [40, 2000])
def test_a_submission_that_was_accepted_unheard_keeps_its_table(
    service: FitService, catalogue: Catalogue, settings: Settings, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    submit = Jobs.submit

    def unheard(self: Jobs, *args: Any, **kwargs: Any) -> Any:
        submit(self, *args, **kwargs)
        raise CatalogueUnavailable

    monkeypatch.setattr(Jobs, "submit", unheard)
    with pytest.raises(CatalogueUnavailable):
        service.submit(request(settings, rows))
    ((job,), _) = catalogue.jobs.page("default", state=None, dataset=None, limit=5, cursor=None)
    assert job.state is JobState.QUEUED
    folder = DataFolder(settings)
    needed = folder.upload(job.upload.id) if job.upload else folder.table("default", job.table)
    assert needed.exists()


@pytest.mark.parametrize("rows", [40, 2000])
def test_a_submission_that_is_refused_leaves_no_file(
    service: FitService, settings: Settings, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise QueueFull

    monkeypatch.setattr(Jobs, "submit", full)
    with pytest.raises(QueueFull):
        service.submit(request(settings, rows))
    left = [p for folder in ("uploads", "tables") for p in (settings.data / folder).rglob("*") if p.is_file()]
    assert left == []
