"""Cells of any usable type into what a column's kind asks for; a cell that does not fit is named by its row.

Rows are counted from 1. Every function takes the column's name for its errors and one `pa.Array`, and raises
InvalidRows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from common.errors import FieldError, InvalidRows
from common.tables import text

Floats = npt.NDArray[np.float64]

MICROSECONDS_PER_HOUR = 3_600_000_000
MICROSECONDS_PER_DAY = 24 * MICROSECONDS_PER_HOUR
_INT64 = range(-(2**63), 2**63)
_UINT64 = range(2**64)
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def misfit(name: str, row: int | None, value: Any, wanted: str) -> InvalidRows:
    """The error of one cell, or of the whole column when `row` is None."""
    if row is None:
        message = f"holds {value}; the dataset has {wanted} there"
    else:
        shown = repr(value) if not isinstance(value, str) else repr(value[:60])
        message = f"row {row} holds {shown}, which is not {wanted}"
    return InvalidRows(f"Column {name!r} {message}.", errors=[FieldError(name, message)])


def infinite(name: str, row: int) -> FieldError:
    """The fault of an infinite cell."""
    return FieldError(name, f"row {row} is infinite; leave the cell empty or give a number")


def first_infinite(values: npt.NDArray[Any]) -> int | None:
    """1-based row of the first infinite value of a float array, or None."""
    flags = np.isinf(values)
    return int(flags.argmax()) + 1 if flags.any() else None


def combined(column: Any) -> Any:
    """The column as one `pa.Array`."""
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.array([], column.type) if column.num_chunks == 0 else pa.concat_arrays(column.chunks)


def numeric(name: str, values: Any, origin: int | None = None) -> Floats:
    """float64 (rows,); with `origin`, exact whole-number differences to it. Times and durations become seconds."""
    type_ = values.type
    if pa.types.is_null(type_):
        return np.full(len(values), np.nan)
    if _is_text(type_):
        values = _from_text(name, values, text.floats if origin is None else text.exact_numbers, "a number")
    elif pa.types.is_boolean(type_):
        values = values.cast(pa.int8())
    elif pa.types.is_decimal(type_):
        values = _from_decimal(values, origin)
    elif pa.types.is_time(type_) or pa.types.is_duration(type_):
        whole = pa.int64() if type_.bit_width == 64 else pa.int32()
        return numeric(name, values.cast(whole)) / _PER_SECOND[type_.unit]
    elif not (pa.types.is_integer(type_) or pa.types.is_floating(type_)):
        raise misfit(name, None, _kind_of(type_), "numbers")
    if pa.types.is_float16(values.type):
        values = values.cast(pa.float32())
    if origin is not None:
        return _offsets(values, origin)
    return cast(Floats, values.to_numpy(zero_copy_only=False).astype(np.float64, copy=False))


def read_numbers(name: str, values: Any) -> Any:
    """A text column as int64, uint64 or float64."""
    return _from_text(name, values, text.exact_numbers, "a number")


def clock(name: str, values: Any) -> Floats:
    """Seconds since midnight, float64 (rows,), from times, `HH:MM[:SS[.ffffff]]` or numbers of seconds."""
    if _is_text(values.type):
        seconds = text.floats(values)
        wanted = "a time of day such as 10:30:00"
        values = seconds if seconds is not None else _from_text(name, values, text.clock, wanted)
    return numeric(name, values)


def category(name: str, values: Any) -> Any:
    """`pa.StringArray` of a number column's categories: 3, 3.0 and "3.0" are one, "3"."""
    if _is_text(values.type):
        numbers = text.exact_numbers(values)
        values = values if numbers is None else numbers
    if pa.types.is_decimal(values.type):
        values = values.cast(pa.float64())
    if not pa.types.is_floating(values.type):
        return as_text(name, values)
    cells = [None if cell is None or cell != cell else cell for cell in values.cast(pa.float64()).to_pylist()]
    shown = [None if c is None else str(int(c)) if c.is_integer() else repr(c) for c in cells]
    return pa.array(shown, pa.string())


def without(values: Any, markers: Sequence[str]) -> Any:
    """The values, null where a text is one of the markers or a number is one that a marker reads as."""
    if pa.types.is_float16(values.type):
        values = values.cast(pa.float32())
    type_ = values.type
    compared = values
    if _is_text(type_):
        compared = pc.utf8_trim_whitespace(values)
    elif not (pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_decimal(type_)):
        return values
    known = []
    for marker in markers:
        try:
            known.append(pa.scalar(marker).cast(type_).as_py())
        except pa.ArrowInvalid:
            continue  # no value of this type
    return pc.if_else(pc.is_in(compared, value_set=pa.array(known, type_)), pa.scalar(None, type_), values)


