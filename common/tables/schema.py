"""The contract between a training table and every later row: which columns, of which kind, treated how.

Columns are found by name, in any order; extra ones are ignored; a missing one is refused by name. Kinds and what
a model sees of them:

numeric
    One float64 column. Integers, decimals and smaller floats are widened; times of day and durations are seconds. The column gets an `origin`, the
    smallest training value rounded down, in two cases: it is of whole-number type and holds a value beyond 2^53,
    which float64 could not tell from its neighbour; or it holds a value beyond 2^24 and its whole spread is less
    than a thousandth of that, which standardisation in a model would lose (identifiers, epochs). The model then
    sees `value - origin`, whole numbers subtracted as such, so order and distinctness survive, and
    `origin + feature` gives the value back. Text is read as numbers when every cell is one. Infinity is refused.
    A column without any value is numeric, all missing.
boolean
    0.0, 1.0, or NaN when missing. Rows may say true/false, 0/1, or "true"/"false" in any case.
datetime
    Date and timestamp columns. The model sees, as float64:
    `NAME`          seconds since `origin`, the smallest training value, with microseconds kept: `origin` is whole
                    microseconds since 1970-01-01 (UTC when the column is zoned), and
                    `origin + round(feature * 1e6)` gives the instant back;
    `NAME:month`    1 to 12;
    `NAME:weekday`  0 (Monday) to 6;
    `NAME:hour`     0 to 23, only when a training value has a time of day that is not midnight.
    Month, weekday and hour are those of UTC when zoned. Rows may be dates, timestamps or ISO 8601 text; a value
    without zone is read as UTC. A derived name that a column already bears gets another colon (`NAME::month`).
text
    A `pa.StringArray`. Numbers in rows become their text (3 is "3", 3.0 is "3.0"), booleans "true" and "false"; in a
    number column that was declared categorical, numbers of one value are one category (3, 3.0 and "3.0").
    What a category never seen means is the model's matter. `distinct` tells how many values training saw.

A fit may override kinds and the spellings of a missing cell by name (`common.tables.overrides`). Spellings are kept
in the schema and blank the same cells, text or number, in the training table and in rows.

The same code applies the schema to the training table and to rows to predict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from common.errors import FieldError, InvalidRows, InvalidTable, TooLarge
from common.tables import convert
from common.tables.features import Features
from common.tables.overrides import NONE, Overrides

__all__ = ["Column", "Features", "Kind", "TableSchema"]

Kind = Literal["numeric", "boolean", "datetime", "text"]
#: Up to this many rows, infinity is looked for in all columns at once: one numpy call, not one a column.
SMALL_ROWS = 256
#: Whole numbers up to this magnitude are exact in float64, and in float32.
EXACT, EXACT_SINGLE = 2**53, 2**24
NARROW = 1024
_DOUBLE = pa.float64().id


@dataclass(frozen=True)
class Column:
    """One column of the training table, and what its values need to become features."""

    name: str
    kind: Kind
    arrow_type: str  # as the training table had it, such as `decimal128(12, 2)`
    origin: int | None = None  # numeric: whole number; datetime: microseconds since 1970
    hours: bool = False  # datetime: a training value had a time of day
    distinct: int | None = None  # text: how many values the training table has
    declared: bool = False  # the fit said so

    def encode(self) -> dict[str, Any]:
        """A JSON object that `decode` turns into the same column."""
        encoded: dict[str, Any] = {"name": self.name, "kind": self.kind, "type": self.arrow_type}
        if self.origin is not None:
            encoded["origin"] = str(self.origin)  # text: JSON readers round whole numbers beyond 2^53
        if self.hours:
            encoded["hours"] = True
        if self.distinct is not None:
            encoded["distinct"] = self.distinct
        if self.declared:
            encoded["declared"] = True
        return encoded

    @classmethod
    def decode(cls, encoded: Mapping[str, Any]) -> Column:
        """The column that `encode` wrote."""
        origin = encoded.get("origin")
        return cls(
            name=str(encoded["name"]),
            kind=cast(Kind, encoded["kind"]),
            arrow_type=str(encoded["type"]),
            origin=None if origin is None else int(origin),
            hours=bool(encoded.get("hours", False)),
            distinct=encoded.get("distinct"),
            declared=bool(encoded.get("declared", False)),
        )

    @cached_property
    def of_numbers(self) -> bool:
        """Whether the training table held numbers."""
        return self.arrow_type.startswith(("int", "uint", "halffloat", "float", "double", "decimal"))

    @cached_property
    def of_times(self) -> bool:
        """Whether the training table held times of day."""
        return self.arrow_type.startswith("time32") or self.arrow_type.startswith("time64")


@dataclass(frozen=True)
class TableSchema:
    """The feature columns of a training table, in its order."""

    columns: tuple[Column, ...]
    missing: tuple[str, ...] | None = None  # spellings of a missing cell; None: those that text formats know

    @classmethod
    def infer(
        cls,
        table: pa.Table,
        exclude: str,
        max_columns: int | None = None,
        overrides: Overrides = NONE,
    ) -> TableSchema:
        """The schema of all columns but `exclude`, the target, and those to be ignored.

        Raises InvalidTable (no feature column, an infinite cell, a cell that is not of the kind that was declared),
        InvalidRequest (an override names no feature), TooLarge (more than `max_columns` features).
        """
        overrides.check(table.column_names, exclude)
        names = [
            name for name in table.column_names if name != exclude and overrides.kinds.get(name) != "ignored"
        ]
        if not names:
            ignored = " and what is ignored" if overrides.kinds else ""
            raise InvalidTable(f"The table has no feature beside {exclude!r}, the target{ignored}.")
        if max_columns is not None and len(names) > max_columns:
            raise TooLarge(
                f"The table has {len(names):,} feature columns; {max_columns:,} is the most that is accepted.",
                what="columns",
                limit=max_columns,
                size=len(names),
            )
        faults: list[FieldError] = []
        columns = tuple(_infer_column(name, table.column(name), overrides, faults) for name in names)
        if faults:
            first = faults[0]
            raise InvalidTable(f"Column {first.field!r}: {first.message}.", errors=faults)
        return cls(columns, overrides.missing)

    def encode(self) -> dict[str, Any]:
        """A JSON object that `decode` turns into the same schema."""
        encoded: dict[str, Any] = {"columns": [column.encode() for column in self.columns]}
        if self.missing is not None:
            encoded["missing"] = list(self.missing)
        return encoded

    @classmethod
    def decode(cls, encoded: Mapping[str, Any]) -> TableSchema:
        """The schema that `encode` wrote."""
        missing = encoded.get("missing")
        columns = tuple(Column.decode(column) for column in encoded["columns"])
        return cls(columns, None if missing is None else tuple(missing))

    @cached_property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features, in order; a datetime column gives three or four."""
        return tuple(name for names in self._names for name in names)

    @cached_property
    def plain(self) -> bool:
        """Whether a model sees every column as it is: numbers without an origin or a spelling of a gap."""
        return not self.missing and all(
            column.kind == "numeric" and column.origin is None for column in self.columns
        )

    @cached_property
    def _names(self) -> tuple[tuple[str, ...], ...]:
        """Feature names of each column."""
        taken = {column.name for column in self.columns}
        grouped = []
        for column in self.columns:
            names = [column.name]
            if column.kind == "datetime":
                for part in ("month", "weekday", "hour") if column.hours else ("month", "weekday"):
                    derived = f"{column.name}:{part}"
                    while derived in taken:
                        derived = derived.removesuffix(part) + f":{part}"
                    taken.add(derived)
                    names.append(derived)
            grouped.append(tuple(names))
        return tuple(grouped)

    def features(self, rows: pa.Table) -> Features:
        """The rows as features. Raises InvalidRows that names the columns, and the row of a bad cell."""
        positions = self._positions(rows)
        values: list[Any] = []
        for column, position in zip(self.columns, positions, strict=True):
            chunked = rows.column(position)
            array = chunked.chunk(0) if chunked.num_chunks == 1 else convert.combined(chunked)
            if self.missing:
                array = convert.without(array, self.missing)
            if column.kind == "numeric":
                if column.origin is None and array.type.id == _DOUBLE:
                    values.append(array.to_numpy(zero_copy_only=False))
                elif column.of_times:
                    values.append(convert.clock(column.name, array))
                else:
                    values.append(convert.numeric(column.name, array, column.origin))
            elif column.kind == "text":
                categories = convert.category if column.of_numbers else convert.as_text
                values.append(categories(column.name, array))
            elif column.kind == "boolean":
                values.append(convert.boolean(column.name, array))
            else:
                values.extend(_datetime_features(column, array))
        self._refuse_infinite(values, rows.num_rows)
        return Features(self.feature_names, tuple(values), rows.num_rows)

    def _positions(self, rows: pa.Table) -> list[int]:
        """Where in `rows` each column of the schema is."""
        names = [name.strip() for name in rows.schema.names]
        found = {name: position for position, name in enumerate(names)}
        try:
            positions = [found[column.name] for column in self.columns]
        except KeyError:
            missing = [column.name for column in self.columns if column.name not in found]
            listed = ", ".join(repr(name) for name in missing[:10])
            faults = [FieldError(name, "is missing") for name in missing]
            raise InvalidRows(f"Columns of the dataset are missing: {listed}.", errors=faults) from None
        if len(found) < len(names):
            twice = [column.name for column in self.columns if names.count(column.name) > 1]
            if twice:
                faults = [FieldError(name, "is given twice") for name in twice]
                raise InvalidRows(f"Columns are given twice: {', '.join(map(repr, twice))}.", errors=faults)
        return positions

    def _refuse_infinite(self, values: list[Any], rows: int) -> None:
        numeric = [i for i, column in enumerate(values) if isinstance(column, np.ndarray)]
        if not numeric or not rows:
            return
        if rows <= SMALL_ROWS and not np.isinf(np.concatenate([values[i] for i in numeric])).any():
            return
        faults = []
        for i in numeric:
            row = convert.first_infinite(values[i])
            if row is not None:
                faults.append(convert.infinite(self.feature_names[i], row))
        if faults:
            raise InvalidRows(f"Column {faults[0].field!r}: {faults[0].message}.", errors=faults)


