"""What the library's preprocessing learns of a training table, column by column, without its classes around it.

Upstream: tabicl/_sklearn/preprocessing.py (`fit` of each step). The arrays have the library's layout, columns contiguous,
because the order of a sum moves its last bit; so every statistic equals the library's own.
150 rows x 10 columns: 1 ms instead of 12.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from sklearn.preprocessing import PowerTransformer
from tabicl._sklearn.preprocessing import EnsembleGenerator

from common.models.tabicl.lean import CLIP, Group, Power, Preprocessing, codes_of
from common.tables.features import Features

Floats = npt.NDArray[np.float64]
#: The library's own (CustomStandardScaler, OutlierRemover).
EPSILON, OUTLIERS, LEAST_SPREAD = 1e-6, 4.0, 1e-6


def learn(
    features: Features, codes: npt.NDArray[Any] | None, options: Mapping[str, Any]
) -> tuple[Preprocessing, npt.NDArray[np.int64] | None]:
    """The preprocessing, and the class shuffle of each member, (E, K); `codes` are 0 to K - 1, None for regression."""
    texts, values, means = _numbers(features)
    kept = _varying(values)
    text_at = [i for i in range(len(features.names)) if features.is_text(i)]
    order = np.array(text_at + [i for i in range(len(features.names)) if i not in text_at])
    values = np.asfortranarray(values[:, kept])
    shuffles = _shuffles(values.shape[1], codes, options)
    return (
        Preprocessing(
            inputs=len(features.names),
            columns=tuple(order[kept].tolist()),
            text=tuple(categories for categories, keep in zip(texts, kept, strict=False) if keep),
            means=means[kept][:, np.newaxis],
            groups=tuple(
                _group(norm, values, np.array([features for features, _ in members], dtype=np.int64))
                for norm, members in shuffles.items()
            ),
        ),
        None
        if codes is None
        else np.array([classes for members in shuffles.values() for _, classes in members], dtype=np.int64),
    )


def _numbers(features: Features) -> tuple[list[pa.StringArray], Floats, Floats]:
    """The categories of text features; (n, H) values, text ones first and as codes; what a missing number becomes."""
    texts: list[pa.StringArray] = []
    columns: list[Any] = []
    for given in features.values:
        if not isinstance(given, np.ndarray):
            found = given.unique().drop_null()
            texts.append(found.take(pc.array_sort_indices(found)))
            columns.append(codes_of(given, texts[-1]))
    numeric = [given for given in features.values if isinstance(given, np.ndarray)]
    means = np.zeros(len(features.names))
    values = np.empty((features.rows, len(features.names)), order="F")
    for i, column in enumerate(columns + numeric):
        values[:, i] = column
    first = len(columns)
    missing = np.isnan(values)
    if numeric:
        masked = np.ma.masked_array(values[:, first:], mask=missing[:, first:])
        means[first:] = np.ma.filled(np.ma.mean(masked, axis=0), 0.0)
    if missing.any():
        values = np.asfortranarray(np.where(missing, means, values))
    return texts, values, means


def _varying(values: Floats) -> npt.NDArray[np.bool_]:
    """Which columns hold more than one value: all of a single row, and the first where none does."""
    if len(values) <= 1:
        return np.ones(values.shape[1], dtype=bool)
    kept: npt.NDArray[np.bool_] = (values != values[0]).any(axis=0)
    if not kept.any():
        kept[0] = True
    return kept


def _shuffles(
    features: int, codes: npt.NDArray[Any] | None, options: Mapping[str, Any]
) -> dict[str, list[tuple[Any, Any]]]:
    """Feature and class shuffle of each member by scaling, drawn by the library.

    The library's order of scalings follows a set's; this is the one that fit workers see.
    """
    generator = EnsembleGenerator(
        classification=codes is not None,
        n_estimators=int(options["n_estimators"]),
        random_state=int(options["seed"]),
    )
    generator.norm_methods_ = ["none", "power"]
    generator.n_features_in_ = features
    generator.rng_ = random.Random(int(options["seed"]))  # noqa: S311  (the library's own shuffles)
    if codes is not None:
        generator.n_classes_ = len(np.unique(codes))
    drawn = generator._generate_ensemble()[0]
    return {norm: drawn[norm] for norm in ("power", "none") if norm in drawn}


def _group(norm: str, values: Floats, shuffles: npt.NDArray[np.int64]) -> Group:
    mean, scale = np.mean(values, axis=0), np.std(values, axis=0) + EPSILON
    scaled = np.clip((values - mean) / scale, -CLIP, CLIP)
    power = None
    if norm == "power":
        transformer = PowerTransformer(method="yeo-johnson", standardize=True)
        least, most = np.min(scaled, axis=0), np.max(scaled, axis=0)
        scaled = transformer.fit_transform(scaled)
        scaler = transformer._scaler
        power = Power(*map(_upright, (transformer.lambdas_, scaler.mean_, scaler.scale_, least, most)))
    low, high = _bounds(scaled)
    return Group(_upright(mean), _upright(scale), _upright(low), _upright(high), shuffles, power)


def _bounds(values: Floats) -> tuple[Floats, Floats]:
    """Four standard deviations around the mean of what lies within four standard deviations of the mean."""
    freedom = 1 if len(values) > 1 else 0

    def around(of: Floats) -> tuple[Floats, Floats]:
        means = np.nanmean(of, axis=0)
        spread = np.maximum(np.nanstd(of, axis=0, ddof=freedom), LEAST_SPREAD)
        return means - OUTLIERS * spread, means + OUTLIERS * spread

    low, high = around(values)
    clean = values.copy()  # rows contiguous from here on, as in the library
    clean[(values < low) | (values > high)] = np.nan
    return around(clean)


def _upright(values: Any) -> Floats:
    """(H,) -> (H, 1)."""
    return np.asarray(values, dtype=np.float64)[:, np.newaxis]
