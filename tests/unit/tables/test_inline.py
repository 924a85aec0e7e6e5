"""The short way of a small JSON body gives what the long way gives: the same features, or the same error."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import TabrelayError
from common.tables import inline
from common.tables.json_reader import loads_json, table_from_json
from common.tables.schema import Features, TableSchema
from common.tables.shape import TableLimits

LIMITS = TableLimits(max_rows=4, max_columns=5, max_cells=12)
SCHEMA = TableSchema.infer(pa.table({"a": [1.5, 2.0], "b": [1, 2], "y": [0, 1]}), "y")


def both_ways(value: Any, schema: TableSchema = SCHEMA) -> tuple[Any, Any]:
    def told(ask: Any) -> Any:
        try:
            features = ask()
        except TabrelayError as error:
            return error.encode()
        return features.names, features.rows, [column.tobytes() for column in features.values]

    return (
        told(lambda: inline.features_of_json(value, schema, LIMITS)),
        told(lambda: schema.features(table_from_json(value, LIMITS))),
    )


CELLS = st.one_of(
    st.none(),
    st.floats(allow_nan=False),
    st.integers(-(2**65), 2**65),
    st.booleans(),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=1),
)
NUMBERS = st.one_of(st.none(), st.floats(-1e6, 1e6), st.integers(-1000, 1000))
NAMES = st.lists(st.sampled_from(["a", "b", " a", "c", ""]), max_size=4)


@given(names=NAMES, rows=st.lists(st.lists(st.one_of(NUMBERS, CELLS), max_size=4), max_size=6))
@settings(max_examples=400, deadline=None)
def test_any_columns_and_rows_are_read_the_same_either_way(names: list[str], rows: list[list[Any]]) -> None:
    short, long = both_ways({"columns": names, "rows": rows})
    assert short == long


@given(rows=st.lists(st.tuples(NUMBERS, NUMBERS).map(list), min_size=1, max_size=4), turned=st.booleans())
@settings(max_examples=100, deadline=None)
def test_plain_rows_are_read_the_same_either_way(rows: list[list[Any]], turned: bool) -> None:
    names = ["b", "a"] if turned else ["a", "b"]
    short, long = both_ways({"columns": names, "rows": rows})
    assert short == long
    records = [dict(zip(names, row, strict=True)) for row in rows]
    short, long = both_ways({"records": records})
    assert short == long


@pytest.mark.parametrize(
    "body",
    [
        b'{"columns":["a","b"],"rows":[[1,2.5],[null,3]]}',
        b'{"columns":["b","a"],"rows":[[1,2]]}',
        b'{"columns":["a","b","extra"],"rows":[[1,2,3]]}',
        b'{"records":[{"b":1,"a":null}]}',
    ],
)
def test_plain_bodies_take_the_short_way(body: bytes) -> None:
    value = loads_json(body)
    short = inline._plain(value, SCHEMA, LIMITS)
    assert isinstance(short, Features)
    long = SCHEMA.features(table_from_json(value, LIMITS))
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(short.values, long.values, strict=True))


@pytest.mark.parametrize(
    "body",
    [
        b"[1]",
        b"{}",
        b'{"columns":["a","b"],"rows":[]}',
        b'{"columns":["a","b"],"rows":[[1],[1,2]]}',
        b'{"columns":["a","b"],"rows":[[1,2],[1,2],[1,2],[1,2],[1,2]]}',
        b'{"columns":["a"],"rows":[[1]]}',
        b'{"columns":["a","b","b"],"rows":[[1,2,3]]}',
        b'{"columns":["a","b"],"rows":[["1",2]]}',
        b'{"columns":["a","b"],"rows":[[true,2]]}',
        b'{"columns":["a","b"],"rows":[[9007199254740993,2]]}',
        b'{"columns":["a","b"],"rows":[[123456789012345678901234567890,2]]}',
        b'{"records":[{"a":1,"b":2},{"a":1}]}',
        b'{"records":[{"a":1,"b":2}],"rows":[[1,2]],"columns":["a","b"]}',
    ],
)
def test_anything_else_takes_the_long_way_and_ends_there_the_same(body: bytes) -> None:
    value = loads_json(body)
    assert inline._plain(value, SCHEMA, LIMITS) is None
    short, long = both_ways(value)
    assert short == long


def test_an_infinite_cell_is_refused_by_name() -> None:
    short, long = both_ways({"columns": ["a", "b"], "rows": [[math.inf, 1]]})
    assert short == long
    assert orjson.dumps(short).count(b'"a"') >= 1


def test_text_dates_and_offset_columns_are_not_plain() -> None:
    ids = pa.table({"id": [2**40, 2**40 + 1], "y": [0, 1]})
    text = pa.table({"t": ["x", "y"], "y": [0, 1]})
    assert not TableSchema.infer(ids, "y").plain
    assert not TableSchema.infer(text, "y").plain
    assert SCHEMA.plain
