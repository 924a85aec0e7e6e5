"""Untrusted table files: CSV, Parquet, Arrow IPC and JSON, read within limits, faults named.

What comes out is the same for every format: distinct column names without surrounding whitespace, and columns
of bool, integer, float, decimal, string, date, time, timestamp, duration or null type; dictionaries are decoded, and
so are bytes that are UTF-8 text, as old writers of Parquet store it. Other types are refused by name. Shape limits are checked before the cells are in memory wherever the format allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from common.errors import FieldError, InvalidTable, MalformedBody, UnsupportedMediaType
from common.tables.csv_reader import read_csv
from common.tables.json_reader import loads_json, read_json, table_from_columns, table_from_json
from common.tables.shape import (
    TableLimits,
    check_bytes,
    check_columns,
    check_rows,
    checked_names,
    empty_table,
)
from common.tables.source import byte_chunks, compression

__all__ = [
    "CONTENT_TYPES",
    "FORMATS",
    "TableLimits",
    "detect_format",
    "loads_json",
    "read_table",
    "table_from_columns",
    "table_from_json",
]

FORMATS = ("csv", "parquet", "arrow", "json")
CONTENT_TYPES = {
    "text/csv": "csv",
    "application/vnd.apache.parquet": "parquet",
    "application/parquet": "parquet",
    "application/vnd.apache.arrow.stream": "arrow",
    "application/vnd.apache.arrow.file": "arrow",
    "application/json": "json",
}
SUFFIXES = {
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".json": "json",
}
#: Content types that say nothing about the content; the file's name decides.
VAGUE_TYPES = frozenset(
    {
        "",
        "application/octet-stream",
        "binary/octet-stream",
        "application/gzip",
        "application/x-gzip",
        "application/zstd",
        "text/plain",
    }
)
ARROW_FILE_MAGIC = b"ARROW1"
#: Types of bytes that may be text.
BYTES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)


def detect_format(filename: str | None, content_type: str | None) -> str:
    """`csv`, `parquet`, `arrow` or `json`, by the content type, else by the file's suffix (`.gz` or `.zst` may follow it).

    Raises UnsupportedMediaType that lists what is accepted.
    """
    media = (content_type or "").split(";")[0].strip().lower()
    if media in CONTENT_TYPES:
        return CONTENT_TYPES[media]
    if media in VAGUE_TYPES and filename:
        name = filename.lower().removesuffix(".gz").removesuffix(".zst")
        for suffix, format in SUFFIXES.items():
            if name.endswith(suffix):
                return format
    given = f"content type {media[:80]!r}" if media else "no content type"
    if filename:
        given += f" and file name {filename[-80:]!r}"
    accepted = ", ".join(CONTENT_TYPES)
    raise UnsupportedMediaType(
        f"Got {given}; accepted are {accepted}, and files that end in {', '.join(SUFFIXES)}."
    )


def read_table(
    path: Path,
    format: str,
    limits: TableLimits,
    *,
    text_only: bool = False,
    delimiter: str | None = None,
    encoding: str | None = None,
    missing: Sequence[str] | None = None,
) -> pa.Table:
    """The table in a file of one of `FORMATS`.

    `text_only` leaves every CSV column text and JSON text as text, for rows whose meaning a dataset's schema
    decides; typed formats keep their types. `delimiter`, `encoding` and `missing`, the spellings of a missing cell
    (`text.MISSING` when None), concern CSV.

    Raises MalformedBody (damaged file), InvalidTable (empty, ragged, bad names or types), TooLarge,
    InvalidRequest (unknown option), UnsupportedMediaType (unknown format).
    """
    if format == "csv":
        return read_csv(
            path, limits, text_only=text_only, delimiter=delimiter, encoding=encoding, missing=missing
        )
    if format == "json":
        return read_json(path, limits, dates=not text_only)[0]
    if format == "parquet":
        return _plain(_read_parquet(path, limits))
    if format == "arrow":
        return _plain(_read_arrow(path, limits))
    raise UnsupportedMediaType(f"Unknown format {format[:40]!r}; known are {', '.join(FORMATS)}.")


@contextmanager
def _damage_named(what: str) -> Iterator[None]:
    """Turn pyarrow's complaints about a file into MalformedBody; running out of memory passes."""
    try:
        yield
    except (pa.ArrowMemoryError, FileNotFoundError, PermissionError):
        raise
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError, OverflowError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise MalformedBody(f"The {what} file is damaged or not {what} at all: {reason}.") from None


