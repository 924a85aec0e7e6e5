"""What measurements of predicts share: a table, its fit over HTTP, and the ways to ask for the same rows."""

from __future__ import annotations

import http.client
import json
import statistics
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa

from common.contexts.reader import open_context
from common.models.protocol import PredictOptions, Predictor
from common.models.registry import Registry, load_adapter
from common.settings import Settings
from common.tables.features import Features
from common.tables.schema import TableSchema
from common.tables.target import Target

#: Calls of one side that are not counted.
WARM_CALLS = 5


def numeric(rows: int, columns: int, seed: int = 0) -> pa.Table:
    """A seeded numeric table with a label that its columns decide."""
    values = np.random.default_rng(seed).normal(size=(rows, columns))
    label = values[:, 0] + values[:, 1] > 0
    return pa.table({**{f"c{i}": values[:, i] for i in range(columns)}, "y": np.where(label, "yes", "no")})


def registry_of(model: str, data_dir: Path) -> tuple[str, Registry]:
    """The model's name and a registry that knows its weights; `model` is NAME or NAME=PATH, as `up --model` takes it."""
    name, _, path = model.partition("=")
    paths = {name: str(Path(path).absolute())} if path else {}
    return name, Registry(Settings(data_dir=data_dir, model_paths=paths))


def fit(url: str, data: pa.Table, dataset: str, **options: Any) -> dict[str, Any]:
    """Fit as a client does; the dataset in full."""
    rows = [list(row.values()) for row in data.to_pylist()]
    body = {
        "dataset": dataset,
        "target": "y",
        "columns": data.column_names,
        "rows": rows,
        "options": options,
    }
    with httpx.Client(base_url=url, timeout=120) as client:
        job = client.post("/v1/fits", json=body).raise_for_status().json()
        while job["state"] in ("queued", "running"):
            job = client.get(f"/v1/jobs/{job['id']}", headers={"Prefer": "wait=30"}).json()
        if job["state"] != "succeeded":
            raise SystemExit(f"the fit {job['state']}: {job['error']}")
        return dict(client.get(f"/v1/datasets/{dataset}").raise_for_status().json())


@dataclass(frozen=True)
class InProcess:
    """Our predictor on a dataset's context, in this process."""

    predictor: Predictor
    features: Features  # of the training rows

    @classmethod
    def of(cls, shown: Mapping[str, Any], data: pa.Table, data_dir: Path, registry: Registry) -> InProcess:
        """For a dataset as `GET /v1/datasets/{name}` shows it."""
        version = shown["versions"][-1]
        adapter = load_adapter(registry.spec(version["model"]))
        backbone = adapter.load(registry.weights(version["model"], version["task"]), "cpu")
        digest = version["context"]
        path = data_dir / "contexts" / "default" / f"{digest}.safetensors"
        mapped = open_context(path, digest, "disk")
        target = Target.decode(shown["target"])
        predictor = adapter.thaw(mapped.tensors, mapped.manifest.state, backbone, target)
        return cls(predictor, TableSchema.decode(shown["schema"]).features(data))

    def ask(self, start: int, size: int) -> Any:
        """Predict `size` rows."""
        return self.predictor.predict(self.features.take(slice(start, start + size)), PredictOptions())


class Caller:
    """One kept connection that asks a dataset; leaner than a client library, whose time would count as the service's."""

    def __init__(self, url: str, dataset: str, data: pa.Table) -> None:
        parts = urllib.parse.urlsplit(url)
        self._connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=120)
        self._path = f"/v1/datasets/{dataset}/predict"
        self._columns = data.column_names[:-1]
        self._rows = [list(row.values())[:-1] for row in data.to_pylist()]

    def body(self, start: int, size: int) -> bytes:
        """The request's JSON."""
        return json.dumps({"columns": self._columns, "rows": self._rows[start : start + size]}).encode()

    def ask(self, body: bytes) -> bytes:
        """The answer's JSON."""
        headers = {"content-type": "application/json"}
        self._connection.request("POST", self._path, body, headers)
        response = self._connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise SystemExit(f"{response.status}: {answer[:300]!r}")
        return answer

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def interleaved(sides: Mapping[str, Callable[[], Any]], calls: int) -> dict[str, list[float]]:
    """Milliseconds of each call, the sides taking turns call by call."""
    for call in sides.values():
        for _ in range(WARM_CALLS):
            call()
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(calls):
        for name, call in sides.items():
            began = time.perf_counter()
            call()
            taken[name].append((time.perf_counter() - began) * 1000)
    return taken


def quantile(values: Sequence[float], level: float) -> float:
    """The value at `level` of all, between neighbours where it falls between."""
    return float(np.quantile(np.asarray(values), level))


def over_rounds(rounds: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Median, least and most of each figure over the rounds."""
    return {
        name: {
            "median": round(statistics.median(r[name] for r in rounds), 3),
            "min": round(min(r[name] for r in rounds), 3),
            "max": round(max(r[name] for r in rounds), 3),
        }
        for name in rounds[0]
    }
