"""The tables of the parity suite: scikit-learn's, generated ones of every type mix, and files that broke others."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from sklearn import datasets

from common.tables.parse import read_table
from common.tables.shape import TableLimits
from tests.support import mixed, numeric

CASES = Path(__file__).resolve().parents[1] / "cases"
LIMITS = TableLimits(max_rows=10_000, max_columns=500, max_cells=10**6)
ROWS = 90


@dataclass(frozen=True)
class Case:
    """A table to fit and ask."""

    table: pa.Table
    target: str = "y"
    task: str = "classification"
    file: bytes | None = None  # sent as it is, instead of the table as Parquet
    file_name: str = "table.parquet"
    options: dict[str, Any] = field(default_factory=dict)
    encoding: str | None = None


def case(name: str) -> Case:
    """Made where it is asked for, so that collecting the tests costs nothing."""
    return MAKERS[name]()


def _sklearn(load: Callable[..., Any], task: str, rows: int = 150) -> Callable[[], Case]:
    def make() -> Case:
        values, target = load(return_X_y=True)
        chosen = np.random.default_rng(0).permutation(len(target))[:rows]
        return Case(_table(values[chosen], target[chosen]), task=task)

    return make


def _made(make_data: Callable[..., Any], task: str, **options: Any) -> Callable[[], Case]:
    return lambda: Case(_table(*make_data(n_samples=ROWS, random_state=0, **options)), task=task)


def _table(values: Any, target: Any) -> pa.Table:
    return pa.table({**{f"c{i}": values[:, i] for i in range(values.shape[1])}, "y": target})


def _columns(seed: int = 0) -> dict[str, pa.Array]:
    """A column of every type, told apart by its name; some cells of most are missing."""
    rng = np.random.default_rng(seed)
    gaps = rng.random(ROWS) < 0.1

    def gappy(values: Any, type_: pa.DataType | None = None) -> pa.Array:
        return pa.array([None if gap else v for v, gap in zip(values, gaps, strict=True)], type_)

    days = [dt.date(2020, 1, 1) + dt.timedelta(days=int(d)) for d in rng.integers(0, 2000, ROWS)]
    moments = [dt.datetime(2024, 1, 1) + dt.timedelta(seconds=int(s)) for s in rng.integers(0, 10**7, ROWS)]
    words = rng.choice(["red", "green", "blue"], ROWS).tolist()
    return {
        "int8": gappy(rng.integers(-9, 9, ROWS).tolist(), pa.int8()),
        "int64": gappy((10**15 + rng.integers(0, 50, ROWS)).tolist(), pa.int64()),
        "uint64": gappy([2**63 + int(i) for i in rng.integers(0, 90, ROWS)], pa.uint64()),
        "half": pa.array(rng.normal(size=ROWS).astype(np.float16)),
        "single": gappy(rng.normal(size=ROWS).astype(np.float32).tolist(), pa.float32()),
        "double": gappy(rng.lognormal(0, 3, ROWS).tolist()),
        "decimal": gappy([Decimal(int(i)) / 100 for i in rng.integers(0, 9999, ROWS)], pa.decimal128(9, 2)),
        "bool": gappy((rng.random(ROWS) < 0.4).tolist()),
        "text": gappy(words),
        "large": gappy(rng.choice(["x", "Y", "ß", "日"], ROWS).tolist(), pa.large_string()),
        "dictionary": gappy(words).dictionary_encode(),
        "key": pa.array([f"user-{int(i)}" for i in rng.permutation(10 * ROWS)[:ROWS]]),
        "date": gappy(days),
        "moment": gappy(moments, pa.timestamp("us")),
        "zoned": gappy(moments, pa.timestamp("ms", "Europe/Berlin")),
        "clock": gappy([m.time() for m in moments], pa.time32("s")),
        "span": gappy([dt.timedelta(seconds=int(s)) for s in rng.integers(0, 9999, ROWS)], pa.duration("ms")),
        "nothing": pa.nulls(ROWS),
        "constant": pa.array([7.0] * ROWS),
    }


def _mix(*names: str, task: str = "classification", seed: int = 0) -> Callable[[], Case]:
    """A table of these columns, all of them without names; the target follows the first one a little."""

    def make() -> Case:
        columns = _columns(seed)
        chosen = {name: columns[name] for name in names or columns}
        rng = np.random.default_rng(seed + 1)
        ranks = np.array([_number(cell) for cell in chosen[next(iter(chosen))].to_pylist()])
        score = ranks + rng.normal(size=ROWS) * (ranks.std() + 0.1) * 0.3
        target = score if task == "regression" else np.where(score > np.median(score), "high", "low")
        return Case(pa.table({**chosen, "y": target}), task=task)

    return make


def _number(cell: Any) -> float:
    """A number for any cell that is the same in every process."""
    return float(sum(str(cell).encode()) % 97)


def _file(name: str, target: str, task: str = "classification", **more: Any) -> Callable[[], Case]:
    def make() -> Case:
        path = CASES / name
        table = read_table(path, path.suffix[1:], LIMITS, encoding=more.get("encoding"))
        return Case(table, target, task, path.read_bytes(), name, **more)

    return make


def _declared() -> Case:
    columns = _columns(5)
    table = pa.table({name: columns[name] for name in ("int8", "double", "text", "key", "bool")})
    score = np.random.default_rng(5).normal(size=ROWS)
    schema = {"ignore": ["key"], "categorical": ["int8", "bool"], "missing": ["red"]}
    return Case(table.append_column("y", pa.array(score > 0)), options={"schema": schema})


MAKERS: dict[str, Callable[[], Case]] = {
    "iris": _sklearn(datasets.load_iris, "classification"),
    "wine": _sklearn(datasets.load_wine, "classification"),
    "breast cancer": _sklearn(datasets.load_breast_cancer, "classification", 120),
    "digits": _sklearn(datasets.load_digits, "classification"),
    "diabetes": _sklearn(datasets.load_diabetes, "regression"),
    "moons": _made(datasets.make_moons, "classification", noise=0.2),
    "circles": _made(datasets.make_circles, "classification", noise=0.1),
    "blobs": _made(datasets.make_blobs, "classification", centers=10),
    "friedman1": _made(datasets.make_friedman1, "regression"),
    "friedman2": _made(datasets.make_friedman2, "regression"),
    "linear": _made(datasets.make_regression, "regression", n_features=40),
    "gaps": lambda: Case(numeric()),
    "one column": lambda: Case(numeric().select(["c1", "y"])),
    "mixed": lambda: Case(mixed().drop_columns(["z"])),
    "mixed regression": lambda: Case(mixed().drop_columns(["y"]), "z", "regression"),
    "every type": _mix(),
    "every type regression": _mix(task="regression", seed=2),
    "only text": _mix("text", "large", "dictionary"),
    "only text regression": _mix("large", "text", task="regression"),
    "only keys": _mix("key"),
    "only booleans": _mix("bool"),
    "only dates": _mix("date", "moment", "zoned"),
    "only dates regression": _mix("moment", "date", task="regression"),
    "only times": _mix("clock", "span"),
    "small floats": _mix("half", "single", "decimal", task="regression"),
    "large integers": _mix("int64", "uint64", "int8"),
    "text and numbers": _mix("double", "text", "int8", "key", seed=3),
    "dates and booleans": _mix("bool", "zoned", "nothing", "constant", task="regression", seed=4),
    "declared": _declared,
    "case 01": _file("01_large_int64_ids.parquet", "flag"),
    "case 02": _file("02_timestamps_seconds_apart.parquet", "late"),
    "case 03a": _file("03a_labels_int.csv", "y"),
    "case 03b": _file("03b_labels_float.csv", "y"),
    "case 03c": _file("03c_labels_bool.csv", "y"),
    "case 03d": _file("03d_labels_text_numbers.csv", "y"),
    "case 04": _file("04_semicolon_bom_crlf_quoted_newlines.csv", "churned"),
    "case 07": _file("07_signal_in_bool_and_date.parquet", "status"),
    "case 09": _file("09_continuous_target.csv", "y", "regression"),
    "case 11a": _file("11a_single_class.csv", "y"),
    "case 11b": _file("11b_class_seen_once.csv", "y"),
    "case 11c": _file("11c_constant_target_regression.csv", "y", "regression"),
    "case 15": _file("15_parquet_types.parquet", "y"),
    "case 16": _file("16_train.csv", "y"),
    "case 17": _file("17_latin1.csv", "y", encoding="latin-1"),
}


def asked(chosen: Case, most: int = 60) -> pa.Table:
    """Rows of the training table, then the same with values that it never had: thousandfold numbers, words, gaps."""
    rows = chosen.table.drop_columns([chosen.target]).slice(0, most)
    rows = decoded(rows)
    plain = pa.table({name: _wide(rows.column(name)) for name in rows.column_names})
    strange = {
        name: pa.array(_strange(plain.column(name)), plain.column(name).type) for name in rows.column_names
    }
    return pa.concat_tables([plain, pa.table(strange)])


def decoded(table: pa.Table) -> pa.Table:
    """Dictionaries as their values, which is how every reader gives them."""
    return pa.table(
        {
            name: column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column
            for name, column in zip(table.column_names, table.columns, strict=True)
        }
    )


def _wide(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Floats wide enough for a thousandfold."""
    return column.cast(pa.float64()) if pa.types.is_floating(column.type) else column


def _strange(column: pa.ChunkedArray) -> Iterator[Any]:
    for i, cell in enumerate(column.to_pylist()):
        if i % 5 == 4:
            yield None
        elif isinstance(cell, float):
            yield cell * 1000
        elif isinstance(cell, str):
            yield f"{cell} not" if i % 3 else cell
        else:
            yield cell
