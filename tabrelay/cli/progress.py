"""How running fits look: bars on a terminal, plain lines where there is none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from tabrelay.cli.output import seconds

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from tabrelay.client import Job

#: A plain line is written when this much more is done.
PLAIN_STEP = 0.25


class Board(Protocol):
    """Shows jobs; `show` is called with each state that is seen."""

    def show(self, job: Job) -> None:
        """Show the job's present state."""


@contextmanager
def board(*, quiet: bool = False) -> Iterator[Board]:
    """Bars on standard error when it is a terminal, else lines; nothing when `quiet`."""
    if quiet:
        yield _Silence()
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (
            TextColumn("{task.fields[label]}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=Console(stderr=True, highlight=False)) as progress:
            yield _Bars(progress)
    else:
        yield _Lines()


def overall(job: Job) -> float:
    """How much of the job is done; of an older service, which tells only the phase's fraction, that."""
    if job.succeeded:
        return 1.0
    return (job.fraction if job.progress is None else job.progress) or 0.0


def describe(job: Job, *, whole: bool = True) -> str:
    """A job's state in words, such as `encoding 40%, about 3.0 s left`; `whole` with the percentage."""
    if job.ended:
        took = f" in {seconds(job.seconds)}" if job.succeeded and job.seconds is not None else ""
        return f"{job.state}{took}"
    if job.state == "queued":
        parts = ["queued"] if job.queue_position is None else [f"queued, position {job.queue_position}"]
    else:
        known = job.fraction is not None or job.progress is not None
        done = f" {overall(job):.0%}" if whole and known else ""
        parts = [f"{job.phase or job.state}{done}"]
    if job.attempt is not None and job.attempt > 1:
        parts.append(f"attempt {job.attempt}")
    if job.eta_s is not None:
        parts.append(f"about {seconds(job.eta_s)} left")
    return ", ".join(parts)


class _Silence:
    def show(self, job: Job) -> None:
        """Show nothing."""


class _Bars:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def show(self, job: Job) -> None:
        """Move the job's bar."""
        from rich.markup import escape

        if job.id not in self._tasks:
            self._tasks[job.id] = self._progress.add_task("", total=1.0, label=escape(job.dataset or job.id))
        self._progress.update(
            self._tasks[job.id], completed=overall(job), description=escape(describe(job, whole=False))
        )


class _Lines:
    def __init__(self) -> None:
        self._shown: dict[str, tuple[object, ...]] = {}

    def show(self, job: Job) -> None:
        """Write a line when the state, the phase, the attempt or a quarter of the work is new."""
        step = int(overall(job) / PLAIN_STEP)
        stage = (job.state, job.phase, job.queue_position, job.attempt, step)
        if self._shown.get(job.id) != stage:
            self._shown[job.id] = stage
            print(f"{job.dataset or job.id}: {describe(job)}", file=sys.stderr, flush=True)
