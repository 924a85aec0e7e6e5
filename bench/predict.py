"""What does the service add to a predict? `python -m bench.predict [--rows 200 --columns 10 --rounds 5 --model NAME=PATH]`

Sides, interleaved: the library's `predict_proba` in this process, our predictor on the same context in this process, and the
whole way over HTTP. Writes `bench/results/predict.json`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import torch
from tabicl import TabICLClassifier

from bench.report import report
from common.contexts.reader import open_context
from common.models.protocol import PredictOptions
from common.models.registry import Registry, load_adapter
from common.settings import Settings
from common.tables.schema import TableSchema
from common.tables.target import Target
from tabrelay.up.embedded import Stack
from tabrelay.up.stack import StackOptions

CALLS = 30
SIZES = (1, 20)


def table(rows: int, columns: int) -> pa.Table:
    """A seeded numeric table with a label that the columns decide."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(rows, columns))
    label = values[:, 0] + values[:, 1] > 0
    named = {f"c{i}": values[:, i] for i in range(columns)}
    return pa.table({**named, "y": np.where(label, "yes", "no")})


def timed(call: Callable[[], Any]) -> float:
    """Median milliseconds of a warm call."""
    call()
    taken = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        taken.append((time.perf_counter() - start) * 1000)
    return statistics.median(taken)


def fit_over_http(client: httpx.Client, data: pa.Table) -> dict[str, Any]:
    """Fit as a client does; the dataset in full."""
    rows = [list(row.values()) for row in data.to_pylist()]
    body = {"dataset": "bench", "target": "y", "columns": data.column_names, "rows": rows}
    job = client.post("/v1/fits", json=body, headers={"Prefer": "wait=30"}).raise_for_status().json()
    while job["state"] in ("queued", "running"):
        job = client.get(f"/v1/jobs/{job['id']}", headers={"Prefer": "wait=30"}).json()
    if job["state"] != "succeeded":
        raise SystemExit(f"the fit {job['state']}: {job['error']}")
    return dict(client.get("/v1/datasets/bench").json())


def sides(
    client: httpx.Client, data: pa.Table, data_dir: Path, registry: Registry, model: str, size: int
) -> dict[str, Callable[[], Any]]:
    """The three ways to ask the same `size` rows."""
    shown = client.get("/v1/datasets/bench").json()
    digest = shown["versions"][0]["context"]
    schema = TableSchema.decode(shown["schema"])
    features = schema.features(data)
    weights = registry.weights(model, "classification")
    adapter = load_adapter(registry.spec(model))
    backbone = adapter.load(weights, "cpu")
    mapped = open_context(data_dir / "contexts" / "default" / f"{digest}.safetensors", digest, "disk")
    predictor = adapter.thaw(mapped.tensors, mapped.manifest.state, backbone, Target.decode(shown["target"]))
    library = TabICLClassifier(
        n_estimators=8,
        kv_cache="kv",
        model_path=weights.path,
        allow_auto_download=False,
        device="cpu",
        random_state=42,
    )
    library.fit(features.to_frame(), data.column("y").to_numpy(zero_copy_only=False))
    asked = features.take(slice(0, size))
    frame = asked.to_frame()
    body = {
        "columns": data.column_names[:-1],
        "rows": [list(r.values())[:-1] for r in data.slice(0, size).to_pylist()],
    }
    return {
        "library": lambda: library.predict_proba(frame),
        "predictor": lambda: predictor.predict(asked, PredictOptions()),
        "service": lambda: client.post("/v1/datasets/bench/predict", json=body).raise_for_status().content,
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--columns", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="tabicl-mini", help="NAME or NAME=PATH, as `tabrelay up --model`")
    parser.add_argument("--name", default="predict", help="name of the result")
    given = parser.parse_args()
    torch.set_num_threads(1)
    name, _, path = given.model.partition("=")
    data = table(given.rows, given.columns)
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder) / "data"
        options = StackOptions(port=0, data_dir=data_dir, models=(given.model,), threads=1)
        with Stack(options, quiet=True) as stack, httpx.Client(base_url=stack.url, timeout=120) as client:
            shown = fit_over_http(client, data)
            paths = {name: str(Path(path).absolute())} if path else {}
            registry = Registry(Settings(data_dir=data_dir, model_paths=paths))
            rounds: list[dict[str, float]] = []
            ways = {size: sides(client, data, data_dir, registry, name, size) for size in SIZES}
            for _ in range(given.rounds):
                rounds.append(
                    {
                        f"{way}_{size}": timed(call)
                        for size, calls in ways.items()
                        for way, call in calls.items()
                    }
                )
    medians = {key: round(statistics.median(r[key] for r in rounds), 3) for key in rounds[0]}
    measured = {
        "model": name,
        "table": f"{given.rows} x {given.columns}",
        "context_bytes": shown["bytes"],
        "median_ms": medians,
        "spread_ms": {
            key: [round(min(r[key] for r in rounds), 3), round(max(r[key] for r in rounds), 3)]
            for key in medians
        },
        "service_over_library": {
            size: round(medians[f"service_{size}"] / medians[f"library_{size}"], 3) for size in SIZES
        },
        "service_minus_predictor_ms": {
            size: round(medians[f"service_{size}"] - medians[f"predictor_{size}"], 3) for size in SIZES
        },
    }
    report("bench.predict", given.name, measured)


if __name__ == "__main__":
    main()
