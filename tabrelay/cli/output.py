"""What commands print: tables for people, JSON for programs, and values in words."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from typing import Any

import typer

#: A table on a terminal may not be cut off in a pipe, where there is no width.
PIPE_WIDTH = 200
#: Cells up to this length are not folded.
UNFOLDED = 16


def print_json(value: Any) -> None:
    """One JSON value on standard output."""
    typer.echo(json.dumps(_plain(value), indent=2 if sys.stdout.isatty() else None, ensure_ascii=False))


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, empty: str, title: str | None = None
) -> None:
    """A table on standard output, or the line `empty`."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [[text(value) for value in row] for row in rows]
    if not cells:
        typer.echo(empty)
        return
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for index, name in enumerate(columns):
        longest = max(len(row[index]) for row in cells)
        # A header may be folded for lack of room, a short cell never is.
        table.add_column(name, overflow="fold", min_width=min(longest, UNFOLDED) if index else longest)
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
    console.print(table)


def print_facts(facts: Mapping[str, Any]) -> None:
    """One aligned line a fact; missing ones are left out."""
    shown = {name: text(value) for name, value in facts.items() if value not in (None, "", (), [], {})}
    width = max((len(name) for name in shown), default=0)
    for name, value in shown.items():
        typer.echo(f"{name:<{width}}  {value}")


def text(value: Any) -> str:
    """A value in words."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, datetime):
        return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    if isinstance(value, dict):
        return ", ".join(f"{name} {text(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(text(item) for item in value)
    return " ".join(str(value).split())


def size(value: float | None) -> str:
    """Bytes in words."""
    if value is None:
        return "-"
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


def seconds(value: float | None) -> str:
    """A duration in words."""
    if value is None:
        return "-"
    if value < 100:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def shape(rows: int | None, columns: int | None) -> str:
    """Rows x columns in words."""
    return "-" if rows is None or columns is None else f"{rows:,} x {columns:,}"


def _plain(value: Any) -> Any:
    """Answers as they came, everything else as JSON has it."""
    raw = getattr(value, "raw", None)
    if isinstance(raw, Mapping):
        return _plain(raw)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.isoformat() if isinstance(value, date) else value
