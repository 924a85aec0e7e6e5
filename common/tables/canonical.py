"""The canonical copy of a table: one Parquet file whose bytes depend on nothing but names, types and cells."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from blake3 import blake3

from common.errors import InternalError

ROW_GROUP_ROWS = 131_072
ZSTD_LEVEL = 3
READ_BYTES = 4 * 1024**2


def write_canonical(table: pa.Table, path: Path) -> str:
    """Write the table to `path`, whole or not at all, mode 0600; returns the blake3 hex digest of the file.

    Chunks are combined and metadata dropped, so equal tables of one pyarrow version make equal files.
    """
    plain = table.replace_schema_metadata(None).combine_chunks()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            pq.write_table(
                plain,
                file,
                compression="zstd",
                compression_level=ZSTD_LEVEL,
                row_group_size=ROW_GROUP_ROWS,
            )
            file.flush()
            os.fsync(file.fileno())
        digest = file_digest(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return digest


def read_canonical(path: Path, digest: str | None = None) -> pa.Table:
    """The table at `path`, from the very bytes that were compared with `digest` when one is given.

    Raises InternalError when the file is missing, damaged, or not the one that the digest names.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InternalError(
            f"The table file {path.name} can't be read: {error.strerror or error}."
        ) from error
    if digest is not None and blake3(data).hexdigest() != digest:
        raise InternalError(
            f"The table file {path.name} does not match its digest; it was changed or damaged."
        )
    try:
        return pq.read_table(pa.BufferReader(data))
    except (pa.ArrowInvalid, OSError) as error:
        raise InternalError(f"The table file {path.name} is damaged: {error}.") from error


def file_digest(path: Path) -> str:
    """blake3 hex of a file, read in pieces."""
    hasher = blake3()
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            hasher.update(piece)
    return str(hasher.hexdigest())


def sync_folder(folder: Path) -> None:
    """Make the folder's entries durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
