"""Meaning of text cells: which are missing, which are numbers, booleans, dates; decided over a whole column.

Every function takes a string column (`pa.Array` or `pa.ChunkedArray`) with nulls for missing cells and returns
the typed column, or None when any cell does not fit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

#: Cells that mean "missing" in text formats.
MISSING = ("", "NA", "N/A", "n/a", "NaN", "nan", "null", "NULL", "None", "?", "-", "#N/A")

SAMPLE = 256
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|infinity|nan)", re.IGNORECASE)
_BOOLEAN = re.compile(r"true|false", re.IGNORECASE)
_INSTANT = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d.*)?")
# RE2 syntax. An identifier such as 007 is text; Arrow would also read 0x10 as sixteen.
_LEADING_ZERO = r"^\s*[+-]?0[0-9xX]"
_WHOLE = r"^\s*[+-]?[0-9]+\s*$"
_DATE = r"^\d{4}-\d\d-\d\d$"
_TIME = r"^\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d{1,9})?)?( ?(Z|[+-]\d\d(:?\d\d)?))?$"
_CLOCK = r"^\d\d:\d\d(:\d\d(\.\d{1,9})?)?$"
_ZONED = r"[T ][0-9:.]+ ?(Z|[+-][0-9:]+)$"


def infer_column(column: Any) -> Any:
    """The column in the narrowest type that every cell fits: bool, int64, uint64, float64, date32, timestamp.

    Text when none does; null type when every cell is missing. A column in which any number has a leading zero
    stays text, and so do whole numbers beyond 64 bits that float64 could not tell apart.
    """
    if column.null_count == len(column):
        return pa.chunked_array([pa.nulls(len(column))])
    head = column.slice(0, 4 * SAMPLE).drop_null()
    if not len(head):
        head = column.drop_null()
    sample = [value.strip() for value in head.slice(0, SAMPLE).to_pylist()]
    sample = [value for value in sample if value not in MISSING]
    guesses: tuple[tuple[re.Pattern[str], Callable[[Any], Any]], ...] = (
        (_BOOLEAN, booleans),
        (_NUMBER, numbers),
        (_INSTANT, dates_or_instants),
    )
    for pattern, convert in guesses:
        if all(pattern.fullmatch(value) for value in sample):
            typed = convert(column)
            if typed is not None:
                return typed
    return column


def first_misfit(column: Any, convert: Callable[[Any], Any]) -> int:
    """0-based row of the first cell that keeps `convert` from fitting the column; it must not fit."""
    low, high = 0, len(column)  # the first `low` cells fit, the first `high` don't
    while high - low > 1:
        middle = (low + high) // 2
        if convert(column.slice(0, middle)) is None:
            high = middle
        else:
            low = middle
    return high - 1


def booleans(column: Any, digits: bool = False) -> Any:
    """bool column from true/false in any case, and from 0/1 when `digits`."""
    lowered = pc.utf8_lower(_trimmed(column))
    yes, no = (["true", "1", "1.0"], ["false", "0", "0.0"]) if digits else (["true"], ["false"])
    is_yes = pc.is_in(lowered, value_set=pa.array(yes, lowered.type))
    fits = pc.or_(is_yes, pc.is_in(lowered, value_set=pa.array(no, lowered.type)))
    if not _every(pc.or_(fits, pc.is_null(lowered))):
        return None
    return pc.if_else(pc.is_null(lowered), pa.scalar(None, pa.bool_()), is_yes)


def numbers(column: Any) -> Any:
    """int64, uint64 or float64 column, for inference: leading zeros and lossy whole numbers don't fit."""
    if _any(pc.match_substring_regex(column, _LEADING_ZERO)):
        return None
    exact = integers(column)
    if exact is not None:
        return exact
    inexact = floats(column)
    if inexact is not None and _every(pc.match_substring_regex(column, _WHOLE)):
        distinct = pc.count_distinct(inexact).as_py()
        if distinct < pc.count_distinct(column).as_py():
            return None
    return inexact


def integers(column: Any) -> Any:
    """int64 column, or uint64 when int64 is too small."""
    if _any(pc.match_substring_regex(column, r"^\s*[+-]?0[xX]")):
        return None
    whole = _cast(column, pa.int64())
    return whole if whole is not None else _cast(column, pa.uint64())


def floats(column: Any) -> Any:
    """float64 column."""
    return _cast(column, pa.float64())


def exact_numbers(column: Any) -> Any:
    """int64 or uint64 column when every cell is whole, else float64."""
    whole = integers(column)
    return whole if whole is not None else floats(column)


def dates_or_instants(column: Any) -> Any:
    """date32 column, or `instants` when any cell has a time."""
    trimmed = _trimmed(column)
    if _every(pc.match_substring_regex(trimmed, _DATE)):
        return _cast(trimmed, pa.date32())
    return instants(trimmed)


def instants(column: Any, naive_is_utc: bool = False) -> Any:
    """timestamp[us] column from ISO 8601 text, in UTC when the cells name a zone.

    A mix of cells with and without zone does not fit, unless `naive_is_utc`. Finer fractions are cut to
    microseconds.
    """
    trimmed = _trimmed(column)
    is_date = pc.match_substring_regex(trimmed, _DATE)
    if not _every(pc.or_(is_date, pc.match_substring_regex(trimmed, _TIME))):
        return None
    cut = pc.replace_substring_regex(trimmed, r"(\.\d{6})\d+", r"\1")
    cut = pc.replace_substring_regex(cut, r" (Z|[+-][0-9:]+)$", r"\1")
    zoned = pc.match_substring_regex(cut, _ZONED)
    if not _any(zoned):
        return _cast(cut, pa.timestamp("us"))
    utc = pa.timestamp("us", "UTC")
    if _every(zoned):
        return _cast(cut, utc)
    if not naive_is_utc:
        return None
    dates_timed = pc.if_else(is_date, pc.binary_join_element_wise(cut, "T00:00", ""), cut)
    return _cast(pc.if_else(zoned, dates_timed, pc.binary_join_element_wise(dates_timed, "Z", "")), utc)


def clock(column: Any) -> Any:
    """float64 column, seconds since midnight, from `HH:MM`, `HH:MM:SS` and fractions of a second."""
    trimmed = _trimmed(column)
    if not _every(pc.match_substring_regex(trimmed, _CLOCK)):
        return None
    stamps = instants(pc.binary_join_element_wise("1970-01-01", trimmed, "T"))
    return None if stamps is None else pc.divide(stamps.cast(pa.int64()).cast(pa.float64()), 1e6)


def _cast(column: Any, wanted: Any) -> Any:
    try:
        return column.cast(wanted)
    except pa.ArrowInvalid:
        pass
    trimmed = _trimmed(column)
    if trimmed is column:
        return None
    try:
        return trimmed.cast(wanted)
    except pa.ArrowInvalid:
        return None


def _trimmed(column: Any) -> Any:
    """The column without surrounding whitespace, missing markers found by that as null."""
    if not _any(pc.match_substring_regex(column, r"^\s|\s$")):
        return column
    trimmed = pc.utf8_trim_whitespace(column)
    missing = pc.is_in(trimmed, value_set=pa.array(MISSING, trimmed.type))
    return pc.if_else(missing, pa.scalar(None, trimmed.type), trimmed)


def _any(flags: Any) -> bool:
    return pc.any(flags).as_py() is True


def _every(flags: Any) -> bool:
    return pc.all(flags).as_py() is not False
