"""A row's TabPFN answer does not depend on its company: the same bits at one size, a few float32 steps between sizes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from common.models.tabpfn.rows import BLOCK, MOST, blocks, forwards, padded, padded_size
from common.tables.features import Features
from tests.models import fitting

CASES = list(itertools.product(fitting.VERSIONS, fitting.TASKS))
#: Largest difference between batch sizes: of probabilities, and of numbers as a share of their spread.
TOLERANCE = 5e-6
OWN = 8


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], fitting.Fitted]:
    folder = tmp_path_factory.mktemp("batching")
    return {
        (version, task): fitting.fit(
            folder, fitting.weights(folder / "checkpoints", version, task), fitting.table(task, "mixed")
        )
        for version, task in CASES
    }


def neighbours(features: Features, kind: str, count: int) -> Features:
    """Rows that a request's own ones may be batched with."""
    rng = np.random.default_rng(5)
    rows = features.take(rng.integers(0, features.rows, count))
    if kind == "duplicates":
        return features.take([0] * count)

    def cells(values: Any) -> Any:
        if isinstance(values, np.ndarray):
            hostile = {
                "missing": np.full(count, np.nan),
                "huge": rng.choice([-3e38, -1e30, 0.0, 1e12, 3e38], count),
                "noise": rng.normal(size=count) * 50,
            }
            return hostile[kind]
        return pa.array([None if kind == "missing" else f"never {i}" for i in range(count)], pa.string())

    return Features(rows.names, tuple(map(cells, rows.values)), count)


def answers(each: fitting.Fitted, features: Features) -> list[Any]:
    return fitting.arrays(each.predictor.predict(features, fitting.asked(each.table.target.task)))


@pytest.mark.parametrize("kind", ["huge", "missing", "duplicates", "noise"])
@pytest.mark.parametrize(("version", "task"), CASES)
def test_hostile_neighbours_leave_every_bit_of_a_row_s_answer(
    fitted: dict[tuple[str, str], fitting.Fitted], version: str, task: str, kind: str
) -> None:
    each = fitted[version, task]
    own = each.table.features.take(slice(0, OWN))
    alone = answers(each, own)
    before = neighbours(each.table.features, kind, 5)
    after = neighbours(each.table.features, kind, BLOCK - 5 - OWN)
    together = answers(each, Features.concat([before, own, after]))
    for expected, found in zip(alone, together, strict=True):
        assert np.array_equal(found[5 : 5 + OWN], expected)


@pytest.mark.parametrize(("version", "task"), CASES)
def test_a_larger_batch_moves_an_answer_by_less_than_the_tolerance(
    fitted: dict[tuple[str, str], fitting.Fitted], version: str, task: str
) -> None:
    each = fitted[version, task]
    own = each.table.features.take(slice(0, OWN))
    alone = answers(each, own)
    for size in (BLOCK + 1, 100, MOST, MOST + 40):
        company = neighbours(each.table.features, "huge", size - OWN)
        together = answers(each, Features.concat([own, company]))
        for expected, found in zip(alone, together, strict=True):
            spread = 1.0 if task == "classification" else max(float(np.ptp(expected)), 1.0)
            assert np.abs(found[:OWN] - expected).max() <= TOLERANCE * spread, size


def test_rows_are_padded_to_multiples_of_a_block_and_cut_again() -> None:
    assert [padded_size(rows) for rows in (1, 31, 32, 33, 256)] == [32, 32, 32, 64, 256]
    one = Features(("a", "t"), (np.array([1.0, 2.0]), pa.array(["x", None], pa.string())), 2)
    whole = padded(one)
    assert whole.rows == BLOCK
    assert np.asarray(whole.values[0]).tolist() == [1.0] + [2.0] * (BLOCK - 1)
    assert whole.values[1].to_pylist() == ["x"] + [None] * (BLOCK - 1)
    spans = list(forwards(2 * MOST + BLOCK))
    assert [span.stop - span.start for span in spans] == [MOST, MOST, BLOCK]
    assert all(span.stop - span.start == BLOCK for span in blocks(MOST))


@pytest.mark.slow
@pytest.mark.parametrize("version", ["v2", "v3.5"])
def test_no_row_of_thousands_gets_another_fingerprint_in_company(version: str, tmp_path: Path) -> None:
    """Prepared all at once, up to 1 % of rows would differ by some 1e-4."""
    from tests.support import numeric
    from tests.unit.fitting import training

    wide = training(numeric(rows=300, columns=40), "y", "classification")
    each = fitting.fit(tmp_path, fitting.weights(tmp_path / "checkpoints", version, "classification"), wide)
    asked = wide.schema.features(numeric(rows=2048, columns=40, seed=9).drop_columns(["y"]))
    together = answers(each, asked)[0]
    alone = np.concatenate(
        [answers(each, asked.take(slice(at, at + BLOCK)))[0] for at in range(0, 2048, BLOCK)]
    )
    assert np.abs(together - alone).max() <= TOLERANCE
