"""What the demo prints at its end."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tabrelay.cli.output import print_table, seconds, shape

if TYPE_CHECKING:
    from tabrelay.demo.run import Outcome

#: Folded by hand, so that the table fits 80 columns.
_HEADER = (
    "dataset",
    "rows x\ncolumns",
    "fit",
    "context\nMB",
    "predict\np50 ms",
    "score",
    "baseline",
    "verdict",
)
UP_COMMAND = ".venv/bin/tabrelay up"


def print_outcomes(outcomes: Sequence[Outcome]) -> None:
    """The one table, and a line for each thing that went wrong."""
    print_table(
        _HEADER,
        [_line(outcome) for outcome in outcomes],
        empty="nothing was fitted",
    )
    for outcome in outcomes:
        if outcome.reason:
            print(f"\n{outcome.name}: {' '.join(outcome.reason.split())}")


def curl_lines(url: str, folder: Path) -> str:
    """How to do the same without this program, against the running service."""
    table = shlex.quote(f"file=@{folder / 'churn.csv'}")
    return f"""
The same with curl, while the service runs (`tabrelay demo --keep` leaves it running):
  curl -s {url}/v1/fits -F {table} -F dataset=churn -F target=churned
  curl -s {url}/v1/jobs/JOB_ID
  curl -s {url}/v1/datasets/churn/predict -H 'Content-Type: application/json' \\
    -d '{{"records":[{{"plan":"basic","city":"Kyoto","signed_up":"2025-11-02","autopay":false,\
"support_calls":5,"monthly_spend":31.5,"last_complaint":"wrong bill"}}]}}'"""


def _line(outcome: Outcome) -> tuple[str, ...]:
    return (
        outcome.name,
        shape(outcome.rows, outcome.columns),
        seconds(outcome.fit_s),
        _number(None if outcome.context_bytes is None else outcome.context_bytes / 1e6, 2),
        _number(outcome.predict_p50_ms, 1),
        f"{_number(outcome.score, 3)} {'R2' if outcome.score_name == 'R2' else 'acc'}",
        _number(outcome.baseline, 3),
        "bad" if outcome.reason else "good",
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
