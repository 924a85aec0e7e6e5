"""`fit`, `jobs`, `job`, `cancel` and `retry`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tabrelay.cli.options import AsJson, Key, Url, connect
from tabrelay.cli.output import print_facts, print_json, print_table, seconds, shape, size
from tabrelay.cli.progress import board, describe

if TYPE_CHECKING:
    from tabrelay.client import Client, Job

JobId = Annotated[str, typer.Argument(metavar="ID", help="The job's id.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        epilog="Example: tabrelay fit churn.csv --target churned --dataset churn --option ensemble=4"
    )(fit)
    app.command(epilog="Example: tabrelay jobs --state running")(jobs)
    app.command(epilog="Example: tabrelay job JOB_ID --watch")(job)
    app.command(epilog="Example: tabrelay cancel JOB_ID")(cancel)
    app.command(epilog="Example: tabrelay retry JOB_ID")(retry)


def fit(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A CSV, Parquet, Arrow or JSON file.")],
    target: Annotated[str, typer.Option("--target", help="The column to predict.")],
    dataset: Annotated[str, typer.Option("--dataset", help="The name under which it answers.")],
    model: Annotated[str | None, typer.Option("--model", help="See `tabrelay models`.")] = None,
    task: Annotated[
        str | None, typer.Option("--task", help="classification or regression; guessed else.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="K=V", help="Such as precision=fp16 or cache=repr; repeatable."),
    ] = None,
    categorical: Annotated[
        list[str] | None, typer.Option("--categorical", metavar="COLUMN", help="Codes, not amounts; repeat.")
    ] = None,
    numeric: Annotated[
        list[str] | None, typer.Option("--numeric", metavar="COLUMN", help="Text that is numbers; repeat.")
    ] = None,
    datetime: Annotated[
        list[str] | None, typer.Option("--datetime", metavar="COLUMN", help="Text that is dates; repeat.")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option("--ignore", metavar="COLUMN", help="Left out; repeat.")
    ] = None,
    missing: Annotated[
        list[str] | None,
        typer.Option(
            "--missing", metavar="TEXT", help="A spelling of a missing cell, instead of NA and such."
        ),
    ] = None,
    encoding: Annotated[
        str | None, typer.Option("--encoding", help="Of a CSV that is not UTF-8, such as latin-1.")
    ] = None,
    priority: Annotated[
        str | None, typer.Option("--priority", help="interactive, or batch for what can wait.")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option("--deadline", metavar="SECONDS", help="Fail when not done by then.")
    ] = None,
    ttl: Annotated[
        float | None, typer.Option("--ttl", metavar="SECONDS", help="Delete the dataset so long after.")
    ] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return as soon as it is accepted.")] = False,
    as_json: AsJson = False,
    url: Url = None,
    api_key: Key = None,
) -> None:
    """Fit a table and publish it as the dataset's next version."""
    options = parse_options(option or ())
    lists = {
        "categorical": categorical,
        "numeric": numeric,
        "datetime": datetime,
        "ignore": ignore,
        "missing": missing,
    }
    schema = {name: names for name, names in lists.items() if names}
    with connect(ctx, url, api_key) as client:
        now = client.submit(
            file,
            target,
            dataset,
            model=model,
            task=task,
            options=options or None,
            schema=schema or None,
            encoding=encoding,
            priority=priority,
            deadline_s=deadline,
            ttl_s=ttl,
        )
        if not no_wait:
            now = _watched(client, now, quiet=as_json)
        _finish(now, as_json=as_json)


