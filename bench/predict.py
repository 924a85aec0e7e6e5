"""What does a warm predict cost? `python -m bench.predict [--rows 200 --columns 10 --rounds 5 --model NAME=PATH]`

Sides, taking turns call by call, one thread each: the library's `predict_proba` in this process, our predictor on the service's
context in this process, and the whole way over HTTP. Writes `bench/results/<name>.json`.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from tabicl import TabICLClassifier

from bench.report import report
from bench.serving import Caller, InProcess, fit, interleaved, numeric, over_rounds, quantile, registry_of
from common.models.registry import Registry
from tabrelay.up.embedded import Stack
from tabrelay.up.stack import StackOptions

CALLS = 40
SIZES = (1, 20)


def library(registry: Registry, model: str, ours: InProcess, data: pa.Table) -> TabICLClassifier:
    """The library's estimator, fitted on the same features with its cache."""
    estimator = TabICLClassifier(
        n_estimators=8,
        kv_cache="kv",
        model_path=registry.weights(model, "classification").path,
        allow_auto_download=False,
        device="cpu",
        random_state=42,
    )
    estimator.fit(ours.features.to_frame(), data.column("y").to_numpy(zero_copy_only=False))
    return estimator


def sides(estimator: Any, ours: InProcess, caller: Caller, size: int) -> dict[str, Callable[[], Any]]:
    """The three ways to ask the same `size` rows."""
    frame = ours.features.take(slice(0, size)).to_frame()
    body = caller.body(0, size)
    return {
        "library": lambda: estimator.predict_proba(frame),
        "predictor": lambda: ours.ask(0, size),
        "service": lambda: caller.ask(body),
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--columns", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", default="native", help="storage of the service's context")
    parser.add_argument("--model", default="tabicl-mini", help="NAME or NAME=PATH, as `tabrelay up --model`")
    parser.add_argument("--name", default="predict", help="name of the result")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    data = numeric(given.rows, given.columns)
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder) / "data"
        model, registry = registry_of(given.model, data_dir)
        options = StackOptions(port=0, data_dir=data_dir, models=(given.model,), threads=1)
        with Stack(options, quiet=True) as stack:
            shown = fit(stack.url, data, "bench", precision=given.precision)
            ours = InProcess.of(shown, data, data_dir, registry)
            estimator = library(registry, model, ours, data)
            caller = Caller(stack.url, "bench", data)
            rounds = [one_round(estimator, ours, caller) for _ in range(given.rounds)]
            caller.close()
    measured = {
        "model": model,
        "table": f"{given.rows} x {given.columns}",
        "precision": given.precision,
        "context_bytes": shown["bytes"],
        **over_rounds(rounds),
    }
    report("bench.predict", given.name, measured)


def one_round(estimator: Any, ours: InProcess, caller: Caller) -> dict[str, float]:
    """Milliseconds and ratios of every size."""
    found: dict[str, float] = {}
    for size in SIZES:
        taken = interleaved(sides(estimator, ours, caller, size), CALLS)
        p50 = {name: quantile(values, 0.5) for name, values in taken.items()}
        added = [full - bare for full, bare in zip(taken["service"], taken["predictor"], strict=True)]
        found |= {f"{name}_{size}_ms": value for name, value in p50.items()}
        found |= {
            f"service_over_library_{size}": p50["service"] / p50["library"],
            f"predictor_over_library_{size}": p50["predictor"] / p50["library"],
            f"service_adds_{size}_p50_ms": quantile(added, 0.5),
            f"service_adds_{size}_p95_ms": quantile(added, 0.95),
        }
    return found


if __name__ == "__main__":
    main()
