"""A claim may go through although its answer is lost; nobody may then hold the job without working on it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from common.errors import CatalogueUnavailable
from fit_workers import fit


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
