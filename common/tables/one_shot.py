"""The tables of a one-shot: training features, training labels and rows to answer, out of one JSON object.

Features are a list of rows (names from `columns`, else "0", "1", ...), a list of records, `{"columns", "rows"}`,
`{"records"}`, or an object of columns. Every fault names the member it is in: `train_features`, `train_labels`,
`eval_features`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from common.errors import FieldError, Invalid, InvalidRequest, TooLarge
from common.tables.json_reader import table_from_columns, table_from_json, typed_dates
from common.tables.overrides import NONE, Overrides
from common.tables.schema import TableSchema
from common.tables.target import Target

FEATURES, LABELS, ROWS = "train_features", "train_labels", "eval_features"


@dataclass(frozen=True)
class OneShotLimits:
    """The largest one-shot; rows are those of both tables together."""

    max_rows: int
    max_columns: int
    max_cells: int


@dataclass(frozen=True)
class OneShotTables:
    """What a one-shot learns from, and the rows that it answers."""

    train: pa.Table  # features, then the labels as the last column
    rows: pa.Table
    schema: TableSchema
    target: Target

    @property
    def total_rows(self) -> int:
        """Rows of both tables."""
        return int(self.train.num_rows + self.rows.num_rows)


def read_one_shot(
    body: Mapping[str, Any], task: str | None, limits: OneShotLimits, overrides: Overrides = NONE
) -> OneShotTables:
    """The tables of a parsed body.

    Raises InvalidRequest (a member is missing, too many rows or columns), TooLarge (cells), InvalidTable, InvalidTarget,
    InvalidRows.
    """
    for name in (FEATURES, LABELS, ROWS):
        if body.get(name) is None:
            raise _wrong(name, "is missing")
    labels = body[LABELS]
    if not isinstance(labels, list):
        raise _wrong(LABELS, "must be a list with a label for each training row")
    names = body.get("columns")
    with _named(FEATURES):
        features = typed_dates(_table(FEATURES, body[FEATURES], names, limits))
    with _named(ROWS):
        rows = _table(ROWS, body[ROWS], names, limits)
    if len(labels) != features.num_rows:
        raise _wrong(LABELS, f"has {len(labels):,} labels for {features.num_rows:,} rows of {FEATURES}")
    _check_size(features, rows, limits)
    label = LABELS
    while label in features.column_names:
        label += "_"
    with _named(LABELS):
        column = table_from_columns([label], [[cell] for cell in labels]).column(0)
        target = Target.infer(column, LABELS, task)
    with _named(FEATURES):
        schema = TableSchema.infer(features, label, overrides=overrides)
    with _named(ROWS):
        schema.features(rows)
    return OneShotTables(features.append_column(label, column), rows, schema, target)


def _table(member: str, given: Any, names: Any, limits: OneShotLimits) -> pa.Table:
    _check_count(member, given, limits)
    if isinstance(given, Mapping):
        if given.keys() == {"columns", "rows"} or given.keys() == {"records"}:
            return table_from_json(given)
        return _of_columns(given)
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise _wrong(member, "must be a list of rows, a list of records, or an object of columns")
    if given and isinstance(given[0], Mapping):
        return table_from_json({"records": given})
    if names is None and given and isinstance(given[0], list):
        names = [str(position) for position in range(len(given[0]))]
    return table_from_columns(names if names is not None else [], given)


def _of_columns(given: Mapping[str, Any]) -> pa.Table:
    columns = list(given.values())
    uneven = [name for name, cells in given.items() if not isinstance(cells, list)]
    if uneven:
        raise InvalidRequest(
            f"column {uneven[0]!r} is no list", errors=[FieldError(uneven[0], "must be a list of cells")]
        )
    lengths = {name: len(cells) for name, cells in given.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name!r} has {length}" for name, length in list(lengths.items())[:5])
        raise InvalidRequest(f"columns differ in length: {told}", errors=[])
    return table_from_columns(list(given), [list(row) for row in zip(*columns, strict=True)])


def _check_count(member: str, given: Any, limits: OneShotLimits) -> None:
    """Refuse far too many rows before they are turned into columns."""
    rows = given
    if isinstance(given, Mapping):
        rows = given.get("rows", given.get("records", next(iter(given.values()), [])))
    if isinstance(rows, list) and len(rows) > limits.max_rows:
        raise _too_many(member, "rows", len(rows), limits.max_rows)


def _check_size(features: pa.Table, rows: pa.Table, limits: OneShotLimits) -> None:
    total, columns = features.num_rows + rows.num_rows, features.num_columns
    if total > limits.max_rows:
        raise _too_many(FEATURES, "rows with those of eval_features", total, limits.max_rows)
    if columns > limits.max_columns:
        raise _too_many(FEATURES, "columns", columns, limits.max_columns)
    if total * columns > limits.max_cells:
        raise TooLarge(
            f"the one-shot has {total * columns:,} cells (rows of both tables x columns), the most is {limits.max_cells:,}; "
            "fit a dataset instead",
            what="cells",
            limit=limits.max_cells,
            size=total * columns,
        )


def _too_many(member: str, what: str, size: int, limit: int) -> InvalidRequest:
    message = f"has {size:,} {what}; {limit:,} is the most of a one-shot; fit a dataset instead"
    return InvalidRequest(f"{member} {message}", errors=[FieldError(member, message)], limit=limit, size=size)


@contextmanager
def _named(member: str) -> Iterator[None]:
    """Have what is wrong inside say which member it is in."""
    try:
        yield
    except Invalid as error:
        if all(fault.field == member for fault in error.errors) and error.errors:
            raise
        faults = [
            fault if fault.field == member else FieldError(member, f"{fault.field}: {fault.message}")
            for fault in error.errors
        ] or [FieldError(member, error.detail)]
        raise type(error)(f"{member}: {error.detail}", errors=faults, **error.facts) from error


def _wrong(member: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{member} {message}", errors=[FieldError(member, message)])