def _infer_column(name: str, column: Any, overrides: Overrides, faults: list[FieldError]) -> Column:
    """The column's entry; what is wrong with it goes to `faults`."""
    values = convert.combined(column)
    if overrides.missing:
        values = convert.without(values, overrides.missing)
    declared = overrides.kinds.get(name)
    try:
        entry = _entry(
            name, values, cast(Kind, declared) if declared else _kind(values.type), str(column.type)
        )
    except InvalidRows as error:
        # What follows a semicolon is advice for rows.
        said = f"was declared {declared}, but " if declared else ""
        faults.extend(
            replace(fault, message=said + fault.message.split(";")[0]) if said else fault
            for fault in error.errors
        )
        return Column(name, "numeric", str(column.type))
    return replace(entry, declared=declared is not None)


def _kind(type_: Any) -> Kind:
    """What a column of this type is unless the fit says otherwise."""
    if pa.types.is_boolean(type_):
        return "boolean"
    if pa.types.is_string(type_) or pa.types.is_large_string(type_):
        return "text"
    return "datetime" if pa.types.is_date(type_) or pa.types.is_timestamp(type_) else "numeric"


def _entry(name: str, values: Any, kind: Kind, shown: str) -> Column:
    """A column of this kind; raises InvalidRows for a cell that is not of it."""
    if kind == "boolean":
        return Column(name, kind, shown)
    if kind == "datetime":
        return _infer_datetime(name, values, shown)
    if kind == "text":
        return Column(name, kind, shown, distinct=pc.count_distinct(values, mode="only_valid").as_py())
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        values = convert.read_numbers(name, values)
    if pa.types.is_boolean(values.type) or pa.types.is_time(values.type) or pa.types.is_duration(values.type):
        return Column(name, kind, shown)
    if pa.types.is_date(values.type) or pa.types.is_timestamp(values.type):
        raise convert.misfit(name, None, "dates or times", "numbers")
    if pa.types.is_floating(values.type):
        row = convert.first_infinite(values.to_numpy(zero_copy_only=False))
        if row is not None:
            raise InvalidRows(errors=[convert.infinite(name, row)])
    return Column(name, kind, shown, origin=_numeric_origin(values))


