"""The page of model quality says what was measured, and nothing else."""

from __future__ import annotations

import orjson

from bench.quality_page import PAGE, page
from bench.report import RESULTS
from common.models.registry import SPECS


def test_the_page_is_what_the_measurement_says() -> None:
    measured = orjson.loads((RESULTS / "quality.json").read_bytes())
    assert PAGE.read_text() == page(measured)


def test_nothing_is_claimed_of_weights_that_were_not_run() -> None:
    measured = orjson.loads((RESULTS / "quality.json").read_bytes())
    run = {model for table in measured["tables"] for model in table["scores"]}
    for name in SPECS:
        (line,) = (line for line in page(measured).splitlines() if line.startswith(f"| `{name}` |"))
        assert line.endswith("| below |" if name in run else "| not measured: weights are not here |")
    assert run <= {*SPECS, "HistGradientBoosting", "linear"}
