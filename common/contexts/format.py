"""The file's layout: safetensors, the header padded with spaces so that the body starts at a multiple of 4 KiB.

Little-endian length of the header, header as JSON, body; tensors without holes or overlap, in the order of the
header (https://github.com/huggingface/safetensors, "Format"). The reader trusts nothing: whatever is not exactly
that is a ContextDamaged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from common.errors import ContextDamaged
from common.models.protocol import WIDTHS, TensorSource

ALIGNMENT = 4096
#: safetensors' own bound.
HEADER_MOST_BYTES = 100 * 1000 * 1000
MANIFEST_KEY = "tabrelay"
_LENGTH_BYTES = 8
_RANK_MOST = 8


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies in the body."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """A parsed header."""

    manifest: str
    tensors: tuple[TensorEntry, ...]
    body_at: int
    size: int  # of the whole file


def build_header(manifest: str, tensors: Sequence[TensorSource]) -> bytes:
    """Length and header of a file that holds these tensors in this order."""
    header: dict[str, Any] = {"__metadata__": {MANIFEST_KEY: manifest}}
    at = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = orjson.dumps(header)
    text += b" " * (-(len(text) + _LENGTH_BYTES) % ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def parse_header(data: memoryview) -> Layout:
    """The layout of a whole file; raises ContextDamaged."""
    size = len(data)
    _require(size >= _LENGTH_BYTES, "it is too short")
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    body_at = _LENGTH_BYTES + length
    _require(
        length <= HEADER_MOST_BYTES and body_at <= size,
        "its header is longer than the file or the format allows",
    )
    _require(body_at % ALIGNMENT == 0, "its body is not aligned")
    try:
        header = orjson.loads(bytes(data[_LENGTH_BYTES:body_at]))
    except orjson.JSONDecodeError as error:
        raise ContextDamaged(f"the context's header is not JSON: {error}") from error
    _require(isinstance(header, dict), "its header is not an object")
    metadata = header.pop("__metadata__", None)
    _require(
        isinstance(metadata, dict)
        and list(metadata) == [MANIFEST_KEY]
        and isinstance(metadata[MANIFEST_KEY], str),
        "it has no manifest",
    )
    entries = sorted(
        (_entry(name, stored) for name, stored in header.items()), key=lambda e: (e.start, e.stop)
    )
    at = 0
    for entry in entries:
        _require(entry.start == at, f"tensor {entry.name!r} leaves a hole or overlaps")
        at = entry.stop
    _require(body_at + at == size, "its body has another length than its header says")
    return Layout(metadata[MANIFEST_KEY], tuple(entries), body_at, size)


def _entry(name: str, stored: Any) -> TensorEntry:
    fault = f"tensor {name[:80]!r} is described wrongly"
    _require(isinstance(stored, Mapping) and set(stored) == {"dtype", "shape", "data_offsets"}, fault)
    dtype, shape, offsets = stored["dtype"], stored["shape"], stored["data_offsets"]
    _require(isinstance(dtype, str) and dtype in WIDTHS, fault)
    _require(_counts(shape) and len(shape) <= _RANK_MOST and _counts(offsets) and len(offsets) == 2, fault)
    start, stop = offsets
    _require(start <= stop and stop - start == WIDTHS[dtype] * math.prod(shape), fault)
    _require(start % WIDTHS[dtype] == 0, f"tensor {name[:80]!r} is not aligned")
    return TensorEntry(name, dtype, tuple(shape), start, stop)


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**48 for v in values)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ContextDamaged(f"the context's file is damaged: {otherwise}")
