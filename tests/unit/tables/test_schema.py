"""What a model sees of each kind of column, at fit and at predict alike."""

from __future__ import annotations

import datetime as dt
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import (
    InternalError,
    InvalidRequest,
    InvalidRows,
    InvalidTable,
    InvalidTarget,
    TabrelayError,
)
from common.tables.canonical import read_canonical, write_canonical
from common.tables.overrides import Overrides
from common.tables.schema import Features, TableSchema
from common.tables.target import Target, take_target
from tests.support import mixed

CASES = Path(__file__).resolve().parents[2] / "cases"


def shown(table: pa.Table) -> dict[str, Any]:
    features = TableSchema.infer(table, "y").features(table)
    return {
        n: v.to_pylist() if isinstance(v, pa.Array) else v.tolist()
        for n, v in zip(features.names, features.values, strict=True)
    }


def test_each_kind_becomes_what_its_rule_says() -> None:
    table = pa.table({
        "n": [1, None, 3], "b": [True, None, False], "t": ["x", None, "y"], "e": pa.nulls(3),
        "d": pa.array([dt.date(2024, 1, 1), None, dt.date(2024, 2, 5)]), "y": [1, 2, 3],
    })  # fmt: skip
    seen = shown(table)
    assert str(seen["n"]) == "[1.0, nan, 3.0]"
    assert str(seen["b"]) == "[1.0, nan, 0.0]"
    assert seen["t"] == ["x", None, "y"]
    assert str(seen["e"]) == "[nan, nan, nan]"
    assert str(seen["d"]) == f"[0.0, nan, {35 * 86400.0}]"
    assert str(seen["d:month"]) == "[1.0, nan, 2.0]"
    assert str(seen["d:weekday"]) == "[0.0, nan, 0.0]"
    assert "d:hour" not in seen


def test_large_ids_and_close_instants_stay_distinct_and_ordered() -> None:
    for name in ("01_large_int64_ids", "02_timestamps_seconds_apart"):
        table = pq.read_table(CASES / f"{name}.parquet")
        target = next(c for c in table.column_names if c in ("flag", "late", "y"))
        schema = TableSchema.infer(table, target)
        features = schema.features(table)
        for column in schema.columns:
            if column.kind in ("numeric", "datetime"):
                raw = table.column(column.name).to_pylist()
                seen = features.values[features.names.index(column.name)]
                assert isinstance(seen, np.ndarray)
                assert len(np.unique(seen)) == len(set(raw))
                assert np.array_equal(
                    np.argsort(seen, kind="stable"), np.argsort(np.array(raw), kind="stable")
                )


def test_rows_are_taken_by_name_in_any_order_with_extras_and_casts() -> None:
    table = mixed().drop_columns(["z"])
    schema = TableSchema.infer(table, "y")
    whole = schema.features(table)
    turned = table.select(table.column_names[::-1]).append_column("extra", pa.array(range(table.num_rows)))
    again = schema.features(turned)
    assert again.names == whole.names
    for ours, theirs in zip(whole.values, again.values, strict=True):
        same = (
            ours.equals(theirs)
            if isinstance(ours, pa.Array)
            else np.array_equal(ours, theirs, equal_nan=True)
        )
        assert same
    text = {
        "plan": [3, 3],
        "since": ["2024-05-01", None],
        "seen": ["2024-05-01T10:00:00", None],
        "auto": ["TRUE", "0"],
        "amount": ["1.5", None],
        "count": ["2", "3"],
    }
    cast = schema.features(pa.table(text))
    assert cast.values[cast.names.index("plan")].to_pylist() == ["3", "3"]  # type: ignore[union-attr]
    assert cast.values[cast.names.index("auto")].tolist() == [1.0, 0.0]  # type: ignore[union-attr]
    assert cast.values[cast.names.index("seen:hour")].tolist()[0] == 10.0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("amount", ["a", "b"]),
        ("amount", [1.0, float("inf")]),
        ("auto", ["yes", "no"]),
        ("since", ["soon", None]),
        ("count", [1e400, 2]),
    ],
)
def test_a_cell_that_does_not_fit_is_named_by_column_and_row(column: str, values: list[Any]) -> None:
    table = mixed().drop_columns(["z"])
    schema = TableSchema.infer(table, "y")
    rows = table.slice(0, 2)
    rows = rows.set_column(rows.column_names.index(column), column, pa.array(values))
    with pytest.raises(InvalidRows) as refused:
        schema.features(rows)
    (fault,) = refused.value.errors
    assert fault.field == column
    assert "row" in fault.message


def test_missing_columns_are_all_named() -> None:
    schema = TableSchema.infer(mixed(), "y")
    with pytest.raises(InvalidRows) as refused:
        schema.features(pa.table({"plan": ["x"], "z": [1.0], "amount": [1.0]}))
    assert {fault.field for fault in refused.value.errors} == {"since", "seen", "auto", "count"}


def test_a_table_without_a_feature_is_refused() -> None:
    with pytest.raises(InvalidTable):
        TableSchema.infer(pa.table({"y": [1, 2]}), "y")


