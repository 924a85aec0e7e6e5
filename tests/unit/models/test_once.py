"""A table fitted and asked in one go answers as the library's fit and predict do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from common.errors import InvalidTarget
from common.models.once import once
from common.models.protocol import Once, OneShot, PredictOptions
from tests.support import mixed, numeric
from tests.unit.fitting import adapter, backbone, training

DEFAULTS = PredictOptions()
#: One forward holds training and test rows, and the library's group order follows a hash seed.
LAST_BITS = 1e-6


def shot(table: pa.Table, target: str = "y", members: int = 1, wanted: PredictOptions = DEFAULTS) -> OneShot:
    train = training(table, target)
    return OneShot(train, train.features.take(slice(3, 23)), {"n_estimators": members, "seed": 42}, wanted)


def ask(*shots: OneShot) -> list[Once]:
    return once(adapter(), backbone(shots[0].table.target.task), shots)


def library(asked: OneShot) -> np.ndarray[Any, Any]:
    fitted = adapter().fit(
        asked.table, backbone(asked.table.target.task), asked.options, lambda fraction: None
    )
    return numbers(fitted.predict(asked.rows, asked.wanted))


def numbers(prediction: Any) -> np.ndarray[Any, Any]:
    if prediction.quantiles is not None:
        return np.column_stack([prediction.mean, prediction.quantiles])
    found = prediction.probabilities if prediction.probabilities is not None else prediction.mean
    assert found is not None
    return np.asarray(found)


TABLES = {
    "numeric": (numeric(), "y"),
    "mixed": (mixed().drop_columns(["z"]), "y"),
    "only_text": (mixed().select(["plan", "y"]), "y"),
    "ten_classes": (numeric(rows=200, seed=6, classes=10), "y"),
    "constant": (numeric().append_column("k", pa.array([1.0] * 120)), "y"),
    "regression": (mixed().drop_columns(["y"]), "z"),
}


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("members", [1, 2, 8])
def test_answers_equal_the_library_s_fit_and_predict(kind: str, members: int) -> None:
    asked = shot(*TABLES[kind], members=members)
    told = ask(asked)[0]
    np.testing.assert_allclose(
        numbers(told.prediction),
        library(asked),
        rtol=0,
        atol=LAST_BITS * (100 if kind == "regression" else 1),
    )


def test_quantiles_equal_the_library_s() -> None:
    asked = shot(*TABLES["regression"], wanted=PredictOptions((0.1, 0.9)))
    np.testing.assert_allclose(numbers(ask(asked)[0].prediction), library(asked), rtol=0, atol=1e-4)


def test_the_context_answers_again_as_it_did() -> None:
    asked = shot(numeric())
    told = ask(asked)[0]
    again = told.predictor.predict(asked.rows, DEFAULTS)
    np.testing.assert_allclose(numbers(again), numbers(told.prediction), rtol=0, atol=LAST_BITS)


def test_tables_that_share_a_forward_answer_as_alone() -> None:
    shots = [shot(numeric(seed=1)), shot(mixed().drop_columns(["z"])), shot(numeric(seed=2))]
    shots.append(shot(numeric(seed=3), members=2))
    for together, asked in zip(ask(*shots), shots, strict=True):
        alone = ask(asked)[0]
        assert together.members == alone.members
        np.testing.assert_allclose(
            numbers(together.prediction), numbers(alone.prediction), rtol=0, atol=LAST_BITS
        )
        again = together.predictor.predict(asked.rows, DEFAULTS)
        np.testing.assert_allclose(numbers(again), numbers(alone.prediction), rtol=0, atol=LAST_BITS)


def test_members_are_those_that_the_table_allows() -> None:
    assert ask(shot(mixed().select(["plan", "y"]), members=8))[0].members < 8


def test_a_family_without_a_way_of_its_own_answers_by_the_ordinary_steps() -> None:
    class Ordinary:
        def __getattr__(self, name: str) -> Any:
            if name == "once":
                raise AttributeError(name)
            return getattr(adapter(), name)

    asked = shot(mixed().drop_columns(["z"]))
    told = once(Ordinary(), backbone("classification"), [asked])[0]  # type: ignore[arg-type]  # all but `once`
    assert np.array_equal(numbers(told.prediction), library(asked))


def test_a_table_that_the_model_can_t_take_is_refused_as_by_a_fit() -> None:
    labels = [f"k{i % 11}" for i in range(120)]
    many = numeric().drop_columns(["y"]).append_column("y", pa.array(labels))
    with pytest.raises(InvalidTarget):
        ask(shot(many))
