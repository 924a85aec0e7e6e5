"""What the library itself answers for each table of a run: one process of its own, asked when the run is over."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from tests.support import numeric

ROOT = Path(__file__).resolve().parents[2]
ASKED_ROWS = 24
ASKED_COLUMNS = 20

Matrix = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Content:
    """A training table and its options, told by numbers."""

    rows: int
    columns: int
    seed: int
    estimators: int

    def table(self) -> pa.Table:
        """The table."""
        return numeric(self.rows, self.columns, self.seed)

    def options(self) -> str:
        """The form field."""
        return orjson.dumps({"n_estimators": self.estimators}).decode()


def asked() -> pa.Table:
    """The rows that every predict takes some of; columns that a table lacks are ignored."""
    return numeric(ASKED_ROWS, ASKED_COLUMNS, seed=999_983).drop_columns(["y"])


def expected(contents: Iterable[Content]) -> dict[Content, Matrix]:
    """The library's probabilities of all asked rows, by content."""
    wanted = list(contents)
    # Fit workers run with this hash seed: the library's order of ensemble groups follows a set's.
    environ = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    told = subprocess.run(
        [sys.executable, "-m", "tests.chaos.expected"],
        input=orjson.dumps([asdict(content) for content in wanted]),
        stdout=subprocess.PIPE,
        env=environ,
        cwd=ROOT,
        check=True,
    ).stdout
    return {
        content: np.array(answer)
        for content, answer in zip(wanted, orjson.loads(told.splitlines()[-1]), strict=True)
    }


def _answers(contents: list[Content]) -> list[list[list[float]]]:
    import torch
    from tabicl import TabICLClassifier

    from common.tables.schema import TableSchema
    from common.tables.target import Target, take_target

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = []
    for content in contents:
        table = content.table()
        column = take_target(table, "y")
        target = Target.infer(column, "y", "classification")
        schema = TableSchema.infer(table, "y")
        library = TabICLClassifier(
            n_estimators=content.estimators,
            kv_cache="kv",
            device="cpu",
            random_state=42,
            model_path=ROOT / "checkpoints" / "tabicl-mini-classifier.ckpt",
            allow_auto_download=False,
        )
        library.fit(schema.features(table).to_frame(), target.encode_labels(column))
        frame = schema.features(asked()).to_frame()
        found.append(library.predict_proba(frame).astype(float).tolist())
    return found


if __name__ == "__main__":
    given = [Content(**content) for content in orjson.loads(sys.stdin.buffer.read())]
    sys.stdout.buffer.write(orjson.dumps(_answers(given)) + b"\n")
