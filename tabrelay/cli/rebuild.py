"""`catalogue rebuild`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tabrelay.cli.options import AsJson
from tabrelay.cli.output import print_facts, print_json, print_table

if TYPE_CHECKING:
    from common.service.rebuild import Rebuilt
    from common.settings import Settings


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    group.command(epilog="Example: tabrelay catalogue rebuild --data-dir data")(rebuild)
    group.callback()(_group)
    app.add_typer(group, name="catalogue")


def _group() -> None:
    """Look after the catalogue, which lives in Redis."""


def rebuild(
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="The stack's folder; TABRELAY_DATA_DIR when not given.")
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(
            "--redis-url",
            help="Its Redis or Valkey; TABRELAY_REDIS_URL, or the running stack's own, when not given.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Bring datasets, versions and pins back after Redis lost them, from the data folder's files.

    Runs beside the running stack and only adds what is missing; on a whole catalogue it changes nothing.
    """
    from common.catalogue import Catalogue
    from common.catalogue.connection import connect
    from common.service.rebuild import Rebuild

    settings = _settings(data_dir, redis_url)
    catalogue = Catalogue(connect(settings.redis_url), settings)
    try:
        report = Rebuild(catalogue, settings).run()
    finally:
        catalogue.client.close()
    if as_json:
        print_json(report.encode())
    else:
        _show(report)


def _settings(data_dir: Path | None, redis_url: str | None) -> Settings:
    """The settings of the stack on that folder; a ValueError says what is wrong with them."""
    from common.settings import Settings
    from tabrelay.up.redis_server import running_url

    given: dict[str, Any] = {"data_dir": data_dir, "redis_url": redis_url}
    settings = Settings.load(**{name: value for name, value in given.items() if value is not None})
    if not settings.data.is_dir():
        raise ValueError(f"there is no data folder {settings.data}")
    if "redis_url" not in settings.model_fields_set:
        embedded = running_url(settings)
        if embedded is None and (settings.data / "redis").is_dir():
            raise ValueError(
                f"no stack runs on {settings.data}: start it with `tabrelay up`, then run this again"
            )
        if embedded is not None:
            settings = settings.model_copy(update={"redis_url": embedded})
    return settings


def _show(report: Rebuilt) -> None:
    if not report.changed:
        typer.echo(
            f"nothing to restore: the catalogue holds {report.known_datasets} datasets with "
            f"{report.known_versions} versions"
        )
    else:
        print_facts(
            {
                "datasets restored": report.datasets,
                "versions restored": report.versions,
                "pins restored": report.pins,
                "versions that were there": report.known_versions,
                "epoch": "written" if report.epoch else "unchanged",
            }
        )
    if report.unreadable_lines:
        typer.echo(f"{report.unreadable_lines} lines of the record file make no sense and were passed over")
    if report.not_restored:
        typer.echo("")
        print_table(
            ["not restored", "version", "tenant", "context", "why", "detail"],
            [
                (
                    entry.dataset or "-",
                    entry.version or "-",
                    entry.tenant,
                    entry.context[:16],
                    entry.reason,
                    entry.detail,
                )
                for entry in report.not_restored
            ],
            empty="",
        )
