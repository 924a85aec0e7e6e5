"""What do one-shots gain that share a forward? `python -m bench.together [--rounds 15]`

Tables of one shape, fitted and answered in one forward or each alone, in this process on one thread; the sides interleaved, medians of
rounds. The third side is the library's own fit and predict. Writes `bench/results/together.json`.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from bench.report import report
from common.models.once import once
from common.models.protocol import OneShot, PredictOptions, TrainingTable, no_progress
from common.models.registry import Registry, load_adapter
from common.settings import Settings
from common.tables.schema import TableSchema
from common.tables.target import Target

MODEL = "tabicl-mini"
SHAPES = ((150, 10), (300, 15), (500, 20))
TOGETHER = (1, 2, 4, 8)
ROWS = 20


def shot(rows: int, columns: int, seed: int) -> OneShot:
    """A seeded numeric table and rows of the same kind."""
    values = np.random.default_rng(seed).normal(size=(rows + ROWS, columns))
    label = pa.array(np.where(values[:, 0] + values[:, 1] > 0, "yes", "no"))
    table = pa.table({**{f"c{i}": values[:, i] for i in range(columns)}, "y": label})
    train = table.slice(0, rows)
    schema = TableSchema.infer(train, "y")
    target = Target.infer(train.column("y"), "y")
    training = TrainingTable(schema.features(train), schema, target, target.encode_labels(train.column("y")))
    asked = schema.features(table.slice(rows))
    return OneShot(training, asked, {"n_estimators": 1, "seed": 42}, PredictOptions())


def medians(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each side, after one call that is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for at in range(rounds + 1):
        for name, call in sides.items():
            began = time.perf_counter()
            call()
            if at:
                taken[name].append((time.perf_counter() - began) * 1000)
    return {name: round(statistics.median(values), 2) for name, values in taken.items()}


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    registry = Registry(Settings())
    adapter = load_adapter(registry.spec(MODEL))
    backbone = adapter.load(registry.weights(MODEL, "classification"), "cpu")

    def library(asked: OneShot) -> Any:
        return adapter.fit(asked.table, backbone, asked.options, no_progress).predict(asked.rows)

    measured = {}
    for rows, columns in SHAPES:
        shots = [shot(rows, columns, seed) for seed in range(max(TOGETHER))]
        sides: dict[str, Callable[[], Any]] = {
            str(count): partial(once, adapter, backbone, shots[:count]) for count in TOGETHER
        }
        sides["library"] = partial(library, shots[0])
        ms = medians(sides, given.rounds)
        measured[f"{rows} x {columns}"] = {
            "ms": ms,
            "gain": {count: round(count * ms["1"] / ms[str(count)], 3) for count in TOGETHER},
            "alone_over_library": round(ms["1"] / ms["library"], 3),
        }
    report("bench.together", "together", {"model": MODEL, "members": 1, "by_shape": measured})


if __name__ == "__main__":
    main()
