"""A fitted TabICL estimator as tensors and a small JSON object, and back; no code, no class names.

Upstream: tabicl/_sklearn/preprocessing.py (what is read here), tabicl/_model/kv_cache.py.

Tensors, E ensemble members of all groups in the library's order, H features kept, K classes:

    col.{block}.k, .v       F32 (E, slots + groups of features, heads, inducing points, head size)
    icl.{block}.k, .v       F32 (E, heads, training rows, head size), cache `kv`
    icl.rows                F32 (E, training rows, width), cache `repr`
    pre.columns             I64 (H,)    position in the schema of each feature the model sees, text ones first
    pre.means               F64 (H,)    what a missing number becomes; 0 for text
    pre.features            I64 (E, H)  feature shuffle of each member
    pre.classes             I64 (E, K)  class shuffle of each member, classification only
    pre.{norm}.{statistic}  F64 (H,)    mean scale low high; for `power` also lambda center spread least most
    pre.text.{i}.ends       I32 (c + 1,) offsets into .bytes, the UTF-8 categories of text feature i, ascending
    pre.text.{i}.bytes      U8 (b,)

With precision `fp16` the caches are F16. With `int8` they are I8, and beside each is `<name>.scale`, F32 of its shape with
1 in place of the positions (`icl.rows`: of the width); the scales come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from common.errors import InvalidTable
from common.models.protocol import Frozen, TensorSource
from common.models.tabicl.fit import TabICLFitted
from common.models.tabicl.precision import CHANNELS, DTYPES, POSITIONS, SCALE, scales, stored
from common.models.tabicl.sizes import FEW_GROUPS

STATE_VERSION = 2
NORMS = ("none", "power")
STATISTICS = ("mean", "scale", "low", "high")
POWER_STATISTICS = ("lambda", "center", "spread", "least", "most")
_MAX_TEXT_BYTES = 2**31 - 1


def freeze(fitted: TabICLFitted) -> Frozen:
    """Tensors in load order, caches first, and the state. Nothing is copied until a part is asked for.

    Raises InvalidTable when the categories of one text column pass 2 GiB.
    """
    estimator = fitted.estimator
    generator = estimator.ensemble_generator_
    caches = list(estimator.model_kv_cache_.values())
    placeholders = fitted.backbone.placeholders
    groups = caches[0].col_cache.kv[0].key.shape[1] - placeholders
    slots = placeholders if groups < FEW_GROUPS else 0
    merged = [
        Merged(f"{stage}.{block}.{half[0]}", [getattr(kv(c)[block], half) for c in caches], POSITIONS, drop)
        for stage, drop in (("col", placeholders - slots), ("icl", 0))
        for kv in (attrgetter(f"{stage}_cache.kv"),)
        for block in sorted(kv(caches[0]))
        for half in ("key", "value")
    ]
    if fitted.cache == "repr":
        merged.append(Merged("icl.rows", [c.row_repr for c in caches], CHANNELS))
    tensors = [cache.scales() for cache in merged] if fitted.precision == "int8" else []
    tensors += [cache.source(fitted.precision) for cache in merged]
    arrays, text = _preprocessing(estimator)
    # Widest values first, so that every tensor starts at a multiple of its own width.
    ordered = sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize)
    tensors += [_array(name, array) for name, array in ordered]
    state: dict[str, Any] = {
        "task": fitted.target.task,
        "rows": int(caches[0].train_shape[1]),
        "inputs": fitted.inputs,
        "slots": slots,
        "text": text,
        "groups": [[norm, len(members)] for norm, members in generator.ensemble_configs_.items()],
        "precision": fitted.precision,
        "cache": fitted.cache,
        "amp": False,
    }
    if fitted.target.task == "classification":
        state["codes"] = [int(code) for code in estimator.classes_]
        state["softmax_temperature"] = float(estimator.softmax_temperature)
    else:
        state["y_mean"] = float(estimator.y_scaler_.mean_[0])
        state["y_scale"] = float(estimator.y_scaler_.scale_[0])
    return Frozen(tensors, state, STATE_VERSION, fitted.precision, fitted.cache)


class Merged:
    """One cache tensor of all groups, without the first `drop` slots of its second axis; int8 scales are over `axis`."""

    def __init__(self, name: str, groups: list[torch.Tensor], axis: int, drop: int = 0) -> None:
        self._name = name
        self._groups = groups
        self._axis = axis
        self._drop = drop
        first, *rest = (int(size) for size in groups[0].shape[1:])
        self._shape = (sum(int(group.shape[0]) for group in groups), first - drop, *rest)

    def source(self, precision: str) -> TensorSource:
        """The values, a member at a time."""
        return self._source(
            self._name, DTYPES[precision], self._shape, lambda m: stored(m, precision, self._axis)
        )

    def scales(self) -> TensorSource:
        """The scales of its int8 values."""
        shape = list(self._shape)
        shape[self._axis] = 1
        return self._source(self._name + SCALE, "F32", tuple(shape), lambda m: scales(m, self._axis))

    def _source(
        self, name: str, dtype: str, shape: tuple[int, ...], made: Callable[[torch.Tensor], torch.Tensor]
    ) -> TensorSource:
        def parts() -> Iterator[memoryview]:
            for group in self._groups:
                for member in group.detach().unbind(0):
                    flat = made(member[self._drop :]).contiguous().cpu().reshape(-1)
                    yield flat.view(torch.uint8).numpy().data

        return TensorSource(name, dtype, shape, parts)


def _array(name: str, array: np.ndarray[Any, Any]) -> TensorSource:
    kinds = {"f8": "F64", "i8": "I64", "i4": "I32", "u1": "U8"}
    flat = np.ascontiguousarray(array)

    def parts() -> Iterator[memoryview]:
        yield flat.reshape(-1).view(np.uint8).data

    return TensorSource(name, kinds[flat.dtype.str[1:]], tuple(map(int, flat.shape)), parts)


def _preprocessing(estimator: Any) -> tuple[dict[str, np.ndarray[Any, Any]], int]:
    """The arrays by name, and how many of the kept features are text."""
    generator = estimator.ensemble_generator_
    text_at: list[int] = []
    number_at: list[int] = []
    categories: list[Any] = []
    means: Any = np.zeros(0)
    for name, transformer, positions in estimator.X_encoder_.tfm_.transformers_:
        if name == "categorical" and len(positions):
            text_at, categories = list(positions), list(transformer.categories_)
        elif name == "continuous" and len(positions):
            number_at, means = list(positions), transformer.statistics_
    kept = np.flatnonzero(generator.unique_filter_.features_to_keep_)
    text = [int(i) for i in kept if i < len(text_at)]
    arrays = {
        "pre.columns": np.array(text_at + number_at, dtype=np.int64)[kept],
        "pre.means": np.concatenate([np.zeros(len(text_at)), means]).astype(np.float64)[kept],
    }
    shuffles = [member for members in generator.ensemble_configs_.values() for member in members]
    arrays["pre.features"] = np.array([features for features, _ in shuffles], dtype=np.int64)
    if hasattr(estimator, "classes_"):
        arrays["pre.classes"] = np.array([classes for _, classes in shuffles], dtype=np.int64)
    for norm in generator.ensemble_configs_:
        arrays.update(_statistics(norm, generator.preprocessors_[norm]))
    for i, at in enumerate(text):
        arrays.update(_categories(i, categories[at]))
    return arrays, len(text)


def _statistics(norm: str, pipeline: Any) -> dict[str, np.ndarray[Any, Any]]:
    scaler, outliers = pipeline.standard_scaler_, pipeline.outlier_remover_
    values = dict(
        zip(
            STATISTICS,
            (scaler.mean_, scaler.scale_, outliers.lower_bounds_, outliers.upper_bounds_),
            strict=True,
        )
    )
    if norm == "power":
        power = pipeline.normalizer_
        found = (
            power.lambdas_,
            power._scaler.mean_,
            power._scaler.scale_,
            pipeline.X_min_[0],
            pipeline.X_max_[0],
        )
        values |= dict(zip(POWER_STATISTICS, found, strict=True))
    return {f"pre.{norm}.{name}": np.asarray(value, dtype=np.float64) for name, value in values.items()}


def _categories(i: int, values: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The categories in the order of their codes; the library's last one, NaN, stands for missing: code -1."""
    texts = [value.encode() for value in values if isinstance(value, str)]
    ends = np.concatenate([[0], np.cumsum([len(text) for text in texts], dtype=np.int64)])
    if ends[-1] > _MAX_TEXT_BYTES:
        raise InvalidTable("A text column has more than 2 GiB of different values; leave it out.")
    return {
        f"pre.text.{i}.ends": ends.astype(np.int32),
        f"pre.text.{i}.bytes": np.frombuffer(b"".join(texts), dtype=np.uint8),
    }


def categories(tensors: Mapping[str, Any], i: int) -> pa.StringArray:
    """The categories of text feature i as a view of the tensors; raises ValueError when they aren't UTF-8."""
    ends = tensors[f"pre.text.{i}.ends"].numpy()
    body = tensors[f"pre.text.{i}.bytes"].numpy()
    found = pa.StringArray.from_buffers(len(ends) - 1, pa.py_buffer(ends), pa.py_buffer(body))
    found.validate(full=True)
    return found
