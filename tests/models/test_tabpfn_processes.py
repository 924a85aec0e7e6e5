"""What one process fits another answers from, bit for bit: five architectures, both tasks, numbers and mixed tables."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from common.models.tabpfn.environment import FIXED
from common.models.tabpfn.rows import BLOCK
from tests.models import fitting
from tests.support import mixed, numeric

ROOT = Path(__file__).parents[2]
CASES = list(itertools.product(fitting.VERSIONS, fitting.TASKS, fitting.KINDS))
ROWS = BLOCK + 8
Case = tuple[str, str, str]


def asked(kind: str) -> pa.Table:
    """Rows of another seed, some cells missing, as a client sends them."""
    made = mixed(rows=ROWS, seed=5) if kind == "mixed" else numeric(rows=ROWS, seed=5)
    return made.drop_columns([name for name in ("y", "z") if name in made.column_names])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[Case, tuple[list[Any], list[Any], list[Any]]]:
    """By case: the library's estimator in the process that fitted it, the context there, the context in another."""
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
    elsewhere(folder)
    there = {case: list(np.load(job["out"]).values()) for case, job in zip(CASES, jobs, strict=True)}
    return {case: (library[case], here[case], there[case]) for case in CASES}


def elsewhere(folder: Path) -> None:
    """Run the other process where the surroundings would lead tabpfn astray: one wrong value, and it can't start."""
    home, work, data = (folder / name for name in ("home", "work", "elsewhere"))
    for made in (home, work, data):
        made.mkdir()
    (work / ".env").write_text("".join(f"{name}=nonsense\n" for name in FIXED) + "TABPFN_TOKEN=secret\n")
    astray = ("TABPFN_", "MPLCONFIGDIR", "SKB_", "XDG_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(astray)}
    environ |= {"HOME": str(home), "PYTHONPATH": str(ROOT), "TABRELAY_DATA_DIR": str(data)}
    command = [sys.executable, "-m", "tests.models.other_process", "../jobs.json", "../told.json"]
    subprocess.run(command, check=True, cwd=work, env=environ, timeout=120)


def test_tabpfn_reaches_nobody_reads_no_env_file_and_leaves_the_home_folder_alone(
    folder: Path, answers: dict[Case, tuple[list[Any], list[Any], list[Any]]]
) -> None:
    told = json.loads((folder / "told.json").read_text())
    assert told["reached"] == []
    assert (told["settings"]["model_version"], told["settings"]["allow_cpu_large_dataset"]) == ("v2", True)
    assert list((folder / "home").rglob("*")) == []
    assert [path.name for path in (folder / "work").iterdir()] == [".env"]
    assert (folder / "elsewhere" / "cache" / "skrub").is_dir()


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
