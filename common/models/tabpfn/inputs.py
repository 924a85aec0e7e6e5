"""From features to the float64 matrix that a fitted TabPFN takes; learnt from the library, applied without it.

The library is fitted on `Features.to_frame()`: float64 columns, and object columns of text. It reads the kind of
every column again from each batch of rows that it is asked about (tabpfn/preprocessing/clean.py), so that one
request's cell could change or fail its neighbours. Here a column's rule is fixed at the fit:

as it is    a number is passed on;
numbers     few different numbers are categories to the library: their place among them, -1 for any other;
texts       the place of a text among the sorted ones;
constant    a column of one value in training says nothing: its training value, whatever it holds now.

A missing cell is what the library makes of one in this column: NaN when training had gaps there, else mostly -1. A
text never seen is -1 either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from tabpfn.constants import NA_PLACEHOLDER
from tabpfn.preprocessing.clean import clean_data_transform
from tabpfn.preprocessing.datamodel import FeatureModality
from tabpfn.validation import ensure_compatible_predict_input_sklearn

from common.errors import FieldError, InvalidRows
from common.tables.features import Features

Floats = npt.NDArray[np.float64]
#: What the library gives a value that is not among a column's categories.
UNKNOWN = -1.0
#: The model computes in float32; a number beyond it would reach it as infinity.
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Rule:
    """What becomes of one column."""

    kind: str  # "as it is", "numbers", "texts" or "constant"
    text: bool  # whether the column's cells are text
    missing: float = np.nan  # what a missing cell becomes; of "constant", what every cell becomes
    numbers: Floats | None = None  # ascending, NaN left out
    texts: pa.StringArray | None = None  # in the order of their codes
    gap: str | None = None  # a text that the library takes for a missing cell


@dataclass(frozen=True)
class Inputs:
    """The rules of all columns, in the schema's order."""

    rules: tuple[Rule, ...]

    @classmethod
    def learn(cls, estimator: Any, features: Features) -> Inputs:
        """The rules of a fitted estimator; `features` are its training rows."""
        cleaned = clean(estimator, _probe(features))
        encoder = estimator.ordinal_encoder_
        selected = list(encoder.selected_columns())
        fitted = encoder.named_transformers_.get("encoder")
        categories = dict(zip(selected, fitted.categories_, strict=True)) if selected else {}
        constant = encoder.constant_values_
        few = set(estimator.inferred_feature_schema_.indices_for(FeatureModality.CATEGORICAL))
        rules = []
        for i in range(len(features.names)):
            text = features.is_text(i)
            if i in constant:
                rules.append(Rule("constant", text, float(cleaned[0, i])))
            elif i in categories:
                rules.append(_rule(text, categories[i], i in few, float(cleaned[1, i])))
            else:
                rules.append(Rule("as it is", text))
        return cls(tuple(rules))

    def __call__(self, features: Features) -> Floats:
        """(n, columns), column after column in memory, as a data frame's.

        Raises InvalidRows when the features are not those of the fit or a number is beyond float32.
        """
        if len(features.values) != len(self.rules):
            raise InvalidRows(
                f"The rows have {len(features.values)} features; the context has {len(self.rules)}."
            )
        matrix = np.empty((len(self.rules), features.rows))
        for i, (rule, values) in enumerate(zip(self.rules, features.values, strict=True)):
            if rule.text == isinstance(values, np.ndarray):
                raise InvalidRows(
                    f"Column {features.names[i]!r} has another kind than in the training table."
                )
            matrix[i] = _apply(rule, values)
        _refuse_huge(features, matrix)
        return matrix.T


def clean(estimator: Any, features: Features) -> Any:
    """What the library itself makes of rows before its ensemble's own steps, float64 (n, columns)."""
    checked = ensure_compatible_predict_input_sklearn(features.to_frame(), estimator)
    return clean_data_transform(
        checked,
        cat_indices=estimator.inferred_feature_schema_.indices_for(FeatureModality.CATEGORICAL),
        ord_encoder=estimator.ordinal_encoder_,
    )


def huge(features: Features) -> list[FieldError]:
    """The columns that hold a number beyond float32."""
    return [
        FieldError(name, f"holds a number beyond {LARGEST:.2g}, which the model can't take; rescale it")
        for name, values in zip(features.names, features.values, strict=True)
        if isinstance(values, np.ndarray) and (np.abs(values) > LARGEST).any()
    ]


def _refuse_huge(features: Features, matrix: Floats) -> None:
    if not (np.abs(matrix) > LARGEST).any():
        return
    faults = huge(features)
    if faults:
        raise InvalidRows(f"Column {faults[0].field!r} {faults[0].message}.", errors=faults)


def _probe(features: Features) -> Features:
    """The first training row and one of missing cells."""
    first = features.take(slice(0, 1))
    gaps = tuple(
        np.array([values[0], np.nan])
        if isinstance(values, np.ndarray)
        else pa.array([values[0].as_py(), None], pa.string())
        for values in first.values
    )
    return Features(features.names, gaps, 2)


def _rule(text: bool, categories: Sequence[Any], few: bool, missing: float) -> Rule:
    if text:
        # A gap keeps its place among the others. Where texts are many, the library writes a word of its own into gaps.
        gap = None if few else NA_PLACEHOLDER
        known = [value if isinstance(value, str) and value != gap else None for value in categories]
        return Rule("texts", True, missing, texts=pa.array(known, pa.string()), gap=gap)
    numbers = np.array([float(value) for value in categories])
    return Rule("numbers", False, missing, numbers=numbers[~np.isnan(numbers)])


def _apply(rule: Rule, values: Any) -> Any:
    if rule.kind == "constant":
        return rule.missing
    if rule.kind == "texts":
        found = pc.index_in(values, value_set=rule.texts, skip_nulls=True).cast(pa.float64())
        gaps = pc.is_in(values, value_set=pa.array([None, rule.gap], pa.string()))
        codes = pc.if_else(gaps, rule.missing, pc.fill_null(found, UNKNOWN))
        return codes.to_numpy(zero_copy_only=False)
    if rule.numbers is not None:
        numbers = rule.numbers
        at = np.minimum(np.searchsorted(numbers, values), len(numbers) - 1)
        codes = np.where(numbers[at] == values, at, UNKNOWN)
        return np.where(np.isnan(values), rule.missing, codes)
    return values