def jobs(
    ctx: typer.Context,
    state: Annotated[str | None, typer.Option("--state", help="queued, running, succeeded, ...")] = None,
    dataset: Annotated[str | None, typer.Option("--dataset", help="Only this dataset's.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="The newest so many.")] = 20,
    dead: Annotated[
        bool,
        typer.Option("--dead", help="Those whose worker died each time; `tabrelay retry` runs them again."),
    ] = False,
    as_json: AsJson = False,
    url: Url = None,
    api_key: Key = None,
) -> None:
    """List the newest jobs."""
    with connect(ctx, url, api_key) as client:
        if dead:
            found = [job for job in client.dead_letters() if dataset in (None, job.dataset)][:limit]
        else:
            found = client.jobs(state=state, dataset=dataset, limit=limit)
    if as_json:
        print_json(found)
        return
    print_table(
        ["job", "dataset", "version", "model", "rows x columns", "state", "created"],
        [
            (j.id, j.dataset, j.version, j.model, shape(j.rows, j.columns), describe(j), j.created_at)
            for j in found
        ],
        empty="no jobs",
    )


def job(
    ctx: typer.Context,
    job_id: JobId,
    watch: Annotated[bool, typer.Option("--watch", help="Follow it to its end.")] = False,
    events: Annotated[
        bool,
        typer.Option("--events", help="Follow it with a line for each change; --json: an object a line."),
    ] = False,
    as_json: AsJson = False,
    url: Url = None,
    api_key: Key = None,
) -> None:
    """Show one job; with --watch or --events the exit status tells how it ended."""
    with connect(ctx, url, api_key) as client:
        if events:
            _each(client, job_id, as_json=as_json)
            return
        now = client.job(job_id)
        if watch:
            _finish(_watched(client, now, quiet=as_json), as_json=as_json)
        else:
            _show(now, as_json=as_json)


def cancel(
    ctx: typer.Context, job_id: JobId, as_json: AsJson = False, url: Url = None, api_key: Key = None
) -> None:
    """Cancel a job; the dataset's current version goes on answering."""
    with connect(ctx, url, api_key) as client:
        now = client.cancel(job_id)
    if as_json:
        print_json(now)
    elif now.state == "cancelled":
        typer.echo(f"cancelled {now.id}")
    elif now.ended:
        typer.echo(f"{now.id} had ended before: {now.state}")
    else:
        typer.echo(f"{now.id} is being cancelled; it is {describe(now)}")


def retry(
    ctx: typer.Context,
    job_id: JobId,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return as soon as it is accepted.")] = False,
    as_json: AsJson = False,
    url: Url = None,
    api_key: Key = None,
) -> None:
    """Fit a failed or cancelled job's table once more."""
    with connect(ctx, url, api_key) as client:
        now = client.retry(job_id)
        if not no_wait:
            now = _watched(client, now, quiet=as_json)
        _finish(now, as_json=as_json)


def parse_options(given: Sequence[str]) -> dict[str, Any]:
    """`k=v` pairs; a value that is JSON is taken as such, any other as text."""
    options: dict[str, Any] = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"--option takes K=V, such as ensemble=4, not {pair!r}")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def _each(client: Client, job_id: str, *, as_json: bool) -> None:
    """Print every state of a job as it comes; a job without a result is an error."""
    for now in client.watch(job_id):
        print(json.dumps(now.raw) if as_json else describe(now), flush=True)
        if now.ended:
            now.raise_for_state()


def _watched(client: Client, started: Job, *, quiet: bool) -> Job:
    """Follow a job to its end; Ctrl-C leaves it running and says how to come back."""
    now = started
    try:
        with board(quiet=quiet) as shown:
            for now in client.watch(started):
                shown.show(now)
    except KeyboardInterrupt:
        again = "" if client.url == "http://127.0.0.1:8000" else f" --url {client.url}"
        print(
            f"tabrelay: the job goes on; follow it with `tabrelay job {now.id} --watch{again}`"
            f" or stop it with `tabrelay cancel {now.id}{again}`",
            file=sys.stderr,
        )
        raise
    return now


def _finish(now: Job, *, as_json: bool) -> None:
    """Show the last state; a job without a result is an error."""
    if as_json:
        print_json(now)
        now.raise_for_state()
        return
    now.raise_for_state()
    if not now.ended:
        typer.echo(f"accepted as job {now.id}; follow it with `tabrelay job {now.id} --watch`")
        return
    facts = (
        shape(now.rows, now.columns),
        now.model,
        now.context_bytes and f"context {size(now.context_bytes)}",
        now.seconds and seconds(now.seconds),
    )
    told = ", ".join(str(fact) for fact in facts if fact and fact != "-")
    typer.echo(f"{now.dataset} version {now.version} is ready" + (f": {told}" if told else ""))


def _show(now: Job, *, as_json: bool) -> None:
    if as_json:
        print_json(now)
        return
    print_facts(
        {
            "job": now.id,
            "state": describe(now),
            "error": None if now.error is None else f"{now.error.detail} [{now.error.code}]",
            "fields": [str(error) for error in now.error.errors] if now.error else None,
            "dataset": now.dataset,
            "version": now.version,
            "model": now.model,
            "task": now.task,
            "rows x columns": shape(now.rows, now.columns),
            "context": now.context,
            "context size": None if now.context_bytes is None else size(now.context_bytes),
            "precision": now.precision,
            "cache": now.cache,
            "largest difference": now.largest_difference,
            "attempt": now.attempt,
            "priority": now.priority,
            "waits for": now.waits_for,
            "deadline": now.deadline_at,
            "reason": now.reason,
            "retry of": now.retry_of,
            "created": now.created_at,
            "started": now.started_at,
            "finished": now.finished_at,
            "timings ms": dict(now.timings_ms),
        }
    )
