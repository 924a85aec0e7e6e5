"""JSON tables: `{"columns": [...], "rows": [[...]]}` or `{"records": [{...}]}`; null marks a gap.

A column holds one kind of value: numbers (whole ones and fractions mix), text or booleans. Whole numbers must
fit 64 bits, because a JSON reader that turns longer ones into fractions would merge neighbours silently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from common.errors import FieldError, InvalidTable, MalformedBody
from common.tables.shape import TableLimits, check_columns, check_rows, checked_names, empty_table
from common.tables.source import byte_chunks
from common.tables.text import dates_or_instants

# orjson reads whole numbers beyond 64 bits as fractions; the standard library keeps them.
_LONG_NUMBER = re.compile(rb"(?<![\d.])\d{19,}(?![\d.eE])")
_BOM = b"\xef\xbb\xbf"
_INT64 = range(-(2**63), 2**63)
_UINT64 = range(2**64)


def loads_json(raw: bytes) -> Any:
    """The value of a JSON text; raises MalformedBody. Whole numbers keep every digit."""
    raw = raw.removeprefix(_BOM)
    try:
        value = orjson.loads(raw)
        return json.loads(raw) if _LONG_NUMBER.search(raw) else value
    except (ValueError, RecursionError) as error:
        detail = f"The body is not valid JSON: {error}."
        if re.search(rb"[:,\[\s-](NaN|Infinity)\b", raw):
            detail += " NaN and Infinity are not JSON; null marks a gap."
        raise MalformedBody(detail) from None


def read_json(path: Path, limits: TableLimits, *, dates: bool = True) -> tuple[pa.Table, dict[str, Any]]:
    """The table of a JSON file, and the other keys of its object.

    With `dates`, a text column in which every cell is an ISO 8601 date or time becomes date32 or timestamp.
    Raises MalformedBody, InvalidTable, TooLarge.
    """
    value = loads_json(b"".join(byte_chunks(path, limits)))
    table = table_from_json(value, limits)
    rest = {key: item for key, item in value.items() if key not in ("columns", "rows", "records")}
    return typed_dates(table) if dates else table, rest


def typed_dates(table: pa.Table) -> pa.Table:
    """The table with each text column in which every cell is an ISO 8601 date or time as date32 or timestamp."""
    for i, column in enumerate(table.columns):
        typed = dates_or_instants(column) if column.type == pa.string() else None
        if typed is not None and column.null_count < len(column):
            table = table.set_column(i, table.column_names[i], typed)
    return table


def table_from_json(value: Any, limits: TableLimits | None = None) -> pa.Table:
    """The table of a parsed JSON object; its other keys are ignored. Raises InvalidTable, TooLarge."""
    if not isinstance(value, Mapping):
        raise InvalidTable('The body must be an object with "columns" and "rows", or with "records".')
    records, columns, rows = value.get("records"), value.get("columns"), value.get("rows")
    if records is not None:
        if columns is not None or rows is not None:
            fault = FieldError("records", 'stands beside "columns" and "rows"; give one of them')
            raise InvalidTable('Give "records", or "columns" and "rows", not both.', errors=[fault])
        return _table_from_records(records, limits)
    missing = [name for name in ("columns", "rows") if value.get(name) is None]
    if missing:
        faults = [FieldError(name, "is missing") for name in missing]
        raise InvalidTable('The table must be given as "columns" and "rows", or as "records".', errors=faults)
    return table_from_columns(columns, rows, limits)


def table_from_columns(columns: Any, rows: Any, limits: TableLimits | None = None) -> pa.Table:
    """A table from column names and rows of JSON values.

    Types: int64 (uint64 where needed), float64, bool, string; null type where every cell is missing.
    Raises InvalidTable that names the row's index or the column, TooLarge.
    """
    if not isinstance(columns, Sequence) or isinstance(columns, str):
        raise InvalidTable(
            '"columns" must be a list of names.', errors=[FieldError("columns", "must be a list")]
        )
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise InvalidTable('"rows" must be a list of lists.', errors=[FieldError("rows", "must be a list")])
    for i, name in enumerate(columns):
        if not isinstance(name, str):
            fault = FieldError(f"columns[{i}]", "must be text")
            raise InvalidTable(f"Column name {i} is not text.", errors=[fault])
    if limits is not None:
        check_columns(len(columns), limits)
        check_rows(len(rows), len(columns), limits)
    names = checked_names(columns)
    if not rows:
        raise empty_table("it has no rows")
    width = len(names)
    for i, row in enumerate(rows):
        if not isinstance(row, list | tuple):
            raise InvalidTable(f"Row {i} is not a list.", errors=[FieldError(f"rows[{i}]", "must be a list")])
        if len(row) != width:
            fault = FieldError(f"rows[{i}]", f"has {len(row)} cells, not {width}")
            raise InvalidTable(f"Row {i} has {len(row)} cells; there are {width} columns.", errors=[fault])
    arrays = [_array(name, cells) for name, cells in zip(names, zip(*rows, strict=True), strict=True)]
    return pa.Table.from_arrays(arrays, names=names)


def _table_from_records(records: Any, limits: TableLimits | None) -> pa.Table:
    if not isinstance(records, Sequence) or isinstance(records, str):
        fault = FieldError("records", "must be a list")
        raise InvalidTable('"records" must be a list of objects.', errors=[fault])
    names: dict[str, None] = {}
    for i, record in enumerate(records):
        if not isinstance(record, Mapping):
            fault = FieldError(f"records[{i}]", "must be an object")
            raise InvalidTable(f"Record {i} is not an object.", errors=[fault])
        names.update(dict.fromkeys(record))
        if limits is not None:
            check_columns(len(names), limits)
            check_rows(i + 1, len(names), limits)
    if not records:
        raise empty_table("it has no rows")
    return table_from_columns(
        list(names), [[record.get(name) for name in names] for record in records], limits
    )


def _array(name: str, cells: Sequence[Any]) -> Any:
    """One column; its kind is that of every cell that is not null."""
    kinds = set(map(type, cells))
    kinds.discard(type(None))
    if not kinds:
        return pa.nulls(len(cells))
    if kinds == {float}:
        return pa.array(cells, pa.float64(), from_pandas=False)
    if kinds == {str}:
        return _text(name, cells)
    if kinds == {bool}:
        return pa.array(cells, pa.bool_(), from_pandas=False)
    if kinds <= {int, float}:
        return _numbers(name, cells, kinds)
    raise _mixed(name, cells)


def _text(name: str, cells: Sequence[str | None]) -> Any:
    try:
        return pa.array(cells, pa.string(), from_pandas=False)
    except UnicodeEncodeError:
        fault = FieldError(name, "holds half of a surrogate pair, which is not text")
        raise InvalidTable(f"Column {name!r} holds text that is not valid Unicode.", errors=[fault]) from None


def _numbers(name: str, cells: Sequence[int | float | None], kinds: set[type]) -> Any:
    whole = [cell for cell in cells if type(cell) is int]
    low, high = min(whole), max(whole)
    allowed = _INT64 if low < 0 else _UINT64
    if low not in allowed or high not in allowed:
        row = next(i for i, cell in enumerate(cells) if type(cell) is int and cell in (low, high))
        fault = FieldError(name, f"row {row + 1} holds a whole number beyond 64 bits; give it as text")
        raise InvalidTable(f"Column {name!r} holds whole numbers beyond 64 bits.", errors=[fault])
    if float in kinds:
        return pa.array(
            [None if cell is None else float(cell) for cell in cells], pa.float64(), from_pandas=False
        )
    return pa.array(cells, pa.int64() if high in _INT64 else pa.uint64(), from_pandas=False)


def _mixed(name: str, cells: Sequence[Any]) -> InvalidTable:
    words = {int: "numbers", float: "numbers", str: "text", bool: "booleans", list: "lists", dict: "objects"}
    found: dict[str, int] = {}
    for row, cell in enumerate(cells, 1):
        if cell is not None:
            found.setdefault(words.get(type(cell), type(cell).__name__), row)
    listed = " and ".join(f"{what} (row {row})" for what, row in found.items())
    if len(found) == 1:
        message = f"holds {listed}; a cell must be a number, text, a boolean or null"
    else:
        message = f"mixes {listed}; a column holds one kind of value"
    return InvalidTable(f"Column {name!r} {message}.", errors=[FieldError(name, message)])
