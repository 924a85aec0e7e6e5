"""Files that people have: read as they are meant, or refused with the place named."""

from __future__ import annotations

import gzip
import io
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.errors import InvalidTable, MalformedBody, TabrelayError, TooLarge, UnsupportedMediaType
from common.tables.json_reader import table_from_json
from common.tables.parse import detect_format, read_table
from common.tables.schema import TableSchema
from common.tables.shape import TableLimits

LIMITS = TableLimits(max_rows=1_000_000, max_columns=2_000, max_cells=50_000_000)
CASES = Path(__file__).resolve().parents[2] / "cases"


@pytest.fixture
def csv(tmp_path: Path) -> Any:
    def read(text: str | bytes, limits: TableLimits = LIMITS, **options: Any) -> pa.Table:
        path = tmp_path / "t.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_table(path, "csv", limits, **options)

    return read


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_common_delimiters_are_found(csv: Any, delimiter: str) -> None:
    table = csv(
        delimiter.join(["a", "b", "c"])
        + "\n"
        + delimiter.join(["1", "x,y" if delimiter != "," else "x", "2.5"])
        + "\n"
    )
    assert table.column_names == ["a", "b", "c"]
    assert table.column("c").to_pylist() == [2.5]


@pytest.mark.parametrize("encode", [
    lambda text: b"\xef\xbb\xbf" + text.encode(),
    lambda text: text.encode("utf-16"),
    lambda text: text.encode("utf-16-le"),
    lambda text: text.encode("utf-16-be"),
    lambda text: pa.compress(text.encode(), codec="zstd", asbytes=True),
    lambda text: text.replace("\n", "\r\n").encode(),
    lambda text: gzip.compress(text.encode()),
])  # fmt: skip
def test_bom_utf16_crlf_gzip_and_zstd_read_alike(csv: Any, encode: Any) -> None:
    table = csv(encode('id,note\n1,"two\nlines"\n2,é\n'))
    assert table.column_names == ["id", "note"]
    assert table.column("note").to_pylist()[1] == "é"
    assert table.num_rows == 2


def test_latin1_is_refused_with_the_option_named_and_read_when_told(csv: Any) -> None:
    data = "a,b\n1,caf\xe9\n".encode("latin-1")
    with pytest.raises(InvalidTable, match="latin-1"):
        csv(data)
    assert csv(data, encoding="latin-1").column("b").to_pylist() == ["café"]


def test_spellings_of_missing_are_gaps_of_a_number_column() -> None:
    path = CASES / "04_semicolon_bom_crlf_quoted_newlines.csv"
    table = read_table(path, "csv", LIMITS)
    assert (table.num_rows, table.num_columns) == (120, 6)
    raw = read_table(path, "csv", LIMITS, text_only=True, missing=()).column("age").to_pylist()
    spelled = {
        cell for cell, number in zip(raw, table.column("age").to_pylist(), strict=True) if number is None
    }
    assert pa.types.is_integer(table.schema.field("age").type)
    assert spelled == {None, "NA", "N/A", "null"}


def test_types_are_decided_over_the_whole_file(csv: Any) -> None:
    numbers = "\n".join(f"{i},1" for i in range(200_000))
    table = csv(f"a,b\n{numbers}\nword,1\n")
    assert table.schema.field("a").type == pa.string()
    assert table.schema.field("b").type == pa.int64()


def test_leading_zeros_stay_text_and_spellings_of_missing_are_gaps(csv: Any) -> None:
    table = csv("code,n,flag,day\n007,NA,true,2024-01-02\n7,1.5,false,\n?,,,2024-03-01\n")
    assert table.column("code").to_pylist() == ["007", "7", None]
    assert table.column("n").to_pylist() == [None, 1.5, None]
    assert table.column("flag").to_pylist() == [True, False, None]
    assert pa.types.is_date(table.schema.field("day").type) or pa.types.is_timestamp(
        table.schema.field("day").type
    )


def test_spellings_of_missing_are_those_that_were_given(csv: Any) -> None:
    table = csv("grade,n\nNA,-999\nNone,1\n,2\n", missing=["-999"])
    assert table.column("grade").to_pylist() == ["NA", "None", None]
    assert table.column("n").to_pylist() == [None, 1, 2]


