"""What does a predict feel of a fit beside it? `python -m bench.overlap [--rounds 5 --seconds 6]`

1-row predicts of a small context, one due every 50 ms whether or not the one before has been answered, so that waiting counts. Sides, in
turns: the service idle; the service while large fits run back to back on its fit worker; the library in one process, idle and with a
thread that fits. Every answer is compared with the first. Writes `bench/results/overlap.json`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import torch
from tabicl import TabICLClassifier

from bench.report import report
from bench.serving import Caller, InProcess, fit, numeric, over_rounds, quantile, registry_of
from tabrelay.up.embedded import Stack
from tabrelay.up.stack import StackOptions

ROWS, COLUMNS = 200, 10
#: What is fitted beside.
LARGE_ROWS, LARGE_COLUMNS = 4_000, 30
EVERY_S = 0.05


def paced(call: Callable[[], Any], check: Callable[[Any], bool], seconds: float) -> tuple[list[float], int]:
    """Milliseconds from when each call was due to its answer, and how many answers were wrong."""
    taken, wrong = [], 0
    began = time.perf_counter()
    for at in range(int(seconds / EVERY_S)):
        due = began + at * EVERY_S
        time.sleep(max(due - time.perf_counter(), 0))
        wrong += not check(call())
        taken.append((time.perf_counter() - due) * 1000)
    return taken, wrong


@contextmanager
def beside(work: Callable[[int], None]) -> Iterator[list[float]]:
    """`work(n)` again and again on a thread; the seconds of each that ended."""
    over, took = threading.Event(), []

    def run() -> None:
        number = 0
        while not over.is_set():
            began = time.perf_counter()
            work(number)
            took.append(time.perf_counter() - began)
            number += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield took
    finally:
        over.set()
        thread.join()


class Fits:
    """Fits of large tables by the service, never the same twice."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._seed = 1000

    def __call__(self, number: int) -> None:
        """Fit one and wait for its end."""
        self._seed += 1
        values = numeric(LARGE_ROWS, LARGE_COLUMNS, self._seed)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, values.schema) as writer:
            writer.write_table(values)
        files = {"file": ("large.arrow", sink.getvalue().to_pybytes())}
        with httpx.Client(base_url=self._url, timeout=600) as client:
            job = client.post("/v1/fits", files=files, data={"dataset": "large", "target": "y"})
            told = job.raise_for_status().json()
            while told["state"] in ("queued", "running"):
                told = client.get(f"/v1/jobs/{told['id']}", headers={"Prefer": "wait=20"}).json()
        if told["state"] != "succeeded":
            raise SystemExit(f"the fit beside {told['state']}: {told['error']}")


def figures(name: str, taken: list[float], wrong: int) -> dict[str, float]:
    """p50, p95, p99 and wrong answers of one side."""
    levels = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    found = {f"{name}_{label}_ms": quantile(taken, level) for label, level in levels.items()}
    return found | {f"{name}_wrong": float(wrong)}


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="length of each side's turn")
    parser.add_argument("--model", default="tabicl-mini", help="NAME or NAME=PATH, as `tabrelay up --model`")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    data, large = numeric(ROWS, COLUMNS), numeric(LARGE_ROWS, LARGE_COLUMNS, 7)
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder) / "data"
        model, registry = registry_of(given.model, data_dir)
        options = StackOptions(port=0, data_dir=data_dir, models=(given.model,), threads=1)
        with Stack(options, quiet=True) as stack:
            shown = fit(stack.url, data, "small")
            ours = InProcess.of(shown, data, data_dir, registry)
            settings: dict[str, Any] = {
                "n_estimators": 8,
                "kv_cache": "kv",
                "model_path": registry.weights(model, "classification").path,
                "allow_auto_download": False,
                "device": "cpu",
                "random_state": 42,
            }
            library = TabICLClassifier(**settings)
            library.fit(ours.features.to_frame(), data.column("y").to_numpy(zero_copy_only=False))
            frame = ours.features.take(slice(0, 1)).to_frame()
            large_frame = large.drop_columns(["y"]).to_pandas()
            labels = large.column("y").to_numpy(zero_copy_only=False)
            caller = Caller(stack.url, "small", data)
            body = caller.body(0, 1)
            first = json.loads(caller.ask(body))["probabilities"]
            first_library = library.predict_proba(frame)

            def service() -> tuple[list[float], int]:
                return paced(
                    lambda: caller.ask(body),
                    lambda got: json.loads(got)["probabilities"] == first,
                    given.seconds,
                )

            def in_one() -> tuple[list[float], int]:
                return paced(
                    lambda: library.predict_proba(frame),
                    lambda got: bool(np.array_equal(got, first_library)),
                    given.seconds,
                )

            fits = Fits(stack.url)
            for _ in range(given.rounds):
                found = figures("service_idle", *service())
                with beside(fits):
                    time.sleep(1)
                    found |= figures("service_beside_fits", *service())
                found |= figures("library_idle", *in_one())
                with beside(lambda _: TabICLClassifier(**settings).fit(large_frame, labels) and None):
                    time.sleep(1)
                    found |= figures("library_beside_fits", *in_one())
                for side in ("service", "library"):
                    for level in ("p50", "p95"):
                        ratio = found[f"{side}_beside_fits_{level}_ms"] / found[f"{side}_idle_{level}_ms"]
                        found[f"{side}_{level}_beside_over_idle"] = ratio
                rounds.append(found)
            caller.close()
    sizes = {"table": f"{ROWS} x {COLUMNS}", "beside": f"{LARGE_ROWS} x {LARGE_COLUMNS}"}
    report("bench.overlap", "overlap", {"model": model, **sizes, **over_rounds(rounds)})


if __name__ == "__main__":
    main()