words = st.text(min_size=1, max_size=8).filter(lambda name: name.strip() == name)
names = st.lists(words, min_size=1, max_size=5, unique=True)


@given(names, st.randoms())
def test_a_schema_survives_json_and_column_order(columns: list[str], random: Any) -> None:
    makers = [
        lambda: [1, None],
        lambda: [0.5, 2.0],
        lambda: ["a", None],
        lambda: [True, False],
        lambda: [dt.date(2020, 1, 1), None],
    ]
    table = pa.table({**{name: random.choice(makers)() for name in columns}, "the target": [0, 1]})
    schema = TableSchema.infer(table, "the target")
    again = TableSchema.decode(schema.encode())
    assert again == schema
    order = list(table.column_names)
    random.shuffle(order)
    assert again.features(table.select(order)).names == schema.features(table).names


DECLARED = pa.table(
    {
        "zip": [3.0, 4.0, None],
        "amount": ["1", "-999", "07"],
        "count": [1, -999, 3],
        "single": pa.array([1.5, -999.0, 2], pa.float32()),
        "half": pa.array(np.array([1, -999, 2], np.float16)),
        "price": pa.array([Decimal("1.25"), Decimal("-999"), None], pa.decimal128(9, 2)),
        "when": ["2024-01-01", "2024-01-02T10:00:00Z", None],
        "at": pa.array([36_000, 1, None], pa.time32("s")),
        "for": pa.array([1, 2000, None], pa.duration("ms")),
        "id": [1, 2, 3],
        "y": [0, 1, 0],
    }
)
OVERRIDES = {
    "categorical": ["zip"],
    "numeric": ["amount"],
    "datetime": ["when"],
    "ignore": ["id"],
    "missing": ["-999"],
}


def test_what_a_fit_declares_is_kept_in_the_schema_and_applied_to_rows() -> None:
    schema = TableSchema.infer(DECLARED, "y", overrides=Overrides.decode(OVERRIDES))
    schema = TableSchema.decode(orjson.loads(orjson.dumps(schema.encode())))
    assert {c.name: c.kind for c in schema.columns if c.declared} == {
        "zip": "text",
        "amount": "numeric",
        "when": "datetime",
    }
    expected = {
        "zip": "['3', '4', None]",
        "amount": "[1.0, nan, 7.0]",
        "count": "[1.0, nan, 3.0]",
        "single": "[1.5, nan, 2.0]",
        "half": "[1.0, nan, 2.0]",
        "price": "[1.25, nan, nan]",
        "when": f"[0.0, {34 * 3600.0}, nan]",
        "at": "[36000.0, 1.0, nan]",
        "for": "[0.001, 2.0, nan]",
    }

    def seen(rows: pa.Table) -> dict[str, str]:
        features = schema.features(rows)
        values = dict(zip(features.names, features.values, strict=True))
        return {
            name: str(
                values[name].to_pylist() if isinstance(values[name], pa.Array) else values[name].tolist()
            )
            for name in expected
        }

    assert seen(DECLARED) == expected
    assert "id" not in schema.features(DECLARED.drop_columns(["id", "y"])).names
    text = {
        "zip": ["3", "4.0", None],
        "amount": [1, -999, 7],
        "count": ["1", "-999", "3"],
        "single": ["1.5", " -999", "2"],
        "half": ["1", "-999", "2"],
        "price": ["1.25", "-999", None],
        "when": ["2024-01-01", "2024-01-02 10:00", None],
        "at": ["10:00", "00:00:01.0", None],
        "for": [0.001, 2, None],
    }
    assert seen(pa.table(text)) == expected


@pytest.mark.parametrize(
    ("given", "field", "says"),
    [
        ({"numeric": ["nope"]}, "options.schema.numeric", "'zip'"),
        ({"ignore": ["y"]}, "options.schema.ignore", "target"),
        ({"ignore": DECLARED.column_names[:-1]}, None, "no feature"),
        ({"numeric": ["when"]}, "when", "row 1"),
        ({"numeric": ["amount"], "missing": ["1"]}, None, ""),
        ({"datetime": ["amount"]}, "amount", "row 1"),
        ({"datetime": ["count"]}, "count", "declared datetime"),
    ],
)
def test_a_declaration_that_does_not_fit_the_table_is_refused_by_name(
    given: dict[str, Any], field: str | None, says: str
) -> None:
    overrides = Overrides.decode(given)
    if says:
        with pytest.raises(TabrelayError, match=says) as refused:
            TableSchema.infer(DECLARED, "y", overrides=overrides)
        assert refused.value.status == 422
        assert [fault.field for fault in refused.value.errors][:1] == ([field] if field else [])
    else:
        schema = TableSchema.infer(DECLARED, "y", overrides=overrides)
        assert np.isnan(schema.features(DECLARED).values[1][0])


def test_text_tells_how_many_values_it_has() -> None:
    table = pa.table({"name": [f"n{i}" for i in range(50)], "plan": ["a", None] * 25, "y": [0, 1] * 25})
    assert [column.distinct for column in TableSchema.infer(table, "y").columns] == [50, 1]


