"""`datasets`, `dataset`, `delete`, `pin`, `unpin`, `models`, `limits`, `workers` and `version`."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from tabrelay.cli.options import AsJson, Key, Url, connect
from tabrelay.cli.output import print_facts, print_json, print_table, shape, size

Name = Annotated[str, typer.Argument(metavar="NAME", help="The dataset's name.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(epilog="Example: tabrelay datasets")(datasets)
    app.command(epilog="Example: tabrelay dataset churn")(dataset)
    app.command(epilog="Example: tabrelay delete churn --yes")(delete)
    app.command(epilog="Example: tabrelay pin churn")(pin)
    app.command(epilog="Example: tabrelay unpin churn")(unpin)
    app.command(epilog="Example: tabrelay models")(models)
    app.command(epilog="Example: tabrelay limits --json")(limits)
    app.command(epilog="Example: tabrelay workers")(workers)
    app.command(epilog="Example: tabrelay version")(version)


def datasets(ctx: typer.Context, as_json: AsJson = False, url: Url = None, api_key: Key = None) -> None:
    """List the datasets."""
    with connect(ctx, url, api_key) as client:
        found = client.datasets()
    if as_json:
        print_json(found)
        return
    print_table(
        ["dataset", "version", "model", "task", "rows x columns", "context", "pinned", "updated"],
        [
            (
                d.name,
                d.version,
                d.model,
                d.task,
                shape(d.rows, d.columns),
                size(d.bytes),
                d.pinned,
                d.updated_at,
            )
            for d in found
        ],
        empty="no datasets; make one with `tabrelay fit FILE --target COLUMN --dataset NAME`",
    )


def dataset(
    ctx: typer.Context, name: Name, as_json: AsJson = False, url: Url = None, api_key: Key = None
) -> None:
    """Show one dataset: its versions, where they are, and its columns."""
    with connect(ctx, url, api_key) as client:
        found = client.dataset(name)
    if as_json:
        print_json(found)
        return
    print_facts(
        {
            "dataset": found.name,
            "version": found.version,
            "model": found.model,
            "task": found.task,
            "rows x columns": shape(found.rows, found.columns),
            "context size": size(found.bytes),
            "pinned": found.pinned,
            "updated": found.updated_at,
            "expires": found.raw.get("expires_at"),
            "target": found.raw.get("target"),
            "columns": _column_names(found.raw.get("schema")),
        }
    )
    typer.echo("")
    print_table(
        ["version", "context", "model", "rows x columns", "size", "tiers", "loaded on"],
        [
            (
                v.version,
                (v.context or "-")[:16],
                v.model,
                shape(v.rows, v.columns),
                size(v.bytes),
                v.raw.get("tiers"),
                v.raw.get("resident_on"),
            )
            for v in found.versions
        ],
        empty="no versions",
    )


def delete(
    ctx: typer.Context,
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    as_json: AsJson = False,
    url: Url = None,
    api_key: Key = None,
) -> None:
    """Delete a dataset with all its versions and files."""
    if not yes:
        if as_json or not sys.stdin.isatty():
            raise typer.BadParameter("nobody can be asked here; add --yes")
        typer.confirm(f"Delete {name} with all its versions?", abort=True, err=True)
    with connect(ctx, url, api_key) as client:
        client.delete(name)
    _done({"deleted": name}, f"deleted {name}", as_json=as_json)


def pin(
    ctx: typer.Context, name: Name, as_json: AsJson = False, url: Url = None, api_key: Key = None
) -> None:
    """Keep a dataset loaded."""
    with connect(ctx, url, api_key) as client:
        client.pin(name)
    _done({"name": name, "pinned": True}, f"pinned {name}", as_json=as_json)


def unpin(
    ctx: typer.Context, name: Name, as_json: AsJson = False, url: Url = None, api_key: Key = None
) -> None:
    """Let a dataset be moved out of memory again."""
    with connect(ctx, url, api_key) as client:
        client.pin(name, False)
    _done({"name": name, "pinned": False}, f"unpinned {name}", as_json=as_json)


def models(ctx: typer.Context, as_json: AsJson = False, url: Url = None, api_key: Key = None) -> None:
    """List the models that fits may name."""
    with connect(ctx, url, api_key) as client:
        found = client.models()
    if as_json:
        print_json(found)
        return
    print_table(
        ["model", "tasks", "ready for", "default", "licence"],
        [(m.name, m.tasks, m.ready_tasks, m.default, m.licence) for m in found],
        empty="no models",
    )


def limits(ctx: typer.Context, as_json: AsJson = False, url: Url = None, api_key: Key = None) -> None:
    """Show what the service accepts."""
    with connect(ctx, url, api_key) as client:
        found = client.limits()
    if as_json:
        print_json(found)
    else:
        print_facts(found)


def workers(ctx: typer.Context, as_json: AsJson = False, url: Url = None, api_key: Key = None) -> None:
    """List the workers."""
    with connect(ctx, url, api_key) as client:
        found = client.workers()
    if as_json:
        print_json(found)
        return
    columns = list(
        dict.fromkeys(name for worker in found for name, value in worker.items() if not _nested(value))
    )
    print_table(columns, [[worker.get(name) for name in columns] for worker in found], empty="no workers")


def version(as_json: AsJson = False) -> None:
    """Print this program's version."""
    import tabrelay

    _done({"version": tabrelay.__version__}, tabrelay.__version__, as_json=as_json)


def _done(value: dict[str, Any], line: str, *, as_json: bool) -> None:
    if as_json:
        print_json(value)
    else:
        typer.echo(line)


def _column_names(schema: Any) -> list[str] | None:
    """The names in a schema, given as a list of columns or an object that holds one."""
    if isinstance(schema, dict):
        schema = schema.get("columns") or schema.get("features")
    if not isinstance(schema, list):
        return None
    return [str(column.get("name") if isinstance(column, dict) else column) for column in schema]


def _nested(value: Any) -> bool:
    return isinstance(value, dict | list)
