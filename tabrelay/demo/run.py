"""Starts a service, fits the demo's tables, predicts what was held out, and says how it went."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabrelay.cli.output import print_json, seconds
from tabrelay.cli.progress import board
from tabrelay.client import Client, Job, TabrelayHTTPError
from tabrelay.demo import report
from tabrelay.demo.tables import DemoTable, demo_tables

SINGLE_PREDICTS = 50
POLL_S = 0.2
#: A fit that has not ended after this long counts as failed.
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Outcome:
    """What one table's round trip gave; `reason` says what is wrong with it."""

    name: str
    rows: int
    columns: int
    score_name: str
    baseline: float
    model: str | None = None
    fit_s: float | None = None
    context_bytes: int | None = None
    predict_p50_ms: float | None = None
    score: float | None = None
    reason: str | None = None


def run_demo(*, data_dir: Path | None = None, keep: bool = False, as_json: bool = False) -> int:
    """Run the demo; 0 when every table did what it should."""
    from tabrelay.up.embedded import Stack
    from tabrelay.up.errors import CannotStart
    from tabrelay.up.stack import StackOptions

    say = _silent if as_json else _say
    started = time.monotonic()
    with _folder(data_dir) as folder:
        try:
            say("Starting Redis, a fit worker, a predict worker and the API ...")
            with Stack(StackOptions(port=0, data_dir=folder / "data"), quiet=True) as stack:
                say(f"ready at {stack.url} after {seconds(time.monotonic() - started)}\n")
                outcomes = _tour(stack.url, folder, quiet=as_json)
                took_s = time.monotonic() - started
                if as_json:
                    print_json({"tables": outcomes, "seconds": round(took_s, 1)})
                else:
                    _print(outcomes, took_s)
                    say(report.curl_lines(stack.url, folder))
                if keep:
                    _wait_for_ctrl_c(stack.url)
        except CannotStart as error:
            print(f"tabrelay demo: {error}", file=sys.stderr)
            return 1
    say(f"\nStopped. To start it for real:\n  {report.UP_COMMAND}")
    return int(any(outcome.reason for outcome in outcomes))


def tour(client: Client, tables: Sequence[DemoTable], folder: Path, *, quiet: bool) -> list[Outcome]:
    """Fit all tables at once, then predict each one's held-out part."""
    submitted: dict[str, Job] = {}
    for table in tables:
        path = folder / f"{table.name}.csv"
        table.train.to_csv(path, index=False)
        submitted[table.name] = client.submit(path, table.target, table.name)
    jobs = _followed(client, submitted, quiet=quiet)
    return [_judged(client, table, jobs[table.name], folder) for table in tables]


def _tour(url: str, folder: Path, *, quiet: bool) -> list[Outcome]:
    with Client(url, "") as client:
        return tour(client, demo_tables(), folder, quiet=quiet)


def _followed(client: Client, submitted: dict[str, Job], *, quiet: bool) -> dict[str, Job]:
    """Poll all jobs to their ends."""
    jobs = dict(submitted)
    ends = time.monotonic() + PATIENCE_S
    with board(quiet=quiet) as shown:
        for job in jobs.values():
            shown.show(job)
        while time.monotonic() < ends:
            running = [name for name, job in jobs.items() if not job.ended]
            if not running:
                break
            time.sleep(POLL_S)
            for name in running:
                jobs[name] = client.job(jobs[name].id)
                shown.show(jobs[name])
    return jobs


def _judged(client: Client, table: DemoTable, job: Job, folder: Path) -> Outcome:
    facts: dict[str, Any] = {
        "name": table.name,
        "rows": len(table.train),
        "columns": len(table.train.columns) - 1,
        "score_name": table.score_name,
        "baseline": table.baseline(),
        "model": job.model,
        "fit_s": job.seconds,
        "context_bytes": job.context_bytes,
    }
    if not job.succeeded:
        why = job.error.detail if job.error else f"the fit did not end within {PATIENCE_S:.0f} s"
        return Outcome(**facts, reason=why if job.state != "cancelled" else "the fit was cancelled")
    try:
        path = folder / f"{table.name}-new.csv"
        table.features.to_csv(path, index=False)
        score = table.score(list(client.predict(table.name, path).predictions))
        p50_ms = _single_p50_ms(client, table)
    except (TabrelayHTTPError, ValueError) as error:
        return Outcome(**facts, reason=str(error))
    return Outcome(**facts, score=score, predict_p50_ms=p50_ms, reason=_shortfall(table, score))


def _shortfall(table: DemoTable, score: float) -> str | None:
    if score <= table.baseline():
        return f"{table.score_name} {score:.3f} does not beat the baseline {table.baseline():.3f}"
    if table.least is not None and score < table.least:
        return f"{table.score_name} {score:.3f} is below {table.least:.2f}"
    return None


def _single_p50_ms(client: Client, table: DemoTable) -> float:
    """Median time of one-row predicts, one after another, as this client sees it."""
    records = table.features.astype(object).to_dict("records")
    spent: list[float] = []
    for index in range(SINGLE_PREDICTS):
        started = time.perf_counter()
        client.predict(table.name, [records[index % len(records)]])
        spent.append((time.perf_counter() - started) * 1000)
    return statistics.median(spent)


def _print(outcomes: Sequence[Outcome], took_s: float) -> None:
    report.print_outcomes(outcomes)
    models = sorted({outcome.model for outcome in outcomes if outcome.model})
    _say(f"\nmodel: {', '.join(models) or 'none'}; everything took {seconds(took_s)}")


def _wait_for_ctrl_c(url: str) -> None:
    print(f"\nStill running at {url}; Ctrl-C stops it.", file=sys.stderr, flush=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        pass


@contextmanager
def _folder(chosen: Path | None) -> Iterator[Path]:
    if chosen is not None:
        chosen.mkdir(parents=True, exist_ok=True)
        yield chosen.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="tabrelay-demo-", ignore_cleanup_errors=True) as made:
        yield Path(made)


def _say(text: str) -> None:
    print(text, flush=True)


def _silent(text: str) -> None:
    """Say nothing, as standard output is for JSON."""
