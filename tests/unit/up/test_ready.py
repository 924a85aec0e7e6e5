"""When the API counts as ready."""

from __future__ import annotations

import json

import pytest

from common.process import Bind
from tabrelay.up.ready import ApiAnswers


@pytest.mark.parametrize(
    ("status", "missing", "ready"),
    [
        (200, {}, True),
        (503, {"epoch": "run rebuild"}, True),
        (503, {"epoch": "run rebuild", "fit_workers": "none"}, False),
        (503, {"model": "no weights"}, False),
        (500, {"epoch": "x"}, False),
    ],
)
def test_an_api_that_only_waits_for_a_rebuild_is_ready(
    status: int, missing: dict[str, str], ready: bool
) -> None:
    check = ApiAnswers(Bind(path="/nowhere"))
    assert check.accepts(status, json.dumps({"missing": missing}).encode()) is ready


def test_an_answer_that_is_no_json_is_not_ready() -> None:
    assert not ApiAnswers(Bind(path="/nowhere")).accepts(503, b"<html>")