def _numeric_origin(column: pa.Array) -> int | None:
    """What is subtracted from the column, or None where float64 and a model's scaling lose nothing."""
    type_ = column.type
    if pa.types.is_null(type_):
        return None
    if pa.types.is_floating(type_):
        values = column.to_numpy(zero_copy_only=False)
        values = values[~np.isnan(values)]
        low, high = (values.min().item(), values.max().item()) if len(values) else (None, None)
    else:
        ends = pc.min_max(column).as_py()
        low, high = ends["min"], ends["max"]
    if low is None or high is None:
        return None
    low, high = math.floor(low), math.ceil(high)
    largest = max(abs(low), abs(high))
    whole = pa.types.is_integer(type_) or (pa.types.is_decimal(type_) and type_.scale <= 0)
    narrow = largest > EXACT_SINGLE and (high - low) * NARROW < largest
    return low if narrow or (whole and largest > EXACT) else None


def _infer_datetime(name: str, values: Any, shown: str) -> Column:
    micro, missing = convert.microseconds(name, values)
    present = micro[~missing]
    if not len(present):
        return Column(name, "datetime", shown, origin=0)
    hours = bool((present % convert.MICROSECONDS_PER_DAY != 0).any())
    return Column(name, "datetime", shown, origin=int(present.min()), hours=hours)


def _datetime_features(column: Column, array: Any) -> list[npt.NDArray[np.float64]]:
    micro, missing = convert.microseconds(column.name, array)
    days = micro // convert.MICROSECONDS_PER_DAY
    months = days.astype("datetime64[D]").astype("datetime64[M]").astype(np.int64)
    parts = [
        (micro - np.int64(column.origin or 0)) / 1e6,
        (months % 12 + 1).astype(np.float64),
        ((days + 3) % 7).astype(np.float64),  # 1970-01-01 was a Thursday
    ]
    if column.hours:
        parts.append((micro // convert.MICROSECONDS_PER_HOUR % 24).astype(np.float64))
    for part in parts:
        part[missing] = np.nan
    return parts
