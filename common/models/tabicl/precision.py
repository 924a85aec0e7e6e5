"""Caches in fewer bytes: what is stored, and what a block gets to see of it.

fp16 rounds each number. int8 divides by a scale first: the largest magnitude over the positions that a query attends to,
of one member, head and channel, / 127. Of the scales that were tried (a channel, a position, a head; v2's and the mini
model's dimensions) these moved the answers least: 4e-6 of a probability against 2e-5 at v2's dimensions with random
weights. A training row's representation has its channels on very different scales from row to row, so there the scale
is the row's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from tabicl._model.kv_cache import KVCacheEntry

#: The tensor beside `<name>` that holds its scales.
SCALE = ".scale"
#: Safetensors types of the stored caches.
DTYPES = {"native": "F32", "fp16": "F16", "int8": "I8"}
_INT8_MOST = 127.0
#: The axis of a cache tensor (member, ..., head, position, channel) over which one scale holds.
POSITIONS = -2
#: The axis of the representations (member, row, channel) over which one scale holds.
CHANNELS = -1


def scales(values: torch.Tensor, axis: int) -> torch.Tensor:
    """F32, of the shape of `values` with 1 in `axis`; where all values are 0 the scale is 1."""
    largest = values.abs().amax(dim=axis, keepdim=True)
    return torch.where(largest > 0, largest / _INT8_MOST, torch.ones_like(largest))


def stored(values: torch.Tensor, precision: str, axis: int) -> torch.Tensor:
    """Float32 values as they are stored."""
    if precision == "native":
        return values
    if precision == "fp16":
        return values.to(torch.float16)
    return (values / scales(values, axis)).round_().to(torch.int8)


def restored(values: torch.Tensor, scale: torch.Tensor | None, device: str) -> torch.Tensor:
    """Float32 on the device; native values that are there already are not copied."""
    moved = values.to(device).to(torch.float32)
    return moved if scale is None else moved.mul_(scale.to(device))


class Layers(Mapping[int, KVCacheEntry]):
    """One stage's caches of some members; a block's are float32 on the device only while it uses them."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], stage: str, depth: int, members: slice, device: str
    ) -> None:
        self._parts = [
            [
                (tensors[name][members], tensors[name + SCALE][members] if name + SCALE in tensors else None)
                for name in (f"{stage}.{block}.k", f"{stage}.{block}.v")
            ]
            for block in range(depth)
        ]
        self._device = device

    def __getitem__(self, block: int) -> KVCacheEntry:
        key, value = (restored(values, scale, self._device) for values, scale in self._parts[block])
        return KVCacheEntry(key=key, value=value)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._parts)))

    def __len__(self) -> int:
        return len(self._parts)


class Rows:
    """The training rows' representations of some members, float32 on the device while a forward uses them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], members: slice, device: str) -> None:
        self._values = tensors["icl.rows"][members]
        self._scale = tensors["icl.rows" + SCALE][members] if "icl.rows" + SCALE in tensors else None
        self._device = device

    def __getitem__(self, member: int) -> torch.Tensor:
        """(1, training rows, width)."""
        scale = None if self._scale is None else self._scale[member : member + 1]
        return restored(self._values[member : member + 1], scale, self._device)

    def __len__(self) -> int:
        return len(self._values)
