"""Writing a context: one pass, tensor part by tensor part, hashing as it goes; whole and durable, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from common.contexts.format import build_header
from common.errors import InternalError, StorageFull
from common.models.protocol import TensorSource

#: Bytes handed to the kernel at once.
WRITE_BYTES = 64 * 1024**2
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Written:
    """A whole file under a temporary name."""

    path: Path
    digest: str  # blake3 of the file, hex
    nbytes: int


@contextlib.contextmanager
def no_room_named(path: Path) -> Iterator[None]:
    """A full disk raises StorageFull that names the folder."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFull(f"there is no room left in {path.parent} for a context") from error
        raise


def write_context(path: Path, manifest: str, tensors: Sequence[TensorSource]) -> Written:
    """Write to `path`, fsynced, mode 0600; on any fault the file is removed.

    Needs memory for one part of one tensor. Raises StorageFull, and InternalError when a tensor's parts don't add up.
    """
    header = build_header(manifest, tensors)
    hasher = blake3()
    try:
        with no_room_named(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb", buffering=0) as file:
                _write(file.fileno(), memoryview(header), hasher)
                for tensor in tensors:
                    written = sum(_write(file.fileno(), part, hasher) for part in tensor.parts())
                    if written != tensor.nbytes:
                        raise InternalError(
                            f"tensor {tensor.name!r} has {written} bytes, its shape says {tensor.nbytes}"
                        )
                os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return Written(path, hasher.hexdigest(), len(header) + sum(tensor.nbytes for tensor in tensors))


def _write(descriptor: int, data: memoryview, hasher: blake3) -> int:
    at = 0
    while at < len(data):
        piece = data[at : at + WRITE_BYTES]
        done = os.write(descriptor, piece)
        hasher.update(piece[:done])
        at += done
    return at
