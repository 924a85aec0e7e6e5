"""`predict`."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tabrelay.cli.options import AsJson, Key, Url, connect
from tabrelay.cli.output import print_json, print_table, text

if TYPE_CHECKING:
    from tabrelay.client import Prediction

#: Rows shown on a terminal; a file gets them all.
SHOWN_ROWS = 20
#: Characters between two columns of a table.
GAP = 2


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: tabrelay predict churn new.csv --out answered.csv")(predict)


def predict(
    ctx: typer.Context,
    dataset: Annotated[str, typer.Argument(metavar="DATASET", help="The dataset to ask.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Rows as CSV, Parquet, Arrow or JSON.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where to write rows and predictions: .csv, .parquet or - for CSV here."),
    ] = None,
    version: Annotated[
        int | None, typer.Option("--version", min=1, help="The current one when not given.")
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", help="proba, label; mean, median, mode or quantiles.")
    ] = None,
    quantiles: Annotated[
        str | None, typer.Option("--quantiles", metavar="A,B,..", help="Levels, such as 0.05,0.5,0.95.")
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option("--threshold", min=0, max=1, help="Of two classes the second from this probability on."),
    ] = None,
    encoding: Annotated[
        str | None, typer.Option("--encoding", help="Of a CSV that is not UTF-8, such as latin-1.")
    ] = None,
    deadline_s: Annotated[float | None, typer.Option("--deadline-s", min=0.001, help="Longest wait.")] = None,
    as_json: AsJson = False,
    url: Url = None,
    api_key: Key = None,
) -> None:
    """Ask a dataset for predictions of a file's rows."""
    from tabrelay.cli import joined

    to_file = out is not None and str(out) != "-"
    if out is not None and to_file:
        joined.output_kind(out)
    levels = None if quantiles is None else parse_levels(quantiles)
    with connect(ctx, url, api_key) as client:
        told = client.predict(
            dataset,
            file,
            version=version,
            output=output or ("quantiles" if levels else None),
            quantiles=levels,
            threshold=threshold,
            encoding=encoding,
            deadline_s=deadline_s,
        )
    if out is not None and to_file:
        joined.write_file(file, told, out, encoding)
        facts = {"out": str(out), "rows": len(told), "dataset": told.dataset, "version": told.version}
        if as_json:
            print_json(facts | {"model": told.model, "timings_ms": told.timings_ms})
        else:
            typer.echo(
                f"{len(told):,} rows answered by {told.dataset} version {told.version} ({told.model}) in {out}"
            )
    elif as_json:
        print_json({field.name: getattr(told, field.name) for field in dataclasses.fields(told)})
    elif out is None and sys.stdout.isatty():
        _print(file, told, encoding)
    else:
        joined.write_to_stdout(file, told, encoding)


def parse_levels(given: str) -> list[float]:
    """`0.05,0.5` as numbers between 0 and 1."""
    try:
        levels = [float(part) for part in given.split(",")]
    except ValueError:
        levels = []
    if not levels or not all(0 < level < 1 for level in levels):
        raise typer.BadParameter(
            f"--quantiles takes levels between 0 and 1, such as 0.05,0.5,0.95, not {given!r}"
        )
    return levels


def _print(file: Path, told: Prediction, encoding: str | None) -> None:
    """The first rows: the answers, then as many input columns as the terminal is wide."""
    from tabrelay.cli import joined

    header, rows = joined.read_rows(file, encoding)
    answers = told.columns()
    inputs = dict(zip(header, zip(*rows[:SHOWN_ROWS], strict=True), strict=True)) if rows else {}
    columns = {name: values[:SHOWN_ROWS] for name, values in answers.items()}
    columns |= {name: list(values) for name, values in inputs.items() if name not in answers}
    left = shutil.get_terminal_size().columns
    shown: list[str] = []
    for name, values in columns.items():
        left -= max(len(text(value)) for value in [name, *values]) + GAP
        if left < 0 and len(shown) >= len(answers):
            break
        shown.append(name)
    print_table(shown, zip(*(columns[name] for name in shown), strict=True), empty="no rows")
    hidden = (max(0, len(told) - SHOWN_ROWS), len(columns) - len(shown))
    if any(hidden):
        typer.echo(f"and {hidden[0]:,} more rows, {hidden[1]:,} more columns; write them all with --out FILE")
