"""CSV files: header, delimiter and encoding found here, cells split by pyarrow, types decided per whole column.

Cells are first read as text, so that a column's type never depends on where a block ends. Rows are counted
while they come in, so a file that is too long is refused before it is in memory.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv

from common.errors import FieldError, InvalidRequest, InvalidTable, MalformedBody
from common.tables.shape import MIB, TableLimits, check_columns, check_rows, checked_names, empty_table
from common.tables.source import text_chunks
from common.tables.text import MISSING, infer_column

DELIMITERS = (",", ";", "\t", "|")
BLOCK_BYTES = 4 * MIB
SNIFFED_CHARACTERS = 64 * 1024
SNIFFED_ROWS = 100


def read_csv(
    path: Path,
    limits: TableLimits,
    *,
    text_only: bool = False,
    delimiter: str | None = None,
    encoding: str | None = None,
    missing: Sequence[str] | None = None,
) -> pa.Table:
    """A CSV file as a table, every column text when `text_only`; `missing` replaces `text.MISSING`.

    Raises InvalidTable (empty, ragged, undecodable, bad header), TooLarge, MalformedBody (damaged gzip or zstd),
    InvalidRequest (unknown delimiter or encoding).
    """
    if delimiter is not None and delimiter not in DELIMITERS:
        fault = FieldError("options.delimiter", "must be one of , ; | or a tab")
        raise InvalidRequest("Unknown delimiter; known are , ; | and the tab.", errors=[fault])
    chunks = text_chunks(path, limits, encoding)
    head = ""
    while len(head) < SNIFFED_CHARACTERS and (chunk := next(chunks, None)) is not None:
        head += chunk
    separator = delimiter or _delimiter(head)
    header, start = _header(head, separator)
    more = next(chunks, "") if start == len(head) else ""
    if more:
        raise InvalidTable("The header is too long; a quote may be opened and never closed.")
    check_columns(len(header), limits)
    names = checked_names(header)
    body = _Body(itertools.chain([head[start:]], chunks))
    try:
        columns = _columns(
            body, len(names), separator, limits, MISSING if missing is None else ("", *missing)
        )
    except _Ragged as ragged:
        again = text_chunks(path, limits, encoding)
        raise _ragged_error(ragged, again, separator, len(names), names) from None
    return pa.Table.from_arrays(
        [column if text_only else infer_column(column) for column in _drained(columns)], names=names
    )


class _Ragged(Exception):
    """pyarrow met a row it can't split into the header's columns."""

    def __init__(self, row: int | None, found: int | None) -> None:
        super().__init__(row, found)
        self.row = row
        self.found = found


class _Body:
    """What pyarrow reads: the text after the header as UTF-8, and the error that stopped it."""

    closed = False

    def __init__(self, chunks: Iterable[str]) -> None:
        self._chunks = iter(chunks)
        self._waiting = b""
        self.error: Exception | None = None

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; fewer only at the end, because a row may span two blocks but not three."""
        parts, length = [self._waiting], len(self._waiting)
        try:
            while length < size and (chunk := next(self._chunks, None)) is not None:
                parts.append(chunk.encode())
                length += len(parts[-1])
        except Exception as error:
            self.error = error
            raise
        data = b"".join(parts)
        self._waiting = data[size:]
        return data[:size]

    def close(self) -> None:
        """Nothing to do: the chunks close the file."""


def _columns(
    body: _Body, count: int, separator: str, limits: TableLimits, missing: Sequence[str]
) -> list[Any]:
    """Text columns of all rows."""
    faults: list[Any] = []

    def stop(row: Any) -> str:
        faults.append(row)
        return "error"

    names = [f"f{i}" for i in range(count)]
    batches: list[Any] = []
    rows = 0
    try:
        reader = pa.csv.open_csv(
            body,
            read_options=pa.csv.ReadOptions(column_names=names, use_threads=False, block_size=BLOCK_BYTES),
            parse_options=pa.csv.ParseOptions(
                delimiter=separator, newlines_in_values=True, invalid_row_handler=stop
            ),
            convert_options=pa.csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()),
                strings_can_be_null=True,
                null_values=list(missing),
                check_utf8=False,  # made by str.encode
            ),
        )
        for batch in reader:
            rows += batch.num_rows
            check_rows(rows, count, limits)
            batches.append(batch)
    except pa.ArrowInvalid as error:
        if body.error is not None:
            raise body.error from None
        if faults:
            raise _Ragged(faults[0].number, faults[0].actual_columns) from None
        if "Empty CSV" in str(error):
            raise empty_table("it has a header but no rows") from None
        if "straddling" in str(error):
            raise _Ragged(None, None) from None
        raise MalformedBody(f"The CSV file can't be read: {error}.") from None
    if not rows:
        raise empty_table("it has a header but no rows")
    return [pa.chunked_array([batch.column(i) for batch in batches]) for i in range(count)]