def test_a_zstd_bomb_is_refused_before_it_is_unpacked(csv: Any) -> None:
    small = TableLimits(max_rows=10**9, max_columns=3, max_cells=100)
    with pytest.raises(TooLarge):
        csv(pa.compress(b"a,y\n" + b"1,2\n" * 5_000_000, codec="zstd", asbytes=True), small)


def test_a_ragged_row_is_named_by_its_line_also_after_quoted_newlines(csv: Any) -> None:
    with pytest.raises(InvalidTable) as refused:
        csv('a,b\n1,"x\ny"\n2,z\n3\n')
    assert "5" in str(refused.value.detail) + str([e.message for e in refused.value.errors])


@pytest.mark.parametrize("text", ["", "\n", "a,b\n"])
def test_an_empty_file_is_refused(csv: Any, text: str) -> None:
    with pytest.raises(InvalidTable):
        csv(text)


def test_duplicate_and_blank_names_are_refused_by_name(csv: Any) -> None:
    with pytest.raises(InvalidTable, match="a"):
        csv("a,b,a\n1,2,3\n")
    with pytest.raises(InvalidTable):
        csv("a,,c\n1,2,3\n")


def test_limits_are_named_with_the_size(csv: Any) -> None:
    small = TableLimits(max_rows=10, max_columns=3, max_cells=25)
    with pytest.raises(TooLarge) as rows:
        csv("a\n" + "1\n" * 11, small)
    assert rows.value.facts["limit"] == 10
    with pytest.raises(TooLarge):
        csv("a,b,c,d\n1,2,3,4\n", small)
    with pytest.raises(TooLarge):
        csv("a,b,c\n" + "1,2,3\n" * 9, small)


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    began = time.monotonic()
    with pytest.raises(TooLarge):
        read_table(CASES / "14_four_million_rows.csv.gz", "csv", LIMITS)
    assert time.monotonic() - began < 2


def parquet(tmp_path: Path, table: pa.Table) -> Path:
    path = tmp_path / "t.parquet"
    pq.write_table(table, path)
    return path


def test_every_plain_parquet_type_is_read(tmp_path: Path) -> None:
    table = pa.table({
        "decimal": pa.array([Decimal("1.25"), None], pa.decimal128(9, 2)), "u64": pa.array([2**63, 1], pa.uint64()),
        "dict": pa.array(["x", "y"]).dictionary_encode(), "large": pa.array(["x", None], pa.large_string()),
        "half": pa.array(np.array([1.5, 2], np.float16)), "i8": pa.array([1, 2], pa.int8()),
        "bool": pa.array([True, None]), "stamp": pa.array([1, 2], pa.timestamp("us", tz="Europe/Paris")),
        "bytes": pa.array([b"x", None]), "fixed": pa.array([b"xy", None], pa.binary(2)), "view": pa.array(["x", None], pa.string_view()),
        "clock": pa.array([1, None], pa.time32("s")), "fine clock": pa.array([1, None], pa.time64("ns")),
        "span": pa.array([1, None], pa.duration("ms")), "wide": pa.array([Decimal("1.25"), None], pa.decimal256(40, 2)),
        "numbers": pa.array([7, None]).dictionary_encode(), "nothing": pa.nulls(2),
        **{f"int{bits}": pa.array([1, None], getattr(pa, f"int{bits}")()) for bits in (8, 16, 32, 64)},
        **{f"uint{bits}": pa.array([1, None], getattr(pa, f"uint{bits}")()) for bits in (8, 16, 32, 64)},
        **{f"stamp {unit}": pa.array([0, None], pa.timestamp(unit)) for unit in ("ms", "us", "ns")},
        "day": pa.array([0, None], pa.date32()), "single": pa.array([0.5, None], pa.float32()),
    })  # fmt: skip
    read = read_table(parquet(tmp_path, table), "parquet", LIMITS)
    assert read.column_names == table.column_names
    assert read.column("dict").to_pylist() == ["x", "y"]
    assert read.column("bytes").to_pylist() == ["x", None]
    assert read.column("fixed").to_pylist() == ["xy", None]
    features = TableSchema.infer(read, "int8").features(read)
    assert all(
        np.isfinite(column[0])
        for column in features.values
        if isinstance(column, np.ndarray) and len(np.unique(column)) > 1
    )
    assert set(table.column_names) - {"int8"} == {
        column.name for column in TableSchema.infer(read, "int8").columns
    }


