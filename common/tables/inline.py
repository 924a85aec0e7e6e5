"""Rows of a small JSON body straight to features, without a table between.

Only what is plain: cells that are numbers or null, columns that the model sees as they are. Everything else, and
everything wrong, goes the long way (`common.tables.json_reader`), which has the same answer or the error.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from common.tables.json_reader import table_from_json
from common.tables.schema import Features, TableSchema
from common.tables.shape import TableLimits

_PLAIN = frozenset({int, float, type(None)})
#: Whole numbers below this are exact in float64.
_EXACT = 2.0**53


def features_of_json(value: Any, schema: TableSchema, limits: TableLimits) -> Features:
    """The rows of a parsed body as features; raises what `table_from_json` and `TableSchema.features` raise."""
    plain = _plain(value, schema, limits)
    return schema.features(table_from_json(value, limits)) if plain is None else plain


def _plain(value: Any, schema: TableSchema, limits: TableLimits) -> Features | None:
    """The features of a plain body, None for any other."""
    if not schema.plain or not isinstance(value, Mapping):
        return None
    names, rows = _rows(value, schema.feature_names)
    if not rows or not names or len(names) > limits.max_columns:
        return None
    if len(rows) > limits.max_rows or len(rows) * len(names) > limits.max_cells:
        return None
    positions = _positions(names, schema.feature_names)
    if positions is None or set(map(type, rows)) != {list} or set(map(len, rows)) != {len(names)}:
        return None
    if not set(map(type, itertools.chain.from_iterable(rows))) <= _PLAIN:
        return None
    try:
        cells = np.array(rows, dtype=np.float64)
    except OverflowError:
        return None
    if (np.abs(cells) >= _EXACT).any():
        return None
    columns = np.ascontiguousarray(cells.T)
    return Features(schema.feature_names, tuple(columns[position] for position in positions), len(rows))


def _rows(value: Mapping[str, Any], wanted: Sequence[str]) -> tuple[Sequence[str], list[Any]]:
    """Names and rows; empty ones when the body is of neither form."""
    names, rows, records = value.get("columns"), value.get("rows"), value.get("records")
    if records is None:
        return (names, rows) if isinstance(names, list) and isinstance(rows, list) else ((), [])
    if names is not None or rows is not None or not isinstance(records, list):
        return (), []
    try:
        if set(map(len, records)) != {len(wanted)}:
            return (), []
        return wanted, [[record[name] for name in wanted] for record in records]
    except (KeyError, TypeError, IndexError):
        return (), []


def _positions(names: Sequence[Any], wanted: tuple[str, ...]) -> Sequence[int] | None:
    """Where each wanted column is; None when a name is odd, missing or there twice."""
    if len(names) == len(wanted) and tuple(names) == wanted:
        return range(len(names))
    if set(map(type, names)) != {str}:
        return None
    found = {name: position for position, name in enumerate(names)}
    if len(found) < len(names) or any(not name or name != name.strip() for name in names):
        return None
    try:
        return [found[name] for name in wanted]
    except KeyError:
        return None
