"""Every preset of tabpfn's preprocessing that it can fit itself goes into a context and comes back bit for bit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from tabpfn.preprocessing.configs import PreprocessorConfig

from common.models.protocol import PredictOptions
from common.models.tabpfn.adapter import ADAPTER
from tests.models import fitting

CATEGORICALS = (
    "none",
    "numeric",
    "onehot",
    "ordinal",
    "ordinal_shuffled",
    "ordinal_very_common_categories_shuffled",
)
#: These tabpfn 9.2.0 can't fit itself.
BROKEN = ("adaptive", "kdi_random_alpha", "kdi_random_alpha_uni")


def scalings() -> list[str]:
    return [name for name in get_args(get_type_hints(PreprocessorConfig)["name"]) if name not in BROKEN]


@pytest.mark.slow
@pytest.mark.parametrize("scaling", scalings())
def test_every_preset_comes_back_bit_for_bit(scaling: str, tmp_path: Path) -> None:
    weights = fitting.weights(tmp_path / "checkpoints", "v2", "classification")
    table = fitting.table("classification", "mixed")
    backbone = ADAPTER.load(weights, "cpu")
    specs: dict[str, Any] = backbone.loaded.specs  # type: ignore[assignment]
    chosen = specs["classification"]
    for categorical, svd in itertools.product(CATEGORICALS, (None, "svd")):
        preset = PreprocessorConfig(
            scaling, categorical_name=categorical, append_original=True, global_transformer_name=svd
        )
        config = replace(chosen.inference_config, PREPROCESS_TRANSFORMS=[preset])
        specs["classification"] = replace(chosen, inference_config=config)
        fitted = fitting.fit(tmp_path, weights, table, n_estimators=2)
        rows = table.features.take(slice(0, 32))
        found = fitted.predictor.predict(rows, PredictOptions()).probabilities
        assert np.array_equal(found, fitted.state.predict(rows).probabilities), (categorical, svd)
