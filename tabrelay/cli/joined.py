"""A file of rows with its predictions beside them.

A CSV file's cells are copied as the text that they are. A column that has an answer's name is replaced, so
that an output file may be an input again.
"""

from __future__ import annotations

import csv
import gzip
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tabrelay.client import Invalid, Prediction
from tabrelay.client.answers import label_text
from tabrelay.client.tables import MEDIA_TYPES

DELIMITERS = (",", ";", "\t", "|")
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
PARQUET = MEDIA_TYPES[".parquet"]


def output_kind(path: Path) -> str:
    """`csv` or `parquet`, by the suffix."""
    media_type = MEDIA_TYPES.get(path.suffix.lower())
    if media_type not in ("text/csv", PARQUET):
        raise Invalid(
            f"can't tell the format of {path.name}: write to .csv or .parquet", code="unknown_format"
        )
    return "parquet" if media_type == PARQUET else "csv"


def write_file(source: Path, prediction: Prediction, out: Path, encoding: str | None = None) -> None:
    """Write the rows of `source` and their predictions to `out`, which appears only when it is whole.

    `encoding` is of a CSV source; UTF-8, or UTF-16 where it shows, when not given.
    """
    part = out.with_name(f".{out.name}.part")
    try:
        if output_kind(out) == "parquet":
            _write_parquet(source, prediction, part, encoding)
        else:
            with part.open("w", encoding="utf-8", newline="") as file:
                write_csv(source, prediction, file, encoding)
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)


def write_csv(source: Path, prediction: Prediction, file: IO[str], encoding: str | None = None) -> None:
    """Write the rows and their predictions as CSV."""
    header, rows = read_rows(source, encoding)
    answers = prediction.columns()
    _same_length(len(rows), len(prediction), source)
    kept = [index for index, name in enumerate(header) if name not in answers]
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([header[index] for index in kept] + list(answers))
    for row, *told in zip(rows, *answers.values(), strict=True):
        writer.writerow([row[index] for index in kept] + [_cell(value) for value in told])


def read_rows(source: Path, encoding: str | None = None) -> tuple[list[str], list[list[Any]]]:
    """The header and the rows of a file of any format."""
    if _media_type(source) == "text/csv":
        return _read_csv(source, encoding)
    table = _read_arrow(source)
    return table.column_names, [list(row.values()) for row in table.to_pylist()]


def _read_csv(source: Path, encoding: str | None) -> tuple[list[str], list[list[Any]]]:
    content = source.read_bytes()
    if content.startswith(GZIP_MAGIC):
        content = gzip.decompress(content)
    elif content.startswith(ZSTD_MAGIC):
        import pyarrow as pa

        content = pa.CompressedInputStream(io.BytesIO(content), "zstd").read()
    text = content.decode(encoding or _unicode(content))
    first_lines = text.lstrip("\r\n")[:65536]
    delimiter = max(
        DELIMITERS, key=lambda mark: len(next(csv.reader(io.StringIO(first_lines), delimiter=mark), []))
    )
    lines: Iterator[list[str]] = (
        row for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter) if row
    )
    header = next(lines, [])
    rows: list[list[Any]] = [row + [""] * (len(header) - len(row)) for row in lines]
    return header, rows


def _unicode(content: bytes) -> str:
    """Which Unicode encoding a text has: by its mark, else by where the zero byte of its first letter lies."""
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16"
    if content[:1] == b"\0":
        return "utf-16-be"
    return "utf-16-le" if content[1:2] == b"\0" else "utf-8-sig"


def _read_arrow(source: Path) -> Any:
    import pyarrow as pa

    media_type = _media_type(source)
    if media_type == PARQUET:
        import pyarrow.parquet as pq

        return pq.read_table(source)
    if media_type == "application/json":
        raise Invalid(
            "predictions can't be put beside a JSON file's rows; use --json without --out",
            code="unknown_format",
        )
    with pa.OSFile(str(source)) as file:
        is_stream = media_type == MEDIA_TYPES[".arrows"]
        return pa.ipc.open_stream(file).read_all() if is_stream else pa.ipc.open_file(file).read_all()


def _write_parquet(source: Path, prediction: Prediction, out: Path, encoding: str | None) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if _media_type(source) == "text/csv":
        header, rows = _read_csv(source, encoding)
        columns = list(zip(*rows, strict=True)) if rows else [() for _ in header]
        text: Mapping[str, Sequence[Any]] = dict(zip(header, columns, strict=True))
        table = _typed(pa.table({name: pa.array(cells, pa.string()) for name, cells in text.items()}))
    else:
        table = _read_arrow(source)
    _same_length(table.num_rows, len(prediction), source)
    for name, values in prediction.columns().items():
        if name in table.column_names:
            table = table.drop_columns([name])
        table = table.append_column(name, pa.array(values))
    pq.write_table(table, out)


def _typed(table: Any) -> Any:
    """CSV text as numbers where a whole column is numbers; all else stays text."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for index, name in enumerate(table.column_names):
        column = pc.if_else(pc.equal(table.column(index), ""), None, table.column(index))
        for kind in (pa.int64(), pa.float64()):
            try:
                column = column.cast(kind)
                break
            except pa.ArrowInvalid:
                continue
        table = table.set_column(index, name, column)
    return table


def _media_type(source: Path) -> str | None:
    return MEDIA_TYPES.get(Path(source.name.lower().removesuffix(".gz").removesuffix(".zst")).suffix)


def _same_length(rows: int, answers: int, source: Path) -> None:
    if rows != answers:
        raise Invalid(f"{source.name} has {rows:,} rows but {answers:,} were answered", code="rows_differ")


def _cell(value: Any) -> str:
    return "" if value is None else label_text(value)


def write_to_stdout(source: Path, prediction: Prediction, encoding: str | None = None) -> None:
    """CSV on standard output."""
    write_csv(source, prediction, sys.stdout, encoding)
