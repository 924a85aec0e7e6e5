"""What does each step on the way of a 1-row predict add? `python -m bench.relay [--rounds 5]`

Sides, taking turns call by call: our predictor in this process; a predict worker asked over its own socket, as the API asks it; the API
over HTTP. Writes `bench/results/relay.json`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch

from bench.report import report
from bench.serving import Caller, InProcess, fit, interleaved, numeric, over_rounds, quantile, registry_of
from common.relay.client import WorkerConnections
from common.relay.wire import JSON, Answer, Question
from common.settings import Settings
from tabrelay.up.embedded import Stack
from tabrelay.up.stack import StackOptions

CALLS = 200
ROWS, COLUMNS = 200, 10


def one_round(sides: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds of each side, and what each adds to the one before it, call by call."""
    taken = interleaved(sides, CALLS)
    found = {f"{name}_p50_ms": quantile(values, 0.5) for name, values in taken.items()}
    for added, inner, outer in (("worker_adds", "predictor", "worker"), ("api_adds", "worker", "api")):
        steps = [full - bare for full, bare in zip(taken[outer], taken[inner], strict=True)]
        found |= {f"{added}_p50_ms": quantile(steps, 0.5), f"{added}_p95_ms": quantile(steps, 0.95)}
    return found


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="tabicl-mini", help="NAME or NAME=PATH, as `tabrelay up --model`")
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = numeric(ROWS, COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder) / "data"
        model, registry = registry_of(given.model, data_dir)
        options = StackOptions(port=0, data_dir=data_dir, models=(given.model,), threads=1)
        with Stack(options, quiet=True) as stack:
            shown = fit(stack.url, data, "bench")
            ours = InProcess.of(shown, data, data_dir, registry)
            caller, connections = Caller(stack.url, "bench", data), WorkerConnections()
            body = caller.body(0, 1)
            worker = httpx.get(f"{stack.url}/v1/workers").raise_for_status().json()["predict"][0]
            version = shown["versions"][-1]
            question = Question(
                tenant="default",
                context=version["context"],
                model=version["model"],
                task=version["task"],
                request_id="bench",
                deadline_s=30.0,
                quantiles=(),
                point="mean",
                rows=JSON,
            )
            address = f"unix:{Settings(data_dir=data_dir).run}/{worker['name']}.sock"
            sides: dict[str, Callable[[], Any]] = {
                "predictor": lambda: ours.ask(0, 1),
                "worker": lambda: Answer.decode(connections.predict(address, question, body, 30.0)),
                "api": lambda: caller.ask(body),
            }
            rounds = [one_round(sides) for _ in range(given.rounds)]
            caller.close()
            connections.close()
    report("bench.relay", "relay", {"model": model, "table": f"{ROWS} x {COLUMNS}", **over_rounds(rounds)})


if __name__ == "__main__":
    main()
