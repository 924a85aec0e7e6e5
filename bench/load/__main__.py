"""Does the service hold many users' one-shots? `python -m bench.load [--pause 1 0.1 --hold 15 --url URL]`

Virtual users as k6's, which `k6.js` beside this file asks for the same: each sends a one-shot (a random table of 150 x 10, 20 rows to
answer, never the same twice), waits for the answer, pauses, and goes on. Their number rises to 10, stays, rises to 25, stays. Once
with each `--pause` of seconds. Without `--url` a stack of its own is started on one thread a worker; this process shares its
cores. Failed is every answer but a 200. Writes `bench/results/load.json`; exit status 1 when a threshold fails at a pause of 1 s:
failed < 1 %, p95 < 500 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson

from bench.report import report
from tabrelay.up.embedded import Stack
from tabrelay.up.stack import StackOptions

STAGES = (10, 25)
#: Seconds in which the users of a stage come.
RAMP_S = 3.0
TRAIN, ROWS, COLUMNS = 150, 20, 10
FAILED_MOST, P95_MOST_MS = 0.01, 500.0
TIMEOUT_S = 60.0


@dataclass
class Stage:
    """What was answered while so many users were there."""

    users: int
    taken_ms: list[float] = field(default_factory=list)  # of 200s
    refused_ms: list[float] = field(default_factory=list)  # of the others
    answers: Counter[str] = field(default_factory=Counter)
    server_ms: list[dict[str, float]] = field(default_factory=list)
    lasted_s: float = 0.0

    def shown(self) -> dict[str, Any]:
        """As the result has it."""
        requests = sum(self.answers.values())
        failed = requests - self.answers["200"]
        parts = sorted({part for timings in self.server_ms for part in timings})
        return {
            "users": self.users,
            "requests": requests,
            "answered_per_s": round(self.answers["200"] / self.lasted_s, 1),
            "failed_share": round(failed / max(requests, 1), 4),
            "answers": dict(self.answers),
            "ms": spread(self.taken_ms),
            "refused_ms": spread(self.refused_ms),
            "server_median_ms": {
                part: round(statistics.median(t.get(part, 0.0) for t in self.server_ms), 2) for part in parts
            },
        }


def spread(taken_ms: list[float]) -> dict[str, float]:
    """p50, p95 and the longest."""
    if len(taken_ms) < 2:
        return {}
    cuts = statistics.quantiles(taken_ms, n=20)
    return {"p50": round(cuts[9], 1), "p95": round(cuts[18], 1), "most": round(max(taken_ms), 1)}


def one_shot(rng: np.random.Generator) -> bytes:
    """A body that no other draw gives."""
    values = rng.normal(size=(TRAIN + ROWS, COLUMNS))
    labels = np.where(values[:TRAIN, 0] + values[:TRAIN, 1] > 0, "yes", "no").tolist()
    return orjson.dumps(
        {
            "train_features": values[:TRAIN].tolist(),
            "train_labels": labels,
            "eval_features": values[TRAIN:].tolist(),
        }
    )


class Load:
    """Users against one service."""

    def __init__(self, client: httpx.AsyncClient, pause_s: float, seed: int) -> None:
        self._client = client
        self._pause_s = pause_s
        self._rng = np.random.default_rng(seed)
        self._stage = Stage(0)
        self._ends = time.monotonic()

    async def run(self, hold_s: float) -> list[Stage]:
        """All stages, one after the other."""
        stages, users = [], []
        self._ends = time.monotonic() + len(STAGES) * (RAMP_S + hold_s)
        for size in STAGES:
            came = size - len(users)
            for _ in range(came):
                users.append(asyncio.create_task(self._user()))
                await asyncio.sleep(RAMP_S / came)
            self._stage = Stage(size)
            stages.append(self._stage)
            began = time.monotonic()
            await asyncio.sleep(hold_s)
            self._stage.lasted_s = time.monotonic() - began
        await asyncio.gather(*users)
        return stages

    async def _user(self) -> None:
        while time.monotonic() < self._ends:
            body = one_shot(self._rng)
            stage, began = self._stage, time.perf_counter()
            try:
                response = await self._client.post("/v1/predict", content=body)
                said = str(response.status_code)
            except httpx.HTTPError as error:
                said = type(error).__name__
            taken_ms = (time.perf_counter() - began) * 1000
            stage.answers[said] += 1
            (stage.taken_ms if said == "200" else stage.refused_ms).append(taken_ms)
            if said == "200":
                stage.server_ms.append(response.json()["timings_ms"])
            await asyncio.sleep(self._pause_s)


async def measure(url: str, pauses: list[float], hold_s: float) -> dict[str, list[Stage]]:
    """The stages of each pause."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"content-type": "application/json"}
    measured = {}
    async with httpx.AsyncClient(base_url=url, limits=limits, headers=headers, timeout=TIMEOUT_S) as client:
        rng = np.random.default_rng(2**20)
        for _ in range(5):
            (await client.post("/v1/predict", content=one_shot(rng))).raise_for_status()
        for seed, pause_s in enumerate(pauses):
            measured[f"{pause_s:g}"] = await Load(client, pause_s, seed).run(hold_s)
    return measured


@contextmanager
def service(url: str | None) -> Iterator[str]:
    """A running service's address, or that of a stack of our own."""
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory() as folder:
        options = StackOptions(port=0, data_dir=Path(folder) / "data", models=("tabicl-mini",), threads=1)
        with Stack(options, quiet=True) as stack:
            yield stack.url


def main() -> int:
    """Measure and write the result; 1 when a threshold fails at a pause of 1 s."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pause", type=float, nargs="+", default=[1.0, 0.1], metavar="S")
    parser.add_argument("--hold", type=float, default=15.0, metavar="S", help="seconds of each stage")
    parser.add_argument("--url", default=None, help="a running service; a stack of its own when not given")
    given = parser.parse_args()
    with service(given.url) as url:
        limits = httpx.get(f"{url}/v1/limits").json().get("one_shot", {})
        measured = asyncio.run(measure(url, given.pause, given.hold))
    shown = {pause: [stage.shown() for stage in stages] for pause, stages in measured.items()}
    holds = all(
        stage["failed_share"] < FAILED_MOST and stage["ms"]["p95"] < P95_MOST_MS
        for stage in shown.get("1", [])
    )
    facts = {
        "table": f"{TRAIN} x {COLUMNS}, {ROWS} rows answered",
        "n_estimators": limits.get("n_estimators"),
        "thresholds": {"failed_share": FAILED_MOST, "p95_ms": P95_MOST_MS},
        "thresholds_hold_at_1_s": holds,
        "by_pause_s": shown,
    }
    report("bench.load", "load", facts)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