def _read_parquet(path: Path, limits: TableLimits) -> pa.Table:
    """Footer first: shape, size and types are checked before any cell is read."""
    with _damage_named("Parquet"), pq.ParquetFile(path, page_checksum_verification=True) as file:
        footer = file.metadata
        schema = file.schema_arrow
        _check_shape(footer.num_rows, schema, limits)
        groups = (footer.row_group(i) for i in range(footer.num_row_groups))
        check_bytes(sum(max(0, group.total_byte_size) for group in groups), limits)
        table = file.read()
        table.validate(full=True)
    check_rows(table.num_rows, table.num_columns, limits)
    return table


def _read_arrow(path: Path, limits: TableLimits) -> pa.Table:
    """Stream or file, batch by batch; every batch is validated before its buffers are trusted."""
    with _damage_named("Arrow"):
        source = _arrow_source(path, limits)
        with source:
            is_file = source.read(len(ARROW_FILE_MAGIC)) == ARROW_FILE_MAGIC
            source.seek(0)
            reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
            _check_shape(0, reader.schema, limits, empty=False)
            batches, rows = [], 0
            for batch in _batches(reader, is_file):
                batch.validate(full=True)
                rows += batch.num_rows
                check_rows(rows, len(reader.schema), limits)
                batches.append(batch)
            _check_shape(rows, reader.schema, limits)
            return pa.Table.from_batches(batches, schema=reader.schema)


def _arrow_source(path: Path, limits: TableLimits) -> Any:
    with path.open("rb") as file:
        if compression(file.read(4)) is None:
            return pa.OSFile(str(path), "rb")
    return pa.BufferReader(b"".join(byte_chunks(path, limits)))


def _batches(reader: Any, is_file: bool) -> Iterator[Any]:
    if is_file:
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        yield from reader


def _check_shape(rows: int, schema: Any, limits: TableLimits, empty: bool = True) -> None:
    """Limits, names and types of a typed file."""
    check_columns(len(schema), limits)
    check_rows(rows, len(schema), limits)
    checked_names(schema.names)
    faults = [
        FieldError(field.name.strip(), f"has type {field.type}; use numbers, text, booleans, dates or times")
        for field in schema
        if not _usable(field.type)
    ]
    if faults:
        listed = "; ".join(f"{fault.field!r} {fault.message.split(';')[0]}" for fault in faults[:5])
        raise InvalidTable(f"Column types that can't be used: {listed}.", errors=faults)
    if empty and rows == 0:
        raise empty_table("it has no rows")


def _usable(type_: Any) -> bool:
    if pa.types.is_dictionary(type_) or pa.types.is_run_end_encoded(type_):
        return _usable(type_.value_type)
    if isinstance(type_, pa.BaseExtensionType):
        return False
    return any(
        test(type_)
        for test in (
            pa.types.is_boolean,
            pa.types.is_integer,
            pa.types.is_floating,
            pa.types.is_decimal,
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_string_view,
            *BYTES,
            pa.types.is_date,
            pa.types.is_time,
            pa.types.is_timestamp,
            pa.types.is_duration,
            pa.types.is_null,
        )
    )


def _plain(table: pa.Table) -> pa.Table:
    """Stripped names, decoded dictionaries, no metadata."""
    names = checked_names(table.column_names)
    columns = [_decoded(name, column) for name, column in zip(names, table.columns, strict=True)]
    return pa.Table.from_arrays(columns, names=names)


def _decoded(name: str, column: Any) -> Any:
    type_ = column.type
    if pa.types.is_dictionary(type_):
        return _decoded(name, column.cast(type_.value_type))
    if pa.types.is_run_end_encoded(type_):
        chunks = [pa.compute.run_end_decode(chunk) for chunk in column.chunks]
        return _decoded(name, pa.chunked_array(chunks, type_.value_type))
    if any(test(type_) for test in BYTES):
        try:
            return column.cast(pa.binary()).cast(pa.string())
        except pa.ArrowInvalid:
            fault = FieldError(name, "holds bytes that are not UTF-8 text; leave it out or encode it")
            raise InvalidTable(f"Column {name!r} {fault.message}.", errors=[fault]) from None
    return column.cast(pa.string()) if pa.types.is_string_view(type_) else column
