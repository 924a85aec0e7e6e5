"""Turns what people have (a path, a DataFrame, an Arrow table, a list of dicts) into request bodies.

Neither pandas nor pyarrow is imported unless the data is theirs; with pyarrow missing, a DataFrame goes as JSON.
"""

from __future__ import annotations

import datetime as dt
import importlib.util
import io
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import IO, Any, TypeAlias

from tabrelay.client.errors import FieldError, Invalid

ARROW_STREAM = "application/vnd.apache.arrow.stream"
MEDIA_TYPES: Mapping[str, str] = {
    ".csv": "text/csv",
    ".tsv": "text/csv",
    ".txt": "text/csv",
    ".json": "application/json",
    ".parquet": "application/vnd.apache.parquet",
    ".pq": "application/vnd.apache.parquet",
    ".arrow": "application/vnd.apache.arrow.file",
    ".feather": "application/vnd.apache.arrow.file",
    ".arrows": ARROW_STREAM,
}
#: A DataFrame's Parquet form is kept in memory up to this size, then in a temporary file.
SPOOL_BYTES = 64 * 1024**2

#: A path, a pandas DataFrame, a pyarrow Table or anything else that exports an Arrow stream, or a list of dicts.
Table: TypeAlias = Any


@dataclass(frozen=True)
class FileBody:
    """A table as a file's bytes, read anew for each attempt."""

    name: str
    media_type: str
    source: Path | IO[bytes]

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """The bytes from their start."""
        if isinstance(self.source, Path):
            with self.source.open("rb") as file:
                yield file
        else:
            self.source.seek(0)
            yield self.source

    def close(self) -> None:
        """Drop a temporary file; the user's own is left alone."""
        if not isinstance(self.source, Path):
            self.source.close()


@dataclass(frozen=True)
class InlineBody:
    """A small table as JSON columns and rows."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


def has_pyarrow() -> bool:
    """Whether pyarrow is installed; does not import it."""
    return "pyarrow" in sys.modules or importlib.util.find_spec("pyarrow") is not None


def media_type_of(path: Path) -> str:
    """The content type that a file's suffix stands for; `.gz` or `.zst` may follow it."""
    found = MEDIA_TYPES.get(Path(path.name.lower().removesuffix(".gz").removesuffix(".zst")).suffix)
    if found is None:
        raise Invalid(
            f"can't tell the format of {path.name}: use a file named {', '.join(MEDIA_TYPES)}",
            code="unknown_format",
        )
    return found


def training_body(data: Table) -> FileBody | InlineBody:
    """The body of a fit."""
    if isinstance(data, str | os.PathLike):
        return _file(Path(data))
    if _is_records(data):
        return _inline(data)
    arrow = _as_arrow(data)
    if arrow is None:
        return _inline_frame(data)
    import pyarrow.parquet as pq

    spool: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES)  # noqa: SIM115  (closed with the body)
    pq.write_table(arrow, spool)
    return FileBody("table.parquet", MEDIA_TYPES[".parquet"], spool)


def rows_body(data: Table) -> FileBody:
    """The body of a predict."""
    if isinstance(data, str | os.PathLike):
        return _file(Path(data))
    if _is_records(data):
        return _json({"records": [_json_record(record) for record in data]})
    arrow = _as_arrow(data)
    if arrow is None:
        inline = _inline_frame(data)
        return _json({"columns": inline.columns, "rows": inline.rows})
    import pyarrow as pa

    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, arrow.schema) as writer:
        writer.write_table(arrow)
    return FileBody("rows.arrows", ARROW_STREAM, sink)


def columns_of(data: Table) -> dict[str, list[Any]]:
    """A small table in memory as JSON columns."""
    if isinstance(data, str | os.PathLike):
        raise Invalid("a one-shot takes tables in memory; fit a dataset for files", code="unknown_format")
    if _is_records(data):
        inline = _inline(data)
    else:
        arrow = _as_arrow(data)
        inline = _inline_frame(data) if arrow is None else _inline_arrow(arrow)
    columns = list(zip(*inline.rows, strict=True)) if inline.rows else [()] * len(inline.columns)
    return {name: list(cells) for name, cells in zip(inline.columns, columns, strict=True)}


