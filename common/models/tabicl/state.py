"""A fitted TabICL estimator as tensors and a small JSON object, and back; no code, no class names.

Upstream: tabicl/_sklearn/preprocessing.py (what is read here), tabicl/_model/kv_cache.py.

Tensors, E ensemble members of all groups in the library's order, H features kept, K classes:

    col.{block}.k, .v       F32 (E, slots + groups of features, heads, inducing points, head size)
    icl.{block}.k, .v       F32 (E, heads, training rows, head size)
    pre.columns             I64 (H,)    position in the schema of each feature the model sees, text ones first
    pre.means               F64 (H,)    what a missing number becomes; 0 for text
    pre.features            I64 (E, H)  feature shuffle of each member
    pre.classes             I64 (E, K)  class shuffle of each member, classification only
    pre.{norm}.{statistic}  F64 (H,)    mean scale low high; for `power` also lambda center spread least most
    pre.text.{i}.ends       I32 (c + 1,) offsets into .bytes, the UTF-8 categories of text feature i, ascending
    pre.text.{i}.bytes      U8 (b,)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from common.errors import InvalidTable
from common.models.protocol import Frozen, TensorSource
from common.models.tabicl.fit import TabICLFitted

STATE_VERSION = 1
NORMS = ("none", "power")
STATISTICS = ("mean", "scale", "low", "high")
POWER_STATISTICS = ("lambda", "center", "spread", "least", "most")
#: With fewer groups of features than this, the placeholder slots stay: they decide how a few rows are rounded.
FEW_GROUPS = 4
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
    tensors = [
        _merged(
            f"{stage}.{block}.{half[0]}",
            [getattr(getattr(c, f"{stage}_cache").kv[block], half) for c in caches],
            drop,
        )
        for stage, drop in (("col", placeholders - slots), ("icl", 0))
        for block in sorted(getattr(caches[0], f"{stage}_cache").kv)
        for half in ("key", "value")
    ]
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
        "precision": "native",
        "amp": False,
    }
    if fitted.target.task == "classification":
        state["codes"] = [int(code) for code in estimator.classes_]
        state["softmax_temperature"] = float(estimator.softmax_temperature)
    else:
        state["y_mean"] = float(estimator.y_scaler_.mean_[0])
        state["y_scale"] = float(estimator.y_scaler_.scale_[0])
    return Frozen(tensors=tensors, state=state, state_version=STATE_VERSION, precision="native")


def _merged(name: str, groups: list[torch.Tensor], drop: int) -> TensorSource:
    """One cache tensor of all groups, without the first `drop` slots of its second axis."""

    def parts() -> Iterator[memoryview]:
        for group in groups:
            # A member's kept slots are contiguous, so dropping the first ones needs no copy.
            for piece in group.unbind(0) if drop else (group,):
                flat = piece[drop:].detach().contiguous().cpu().reshape(-1)
                yield flat.view(torch.uint8).numpy().data

    members = sum(int(group.shape[0]) for group in groups)
    first, *rest = (int(size) for size in groups[0].shape[1:])
    return TensorSource(name, "F32", (members, first - drop, *rest), parts)


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