@pytest.mark.parametrize("value", [[[1]], [{"x": 1}], [b"\xff"]])
def test_nested_columns_and_bytes_that_are_no_text_are_refused_by_name(tmp_path: Path, value: Any) -> None:
    with pytest.raises(InvalidTable, match="odd"):
        read_table(parquet(tmp_path, pa.table({"odd": value, "y": [1]})), "parquet", LIMITS)


def test_damaged_files_are_malformed(tmp_path: Path) -> None:
    for format, data in [
        ("parquet", b"PAR1xxxxPAR1"),
        ("arrow", b"ARROW1"),
        ("csv", gzip.compress(b"a,y\n1,2\n")[:-4]),
        ("csv", pa.compress(b"a,y\n1,2\n", codec="zstd", asbytes=True)[:-4]),
        ("json", b"{"),
        ("json", b'{"rows":[[NaN]]}'),
    ]:
        path = tmp_path / "t"
        path.write_bytes(data)
        with pytest.raises(TabrelayError) as refused:
            read_table(path, format, LIMITS)
        assert isinstance(refused.value, MalformedBody), format


def test_arrow_streams_and_files_are_read(tmp_path: Path) -> None:
    table = pa.table({"a": [1, 2], "b": ["x", None]})
    for opener in (pa.ipc.new_stream, pa.ipc.new_file):
        sink = io.BytesIO()
        with opener(sink, table.schema) as writer:
            writer.write_table(table)
        path = tmp_path / "t.arrow"
        path.write_bytes(sink.getvalue())
        assert read_table(path, "arrow", LIMITS).equals(table)


def test_json_rows_and_records_read_alike() -> None:
    table = table_from_json({"columns": ["a", "b"], "rows": [[1, "x"], [None, "y"], [2.5, None]]})
    assert table.equals(table_from_json({"records": [{"a": 1, "b": "x"}, {"b": "y"}, {"a": 2.5}]}))
    assert table.column("a").to_pylist() == [1.0, None, 2.5]


@pytest.mark.parametrize(
    "body",
    [
        {"columns": ["a", "b"], "rows": [[1]]},
        {"columns": ["a", "a"], "rows": [[1, 2]]},
        {"columns": ["a"], "rows": [[1], ["x"]]},
        {"columns": ["a"], "rows": [[1], [True]]},
        {"columns": ["a"], "rows": [[{}]]},
        {"columns": ["a"], "rows": "x"},
        {"records": [1]},
        {"columns": ["a"], "rows": []},
        [],
    ],
)
def test_json_that_is_no_table_is_refused(body: Any) -> None:
    with pytest.raises(InvalidTable):
        table_from_json(body)


@pytest.mark.parametrize(
    "cells", [[-1, -2], [-(2**63), 2**63 - 1], [0, 2**64 - 1], [2**63, 2**64 - 1], [-5, 0.5]]
)
def test_whole_numbers_of_64_bits_are_read_whatever_their_sign(cells: list[float]) -> None:
    table = table_from_json({"columns": ["a"], "rows": [[cell] for cell in cells]})
    assert table.column("a").to_pylist() == cells


@pytest.mark.parametrize("cells", [[-(2**63) - 1, 0], [0, 2**64], [-1, 2**63]])
def test_whole_numbers_beyond_64_bits_are_refused_by_name(cells: list[int]) -> None:
    with pytest.raises(InvalidTable, match="'a' holds whole numbers beyond 64 bits"):
        table_from_json({"columns": ["a"], "rows": [[cell] for cell in cells]})


def test_formats_are_told_by_content_type_then_suffix() -> None:
    assert detect_format("t.bin", "text/csv; charset=utf-8") == "csv"
    assert detect_format("t.parquet", "application/octet-stream") == "parquet"
    assert detect_format("t.csv.gz", None) == "csv"
    assert detect_format("t.json.zst", "application/zstd") == "json"
    assert detect_format(None, "application/vnd.apache.arrow.stream") == "arrow"
    for name, kind in [("t.xlsx", None), (None, "image/png"), (None, None)]:
        with pytest.raises(UnsupportedMediaType, match="text/csv"):
            detect_format(name, kind)