def test_features_are_cut_joined_and_framed() -> None:
    features = TableSchema.infer(mixed(), "y").features(mixed())
    parts = Features.concat(
        [features.take(slice(0, 5)), features.take([7, 6]), features.take(slice(139, 200))]
    )
    assert parts.rows == 8
    frame = parts.to_frame()
    assert list(frame.columns) == list(features.names)
    assert frame["amount"].dtype == np.float64
    assert frame["plan"].dtype == object
    assert all(isinstance(v, str) or np.isnan(v) for v in frame["plan"])


def test_one_row_is_cheap() -> None:
    table = pa.table({f"c{i}": [float(i), 1.0] for i in range(30)} | {"y": [0, 1]})
    schema = TableSchema.infer(table, "y")
    row = table.slice(0, 1).combine_chunks()
    schema.features(row)
    began = time.perf_counter()
    for _ in range(200):
        schema.features(row)
    assert schema.features(row).rows == 1
    assert time.perf_counter() - began < 10  # a bound against a hang, not a measurement


@pytest.mark.parametrize(
    ("values", "task", "expected", "label_type", "classes"),
    [
        ([1, 0, 1], None, "classification", "int", (0, 1)),
        ([1.0, 0.0, 1.0], None, "classification", "float", (0.0, 1.0)),
        ([True, False, True], None, "classification", "bool", (False, True)),
        (["7", "007", "7"], None, "classification", "text", ("007", "7")),
        ([1.5, 2.25, 3.0], None, "regression", "float", ()),
        (list(range(11)), None, "regression", "float", ()),
        (list(range(11)), "classification", "classification", "int", tuple(range(11))),
        ([1, 0, 1], "regression", "regression", "float", ()),
        (["a", "a", "a"], None, "classification", "text", ("a",)),
    ],
)
def test_a_target_tells_its_task_and_keeps_its_labels(
    values: list[Any], task: str | None, expected: str, label_type: str, classes: tuple[Any, ...]
) -> None:
    column = pa.chunked_array([pa.array(values)])
    target = Target.infer(column, "y", task)
    assert (target.task, target.classes) == (expected, classes)
    assert list(map(type, target.classes)) == list(map(type, classes))
    again = Target.decode(target.encode())
    assert again == target
    if expected == "classification":
        assert target.label_type == label_type
        assert again.labels(target.encode_labels(column)) == values


@pytest.mark.parametrize(
    ("values", "task", "says"),
    [
        (["a", None], None, "2"),
        ([1.0, float("inf")], "regression", "inf"),
        ([i + 0.5 for i in range(60)], "classification", "regression"),
        (["a", "b"], "regression", "classification"),
    ],
)
def test_an_unusable_target_is_refused_with_advice(values: list[Any], task: str | None, says: str) -> None:
    with pytest.raises(InvalidTarget, match=says) as refused:
        Target.infer(pa.chunked_array([pa.array(values)]), "y", task)
    assert refused.value.errors[0].field == "y"


def test_a_missing_target_lists_the_columns_and_an_unknown_task_is_refused() -> None:
    with pytest.raises(InvalidTarget, match="'b'"):
        take_target(pa.table({"a": [1], "b": [2]}), "c")
    with pytest.raises(InvalidRequest):
        Target.infer(pa.chunked_array([pa.array([1])]), "y", "ranking")


def test_date_labels_are_iso_text_in_json_and_dates_in_arrow() -> None:
    days = [dt.date(2024, 3, 1), dt.date(2023, 1, 1), dt.date(2024, 3, 1)]
    column = pa.chunked_array([pa.array(days)])
    target = Target.decode(orjson.loads(orjson.dumps(Target.infer(column, "y").encode())))
    assert target.classes == ("2023-01-01", "2024-03-01")
    labels = target.labels(target.encode_labels(column))
    assert target.array(labels).equals(pa.array(days, pa.date32()))
    with pytest.raises(InvalidTarget, match="holds dates"):
        Target.infer(column, "y", "regression")


@pytest.mark.parametrize(
    ("labels", "type_"),
    [
        ([0, 7], pa.int64()),
        ([0, 2**64 - 1], pa.uint64()),
        ([0.0, 1.0], pa.float64()),
        ([False, True], pa.bool_()),
        (["007", "7"], pa.string()),
    ],
)
def test_labels_have_one_arrow_type_also_when_there_are_none(labels: list[Any], type_: pa.DataType) -> None:
    target = Target.infer(pa.chunked_array([pa.array(labels, type_)]), "y", "classification")
    assert target.array(labels).equals(pa.array(labels, type_))
    assert target.array([]).type == type_


def test_canonical_files_are_deterministic_and_checked(tmp_path: Path) -> None:
    table = mixed()
    chunked = pa.concat_tables([table.slice(0, 7), table.slice(7)])
    digest = write_canonical(table, tmp_path / "a")
    assert write_canonical(chunked, tmp_path / "b") == digest
    assert read_canonical(tmp_path / "a", digest).equals(table.combine_chunks())
    data = bytearray((tmp_path / "a").read_bytes())
    data[50] ^= 1
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(InternalError, match="digest"):
        read_canonical(tmp_path / "a", digest)
