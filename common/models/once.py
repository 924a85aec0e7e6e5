"""A small table fitted and asked in one go, in memory, by any model family.

A family that can do it in fewer steps has a method `once`; for others the ordinary steps follow one another: fit, freeze,
thaw, predict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from common.models.protocol import Adapter, Backbone, Frozen, Once, OneShot, no_progress

_DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "F32": torch.float32,
    "I32": torch.int32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def once(adapter: Adapter, backbone: Backbone, shots: Sequence[OneShot]) -> list[Once]:
    """The answer of each; nothing else may use the backbone meanwhile.

    Raises what a fit raises for a table that can't be used; the others of the call then have no answer either.
    """
    own = getattr(adapter, "once", None)
    if own is not None:
        answers: list[Once] = own(shots, backbone)
        return answers
    return [_in_steps(adapter, backbone, shot) for shot in shots]


def _in_steps(adapter: Adapter, backbone: Backbone, shot: OneShot) -> Once:
    fitted = adapter.fit(shot.table, backbone, shot.options, no_progress)
    frozen = adapter.freeze(fitted)
    predictor = adapter.thaw(tensors_of(frozen), frozen.state, backbone, shot.table.target)
    members = int(shot.options.get("n_estimators", 1))
    return Once(predictor, predictor.predict(shot.rows, shot.wanted), members)


def tensors_of(frozen: Frozen) -> dict[str, Any]:
    """A frozen state's tensors in memory, as a context file's reader would give them."""
    tensors = {}
    for source in frozen.tensors:
        body = bytearray(b"".join(source.parts()))
        dtype = _DTYPES[source.dtype]
        flat = torch.frombuffer(body, dtype=dtype) if body else torch.empty(0, dtype=dtype)
        tensors[source.name] = flat.reshape(source.shape)
    return tensors
