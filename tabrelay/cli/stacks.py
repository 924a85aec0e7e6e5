"""`up` and `demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tabrelay.cli.options import AsJson


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(epilog="Example: tabrelay up --port 8000 --data-dir data --predict-workers 2")(up)
    app.command(epilog="Example: tabrelay demo --keep --data-dir demo-data")(demo)


def up(
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port of the API; 0 takes a free one.")
    ] = 8000,
    host: Annotated[str, typer.Option("--host", help="Address that the API listens on.")] = "127.0.0.1",
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="Folder that keeps everything.")] = None,
    fit_workers: Annotated[
        int | None, typer.Option("--fit-workers", min=1, help="One a device when not given.")
    ] = None,
    predict_workers: Annotated[
        int | None, typer.Option("--predict-workers", min=1, help="One a device when not given.")
    ] = None,
    fit_devices: Annotated[str | None, typer.Option("--fit-devices", help="cpu, or cuda:0,cuda:1.")] = None,
    predict_devices: Annotated[
        str | None, typer.Option("--predict-devices", help="cpu, or cuda:0,cuda:1.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", metavar="NAME[=PATH]", help="A model to serve, with local weights; may be repeated."
        ),
    ] = None,
    queues: Annotated[
        list[str] | None,
        typer.Option(
            "--queues",
            metavar="fit.small,fit.large",
            help="Queues of each fit worker in turn; may be repeated, both when not given.",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Compute threads of a worker.")
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option("--redis-url", help="A Redis or Valkey of your own; an embedded one when not given."),
    ] = None,
) -> None:
    """Start the whole service on this machine; Ctrl-C stops it.

    Writes `ready http://HOST:PORT` once it answers.
    """
    from tabrelay.up.stack import StackOptions, run_up

    given = {
        "data_dir": data_dir,
        "fit_workers": fit_workers,
        "predict_workers": predict_workers,
        "fit_devices": fit_devices,
        "predict_devices": predict_devices,
        "models": tuple(model) if model else None,
        "queues": tuple(queues) if queues else None,
        "threads": threads,
        "redis_url": redis_url,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    raise typer.Exit(run_up(StackOptions(port=port, host=host, **chosen)))  # type: ignore[arg-type]  # named above


def demo(
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="Folder to use; a temporary one when not given.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the service running at the end, until Ctrl-C.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the whole service at work: start it, fit four tables, predict, stop it."""
    from tabrelay.demo import run_demo

    raise typer.Exit(run_demo(data_dir=data_dir, keep=keep, as_json=as_json))
