"""The library in one process of its own: `python -m tests.integration.oracle` reads jobs from stdin.

Fits plain tabicl on the schema's frame and answers rows; a line of JSON in, a line of JSON out. Runs with PYTHONHASHSEED=0, as fit
workers do, because the library's order of ensemble groups follows a set's.
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from tests.support import as_arrow

CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"


class Oracle:
    """The process; it answers one job a line, so that torch is loaded once for all tests."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.oracle"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONHASHSEED": "0",
                "OMP_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
                "TABPFN_DISABLE_TELEMETRY": "1",
                "TABPFN_NO_BROWSER": "1",
            },
            cwd=CHECKPOINTS.parent,
        )

    def __enter__(self) -> Oracle:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def ask(
        self,
        table: pa.Table,
        target: str,
        task: str,
        slices: Sequence[slice],
        *,
        rows: pa.Table | None = None,
        quantiles: Sequence[float] = (),
        checkpoint: Path | None = None,
        library: str = "tabicl",
        schema: Mapping[str, Any] | None = None,
        members: int = 8,
    ) -> list[dict[str, Any]]:
        """The library's answers for each slice of `rows` (the training rows when not given).

        `schema` is a fit's `options.schema`.
        """
        kind = "classifier" if task == "classification" else "regressor"
        job = {
            "table": base64.b64encode(as_arrow(table)).decode(),
            "rows": base64.b64encode(as_arrow(rows if rows is not None else table)).decode(),
            "target": target,
            "task": task,
            "slices": [[s.start or 0, s.stop] for s in slices],
            "quantiles": list(quantiles),
            "members": members,
            "checkpoint": str(checkpoint or CHECKPOINTS / f"tabicl-mini-{kind}.ckpt"),
            "library": library,
            "schema": schema,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(orjson.dumps(job) + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the oracle ended with status {self._process.wait(5)}"
        answers: list[dict[str, Any]] = orjson.loads(line)
        return answers


def serve() -> None:
    """Answer until stdin ends."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(orjson.dumps(answer(orjson.loads(line))) + b"\n")
        sys.stdout.buffer.flush()


def tabicl(task: str, checkpoint: Path, members: int) -> Any:
    """TabICL's estimator, as a user makes it."""
    from tabicl import TabICLClassifier, TabICLRegressor

    cls = TabICLClassifier if task == "classification" else TabICLRegressor
    return cls(
        n_estimators=members,
        kv_cache="kv",
        device="cpu",
        random_state=42,
        model_path=checkpoint,
        allow_auto_download=False,
    )


def tabpfn(task: str, checkpoint: Path, members: int) -> Any:
    """TabPFN's estimator with its cache, as a user makes it, asked in padded blocks."""
    import torch
    from tabpfn import TabPFNClassifier, TabPFNRegressor

    cls = TabPFNClassifier if task == "classification" else TabPFNRegressor
    return InBlocks(
        cls(
            n_estimators=members,
            random_state=42,
            model_path=checkpoint,
            device="cpu",
            inference_precision=torch.float32,
            fit_mode="fit_with_cache",
            n_preprocessing_jobs=1,
        )
    )


class InBlocks:
    """TabPFN rounds a row's answer by how many rows are asked; the product's rule is blocks of 32, the last row repeated."""

    BLOCK = 32

    def __init__(self, estimator: Any) -> None:
        self._estimator = estimator

    def fit(self, frame: Any, y: Any) -> None:
        self._estimator.fit(frame, y)

    def predict_proba(self, frame: Any) -> Any:
        return np.concatenate([self._estimator.predict_proba(block)[:rows] for block, rows in _blocks(frame)])

    def predict(self, frame: Any, output_type: list[str], alphas: list[float]) -> dict[str, Any]:
        told: dict[str, list[Any]] = {}
        for block, rows in _blocks(frame):
            for name in (*output_type, "mode"):
                values = self._estimator.predict(block, output_type=name, quantiles=alphas)
                values = np.stack(values, axis=1) if name == "quantiles" else values
                told.setdefault(name, []).append(values[:rows])
        return {name: np.concatenate(parts) for name, parts in told.items()}


def _blocks(frame: Any) -> Iterator[tuple[Any, int]]:
    """Each block of exactly 32 rows, and how many of them are asked for."""
    for start in range(0, len(frame), InBlocks.BLOCK):
        block = frame.iloc[start : start + InBlocks.BLOCK]
        positions = np.minimum(np.arange(InBlocks.BLOCK), len(block) - 1)
        yield block.iloc[positions].reset_index(drop=True), len(block)


LIBRARIES = {"tabicl": tabicl, "tabpfn": tabpfn}


def answer(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Fit and answer one job."""
    from common.tables.overrides import Overrides
    from common.tables.schema import TableSchema
    from common.tables.target import Target, take_target

    table = pa.ipc.open_stream(base64.b64decode(job["table"])).read_all()
    rows = pa.ipc.open_stream(base64.b64decode(job["rows"])).read_all()
    column = take_target(table, job["target"])
    target = Target.infer(column, job["target"], job["task"])
    schema = TableSchema.infer(table, job["target"], overrides=Overrides.decode(job["schema"]))
    library = LIBRARIES[job["library"]](job["task"], Path(job["checkpoint"]), job["members"])
    library.fit(schema.features(table).to_frame(), target.encode_labels(column))
    asked = schema.features(rows)
    answers = []
    for start, stop in job["slices"]:
        frame = asked.take(slice(start, stop)).to_frame()
        if job["task"] == "classification":
            answers.append({"probabilities": library.predict_proba(frame).astype(float).tolist()})
            continue
        told = library.predict(
            frame, output_type=["mean", "median", "quantiles"], alphas=job["quantiles"] or [0.5]
        )
        answers.append({name: values.astype(float).tolist() for name, values in told.items()})
    return answers


if __name__ == "__main__":
    serve()
