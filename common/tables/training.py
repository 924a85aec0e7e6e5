"""From an untrusted training file to a canonical table with schema and target: what a parser child does."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import FieldError, InvalidRequest
from common.tables.canonical import sync_folder, write_canonical
from common.tables.json_reader import read_json
from common.tables.overrides import Overrides
from common.tables.parse import read_table
from common.tables.schema import TableSchema
from common.tables.shape import TableLimits
from common.tables.target import Target, take_target

#: Keys of a JSON fit body beside the table.
REQUEST_KEYS = (
    "dataset",
    "target",
    "model",
    "task",
    "options",
    "encoding",
    "priority",
    "deadline_s",
    "ttl_s",
)


@dataclass(frozen=True)
class ParsedTable:
    """A training table that was accepted and stored."""

    table_digest: str  # blake3 of the canonical file, which is its name
    path: Path
    rows: int
    columns: int  # those that are used, target included
    nbytes: int  # of the canonical file
    schema: TableSchema
    target: Target
    request: dict[str, Any] = field(default_factory=dict)  # a JSON body's other keys

    def encode(self) -> dict[str, Any]:
        """A JSON object that `decode` turns into the same."""
        return {
            "table_digest": self.table_digest,
            "path": str(self.path),
            "rows": self.rows,
            "columns": self.columns,
            "nbytes": self.nbytes,
            "schema": self.schema.encode(),
            "target": self.target.encode(),
            "request": self.request,
        }

    @classmethod
    def decode(cls, encoded: Mapping[str, Any]) -> ParsedTable:
        """What `encode` wrote."""
        return cls(
            table_digest=str(encoded["table_digest"]),
            path=Path(encoded["path"]),
            rows=int(encoded["rows"]),
            columns=int(encoded["columns"]),
            nbytes=int(encoded["nbytes"]),
            schema=TableSchema.decode(encoded["schema"]),
            target=Target.decode(encoded["target"]),
            request=dict(encoded["request"]),
        )


def parse_training_file(
    path: Path,
    format: str,
    target: str | None,
    task: str | None,
    out_dir: Path,
    limits: TableLimits,
    *,
    delimiter: str | None = None,
    encoding: str | None = None,
    schema: Mapping[str, Any] | None = None,
) -> ParsedTable:
    """Read a training file and write `<digest>.parquet`, target column included, into `out_dir`.

    `schema` is what `Overrides.decode` reads. A JSON body's own `target`, `task` and `options.schema` count when the
    arguments are None. Raises what `read_table`, `TableSchema.infer` and `Target.infer` raise, and InvalidRequest when
    no target is named.
    """
    request: dict[str, Any] = {}
    overrides = Overrides.decode(schema)
    if format == "json":
        table, rest = read_json(path, limits)
        request = {key: rest[key] for key in REQUEST_KEYS if key in rest}
        options = request.get("options")
        if schema is None and isinstance(options, Mapping):
            overrides = Overrides.decode(options.get("schema"))
    else:
        table = read_table(
            path, format, limits, delimiter=delimiter, encoding=encoding, missing=overrides.missing
        )
    target = target if target is not None else _text_of(request, "target")
    task = task if task is not None else _text_of(request, "task")
    if not target:
        raise InvalidRequest(
            "No target is named.", errors=[FieldError("target", "name the column to predict")]
        )
    column = take_target(table, target)
    name = target.strip()
    inferred = Target.infer(column, name, task)
    used = TableSchema.infer(table, name, overrides=overrides)
    temporary = out_dir / f".{secrets.token_hex(8)}.parquet"
    digest = write_canonical(table, temporary)
    final = out_dir / f"{digest}.parquet"
    os.replace(temporary, final)
    sync_folder(out_dir)
    return ParsedTable(
        table_digest=digest,
        path=final,
        rows=table.num_rows,
        columns=len(used.columns) + 1,
        nbytes=final.stat().st_size,
        schema=used,
        target=inferred,
        request=request,
    )


def _text_of(request: Mapping[str, Any], key: str) -> str | None:
    value = request.get(key)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{key!r} must be text.", errors=[FieldError(key, "must be text")])
    return value