def _drained(columns: list[Any]) -> Iterator[Any]:
    """The columns one by one, forgotten here, so that text and typed copies don't add up."""
    while columns:
        yield columns.pop(0)


def _delimiter(head: str) -> str:
    """The delimiter under which most of the first rows have as many fields as the header, and more than one."""
    sample = head[:SNIFFED_CHARACTERS]
    best, best_score = ",", (0.0, 1)
    for candidate in DELIMITERS:
        rows = _sniffed(sample, candidate)
        if len(sample) < len(head) and len(rows) > 1:
            rows = rows[:-1]  # cut off in the middle
        if not rows or len(rows[0]) < 2:
            continue
        alike = sum(len(row) == len(rows[0]) for row in rows) / len(rows)
        if (alike, len(rows[0])) > best_score:
            best, best_score = candidate, (alike, len(rows[0]))
    return best


def _sniffed(sample: str, delimiter: str) -> list[list[str]]:
    reader = csv.reader(io.StringIO(sample, newline=""), delimiter=delimiter)
    return list(itertools.islice((row for row in reader if row), SNIFFED_ROWS))


def _header(head: str, separator: str) -> tuple[list[str], int]:
    """The header's fields and the number of characters it takes; blank lines before it are skipped."""
    consumed = 0

    def counted() -> Iterator[str]:
        nonlocal consumed
        for line in io.StringIO(head, newline=""):
            consumed += len(line)
            yield line

    try:
        header = next(
            (
                row
                for row in csv.reader(counted(), delimiter=separator)
                if "".join(row).strip() or len(row) > 1
            ),
            None,
        )
    except csv.Error as error:
        raise InvalidTable(
            f"The header can't be read: {error}.", errors=[FieldError("line 1", str(error))]
        ) from None
    if header is None:
        raise empty_table("the file holds no text")
    return header, consumed


def _lines(chunks: Iterable[str]) -> Iterator[str]:
    """Physical lines with their ends: LF, CRLF or CR."""
    rest = ""
    for chunk in chunks:
        lines = list(io.StringIO(rest + chunk, newline=""))
        rest = lines.pop() if lines and not lines[-1].endswith("\n") else ""
        yield from lines
    if rest:
        yield rest


def _ragged_error(
    ragged: _Ragged, chunks: Iterable[str], separator: str, expected: int, names: list[str]
) -> InvalidTable:
    """The error that names the physical line on which the first ragged row starts."""
    reader = csv.reader(_lines(chunks), delimiter=separator)
    line = 1
    try:
        for row in reader:
            if row and len(row) != expected:
                return _ragged_at(line, len(row), expected)
            line = reader.line_num + 1
    except csv.Error:
        detail = (
            f"The row that starts on line {line} is too long; a quote may be opened there and never closed."
        )
        return InvalidTable(detail, errors=[FieldError(f"line {line}", "is too long")], line=line)
    if ragged.found is not None:
        where = f"row {ragged.row}" if ragged.row is not None else "a row"
        detail = f"CSV {where} has {ragged.found} fields; the header has {expected}."
        return InvalidTable(detail, errors=[FieldError(where, f"has {ragged.found} fields, not {expected}")])
    detail = f"A row is longer than {BLOCK_BYTES // MIB} MiB; a quote may be opened and never closed."
    return InvalidTable(detail)


def _ragged_at(line: int, found: int, expected: int) -> InvalidTable:
    fields = "1 field" if found == 1 else f"{found} fields"
    return InvalidTable(
        f"Line {line} has {fields}; the header has {expected}.",
        errors=[FieldError(f"line {line}", f"has {fields}, not {expected}")],
        line=line,
        found=found,
        expected=expected,
    )