def boolean(name: str, values: Any) -> Floats:
    """0.0, 1.0 or NaN (rows,) from bool, 0/1, and true/false in any case."""
    type_ = values.type
    if _is_text(type_):
        values = _from_text(name, values, lambda column: text.booleans(column, digits=True), "true or false")
    elif not (
        pa.types.is_boolean(type_)
        or pa.types.is_null(type_)
        or pa.types.is_integer(type_)
        or pa.types.is_floating(type_)
        or pa.types.is_decimal(type_)
    ):
        raise misfit(name, None, _kind_of(type_), "booleans")
    flags = numeric(name, values)
    wrong = ~((flags == 0) | (flags == 1) | np.isnan(flags))
    if wrong.any():
        row = int(wrong.argmax())
        raise misfit(name, row + 1, values[row].as_py(), "true or false")
    return flags


def microseconds(name: str, values: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Microseconds since 1970 (UTC when zoned), and which cells are missing, both (rows,)."""
    type_ = values.type
    if pa.types.is_null(type_):
        return np.zeros(len(values), np.int64), np.ones(len(values), np.bool_)
    if _is_text(type_):
        values = _from_text(
            name, values, lambda column: text.instants(column, naive_is_utc=True), "an ISO 8601 date or time"
        )
    elif not (pa.types.is_date(type_) or pa.types.is_timestamp(type_)):
        raise misfit(name, None, _kind_of(type_), "dates or times")
    zone = values.type.tz if pa.types.is_timestamp(values.type) else None
    try:
        stamps = pc.cast(values, pa.timestamp("us", zone), safe=not _is_finer(values.type))
    except pa.ArrowInvalid:
        raise misfit(name, None, "times beyond the year 290,000", "dates or times") from None
    missing = stamps.is_null().to_numpy(zero_copy_only=False)
    return stamps.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False), missing


def as_text(name: str, values: Any) -> Any:
    """`pa.StringArray`; numbers become their text (3 is "3", 3.0 is "3.0"), booleans "true" and "false"."""
    type_ = values.type
    if pa.types.is_string(type_):
        return values
    if pa.types.is_floating(type_):
        cells = values.cast(pa.float64()).to_pylist()
        return pa.array(
            [None if c is None or c != c else repr(c) for c in cells], pa.string(), from_pandas=False
        )
    if pa.types.is_timestamp(type_):
        return pa.array([None if c is None else c.isoformat() for c in values.to_pylist()], pa.string())
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        raise misfit(name, None, "more than 2 GB of text", "less") from None


def _is_text(type_: Any) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))


def _is_finer(type_: Any) -> bool:
    return bool(pa.types.is_timestamp(type_) and type_.unit == "ns")


def _kind_of(type_: Any) -> str:
    if pa.types.is_date(type_) or pa.types.is_timestamp(type_):
        return "dates or times"
    if pa.types.is_boolean(type_):
        return "booleans"
    return "text" if _is_text(type_) else "numbers" if pa.types.is_primitive(type_) else f"type {type_}"


def _from_text(name: str, values: Any, convert: Any, wanted: str) -> Any:
    typed = convert(values)
    if typed is None:
        row = text.first_misfit(values, convert)
        raise misfit(name, row + 1, values[row].as_py(), wanted)
    return typed


def _from_decimal(values: Any, origin: int | None) -> Any:
    """Whole decimals keep every digit when there is an origin; others become float64."""
    if origin is None or values.type.scale > 0:
        return values.cast(pa.float64())
    for whole in (pa.int64(), pa.uint64()):
        try:
            return values.cast(whole)
        except pa.ArrowInvalid:
            continue
    return values


def _offsets(values: Any, origin: int) -> Floats:
    """Values minus origin: whole-number arithmetic first, float64 last."""
    missing = values.is_null().to_numpy(zero_copy_only=False)
    cells = values.fill_null(0).to_numpy(zero_copy_only=False)
    kind = cells.dtype.kind
    if kind == "f":
        difference = _float_offsets(cells.astype(np.float64), origin)
    elif (kind == "i" and origin in _INT64) or (kind == "u" and origin in _UINT64):
        wide = cells.astype(np.int64 if kind == "i" else np.uint64, copy=False)
        start = wide.dtype.type(origin)
        # Modulo 2^64 the difference of two 64-bit numbers is exact once the larger comes first.
        above = wide.astype(np.uint64) - start.astype(np.uint64)
        difference = np.where(wide >= start, above.astype(np.float64), -((-above).astype(np.float64)))
    else:
        difference = np.array([float(int(cell) - origin) for cell in cells.tolist()], np.float64)
    difference[missing] = np.nan
    return difference


def _float_offsets(cells: Floats, origin: int) -> Floats:
    """One rounding a cell: by numpy where float64 holds the origin, else in whole numbers."""
    if int(float(origin)) == origin:
        return cells - float(origin)
    return np.array(
        [float(int(cell) - origin) if cell.is_integer() else cell - origin for cell in cells.tolist()],
        np.float64,
    )
