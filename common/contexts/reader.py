"""Reading a context: map the file, compare its digest, check its header, view its tensors."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3

from common.contexts.format import Layout, TensorEntry, parse_header
from common.contexts.manifest import Manifest
from common.errors import ContextDamaged, ContextGone

_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Stamp:
    """A file as it was when it was mapped."""

    path: Path
    inode: tuple[int, int]  # device, number
    nbytes: int
    written_ns: int

    @classmethod
    def of(cls, path: Path, found: os.stat_result) -> Stamp:
        """From what the kernel says of the file."""
        return cls(path, (found.st_dev, found.st_ino), found.st_size, found.st_mtime_ns)

    def broken(self) -> bool:
        """Whether somebody wrote into the mapped file. One that was unlinked or replaced lives on unchanged."""
        try:
            now = Stamp.of(self.path, self.path.stat())
        except OSError:
            return False
        return now.inode == self.inode and now != self


@dataclass(frozen=True)
class MappedContext:
    """A context whose tensors are views of the mapped file; the map ends with the last tensor."""

    manifest: Manifest
    tensors: Mapping[str, torch.Tensor]
    nbytes: int  # of the whole file
    tier: str
    stamp: Stamp


def open_context(path: Path, digest: str, tier: str) -> MappedContext:
    """Map a context file.

    Raises ContextGone when there is none, ContextDamaged when its bytes are not those that the digest names,
    ContextIncompatible for another format. The file must never be changed while it is mapped, only unlinked.
    """
    mapped, stamp = _map(path)
    view = memoryview(mapped)
    if blake3(view).hexdigest() != digest:
        raise ContextDamaged
    layout = parse_header(view)
    manifest = Manifest.decode(layout.manifest)
    return MappedContext(manifest, _tensors(mapped, layout), layout.size, tier, stamp)


def _map(path: Path) -> tuple[mmap.mmap, Stamp]:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError as error:
        raise ContextGone from error
    try:
        stamp = Stamp.of(path, os.fstat(descriptor))
        if stamp.nbytes == 0:
            raise ContextDamaged
        # Private and copy-on-write: pages are shared with every other reader, and nobody writes. A read-only map
        # would do as well, but torch warns about views of memory that it can't write.
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY), stamp
    finally:
        os.close(descriptor)


def _tensors(mapped: mmap.mmap, layout: Layout) -> dict[str, torch.Tensor]:
    return {entry.name: _tensor(mapped, layout.body_at, entry) for entry in layout.tensors}


def _tensor(mapped: mmap.mmap, body_at: int, entry: TensorEntry) -> torch.Tensor:
    dtype = _DTYPES[entry.dtype]
    count = (entry.stop - entry.start) // dtype.itemsize
    if count == 0:
        return torch.empty(entry.shape, dtype=dtype)
    flat = torch.frombuffer(mapped, dtype=dtype, count=count, offset=body_at + entry.start)
    return flat.reshape(entry.shape)
