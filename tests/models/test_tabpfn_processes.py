"""What one process fits another answers from, bit for bit: five architectures, both tasks, numbers and mixed tables."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from common.models.tabpfn.rows import BLOCK
from tests.models import fitting
from tests.support import mixed, numeric

CASES = list(itertools.product(fitting.VERSIONS, fitting.TASKS, fitting.KINDS))
ROWS = BLOCK + 8
Case = tuple[str, str, str]


def asked(kind: str) -> pa.Table:
    """Rows of another seed, some cells missing, as a client sends them."""
    made = mixed(rows=ROWS, seed=5) if kind == "mixed" else numeric(rows=ROWS, seed=5)
    return made.drop_columns([name for name in ("y", "z") if name in made.column_names])


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, tuple[list[Any], list[Any], list[Any]]]:
    """By case: the library's estimator in the process that fitted it, the context there, the context in another."""
    folder = tmp_path_factory.mktemp("processes")
    jobs: list[dict[str, str]] = []
    library, here = {}, {}
    for case in CASES:
        version, task, kind = case
        weights = fitting.weights(folder / "checkpoints", version, task)
        fitted = fitting.fit(folder / "data", weights, fitting.table(task, kind))
        rows = folder / f"{kind}.arrow"
        with pa.ipc.new_file(str(rows), asked(kind).schema) as writer:
            writer.write_table(asked(kind))
        features = fitted.table.schema.features(asked(kind))
        first = fitted.state.predict(features.take(slice(0, BLOCK)), fitting.asked(task))
        library[case] = fitting.arrays(first)
        here[case] = fitting.both_sizes(fitted.predictor, features, task)
        jobs.append(
            {
                "version": version,
                "task": task,
                "checkpoints": str(folder / "checkpoints"),
                "data": str(folder / "data"),
                "digest": fitted.digest,
                "rows": str(rows),
                "out": str(folder / f"{len(jobs)}.npz"),
            }
        )
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "tests.models.other_process", str(folder / "jobs.json")]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], timeout=120)
    there = {case: list(np.load(job["out"]).values()) for case, job in zip(CASES, jobs, strict=True)}
    return {case: (library[case], here[case], there[case]) for case in CASES}


@pytest.mark.parametrize(("version", "task", "kind"), CASES)
def test_a_context_answers_in_another_process_bit_for_bit(
    answers: dict[Case, tuple[list[Any], list[Any], list[Any]]], version: str, task: str, kind: str
) -> None:
    library, here, there = answers[version, task, kind]
    assert len(library) == (1 if task == "classification" else 2)
    assert len(there) == len(here) == 2 * len(library)
    for expected, found in zip(library, there, strict=False):
        assert np.array_equal(expected, found)
        assert np.ptp(found) > 0, "all rows got one answer"
    for expected, found in zip(here, there, strict=True):
        assert np.array_equal(expected, found)