def labels_of(data: Any) -> list[Any]:
    """Labels of a list, an array, a Series or an Arrow column as JSON values."""
    listed = data.to_pylist() if hasattr(data, "to_pylist") else list(data)
    return [json_cell(label, "train_labels") for label in listed]


def json_cell(value: Any, column: str) -> Any:
    """A value as JSON has it: what is missing is null, times are ISO 8601 text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, Decimal):
        value = float(value)
    if isinstance(value, float):
        if math.isinf(value):
            raise _bad_column(column, "an infinite number can't be used; leave it out or give a finite one")
        return None if math.isnan(value) else float(value)
    item = getattr(value, "item", None)
    if callable(item):
        return json_cell(item(), column)
    raise _bad_column(
        column, f"a value of type {type(value).__name__} can't be sent; use numbers, text, dates or bools"
    )


def _file(path: Path) -> FileBody:
    media_type = media_type_of(path)
    if not path.is_file():
        raise FileNotFoundError(2, "no such file", str(path))
    return FileBody(path.name, media_type, path)


def _json(payload: Mapping[str, Any]) -> FileBody:
    content = json.dumps(payload, allow_nan=False, separators=(",", ":")).encode()
    return FileBody("rows.json", "application/json", io.BytesIO(content))


def _is_records(data: Any) -> bool:
    return isinstance(data, Sequence) and all(isinstance(record, Mapping) for record in data)


def _json_record(record: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name): json_cell(value, str(name)) for name, value in record.items()}


def _inline(records: Iterable[Mapping[str, Any]]) -> InlineBody:
    ready = [_json_record(record) for record in records]
    columns = list(dict.fromkeys(name for record in ready for name in record))
    return InlineBody(columns, [[record.get(name) for name in columns] for record in ready])


def _inline_frame(frame: Any) -> InlineBody:
    columns = [str(name) for name in frame.columns]
    rows = [
        [json_cell(value, name) for name, value in zip(columns, row, strict=True)]
        for row in frame.itertuples(index=False, name=None)
    ]
    return InlineBody(columns, rows)


def _inline_arrow(table: Any) -> InlineBody:
    columns = [
        [json_cell(cell, name) for cell in column.to_pylist()]
        for name, column in zip(table.column_names, table.columns, strict=True)
    ]
    return InlineBody(table.column_names, list(zip(*columns, strict=True)))


def _as_arrow(data: Any) -> Any:
    """The data as a pyarrow Table; None for a DataFrame where pyarrow is missing."""
    pandas = sys.modules.get("pandas")
    is_frame = pandas is not None and isinstance(data, pandas.DataFrame)
    if not is_frame and not hasattr(data, "__arrow_c_stream__"):
        raise TypeError(
            f"{type(data).__name__} is no table: give a path, a DataFrame, a pyarrow Table or a list of dicts"
        )
    if not has_pyarrow():
        if is_frame:
            return None
        raise Invalid("this table needs pyarrow: pip install pyarrow", code="pyarrow_missing")
    import pyarrow as pa

    if not is_frame:
        return _plain(data if isinstance(data, pa.Table) else pa.table(data))
    frame = data.set_axis([str(name) for name in data.columns], axis="columns")
    try:
        return _plain(pa.Table.from_pandas(frame, preserve_index=False))
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise Invalid(
            f"a column mixes types or holds what is no cell: {error}", code="invalid_table"
        ) from None


def _plain(table: Any) -> Any:
    """Without pandas' metadata, categories as their values: what the service needs and no more."""
    import pyarrow as pa

    for index, column in enumerate(table.schema):
        if pa.types.is_dictionary(column.type):
            values = table.column(index).cast(column.type.value_type)
            table = table.set_column(index, column.name, values)
    return table.replace_schema_metadata(None)


def _bad_column(column: str, message: str) -> Invalid:
    return Invalid(
        f"column {column!r} can't be sent", code="invalid_rows", errors=[FieldError(column, message)]
    )
