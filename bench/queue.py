"""What does a long queue cost a submit? `python -m bench.queue [--jobs 10000 --submits 200]`

The fit workers are stopped (SIGSTOP), so that whatever is submitted waits. Latencies of `--submits` submits of small inline
tables at an empty queue, then at `--jobs` waiting jobs, all of different content; memory of Redis from its own INFO. Writes
`bench/results/queue.json`.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import redis

from bench.report import report
from common.settings import Settings
from tabrelay.up.embedded import Stack
from tabrelay.up.redis_server import prepare
from tabrelay.up.stack import StackOptions
from tests.support import children_of

THREADS = 4


def body(number: int) -> dict[str, Any]:
    """A table of 20 rows that no other number gives."""
    rows = [[number, i * 0.5, f"k{i % 2}"] for i in range(20)]
    return {"dataset": f"d{number}", "target": "y", "columns": ["a", "b", "y"], "rows": rows}


def submit(client: httpx.Client, number: int) -> float:
    """Milliseconds of one submit."""
    start = time.perf_counter()
    response = client.post("/v1/fits", json=body(number))
    if response.status_code != 202:
        raise SystemExit(f"submit {number}: {response.status_code} {response.text}")
    return (time.perf_counter() - start) * 1000


def quantiles(taken: list[float]) -> dict[str, float]:
    """p50 and p95 in milliseconds."""
    return {"p50": round(statistics.median(taken), 3), "p95": round(statistics.quantiles(taken, n=20)[18], 3)}


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--submits", type=int, default=200)
    given = parser.parse_args()
    most = str(given.jobs + 3 * given.submits)
    bounds = {"TABRELAY_MAX_QUEUED_JOBS": most, "TABRELAY_MAX_QUEUED_JOBS_PER_TENANT": most}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        options = StackOptions(port=0, data_dir=data, models=("tabicl-mini",), threads=1)
        with (
            Stack(options, quiet=True, environ=bounds) as stack,
            httpx.Client(base_url=stack.url, timeout=120) as client,
            redis.from_url(prepare(Settings(data_dir=data)).url) as server,
        ):
            for pid, command in children_of(stack.pid).items():
                if "-m fit_workers" in command:
                    os.kill(pid, signal.SIGSTOP)
            submit(client, -1)
            before = int(server.info("memory")["used_memory"])
            empty = [submit(client, number) for number in range(given.submits)]
            filling = range(given.submits, given.jobs)
            began = time.perf_counter()
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(lambda number: submit(client, number), filling))
            filled_s = time.perf_counter() - began
            after = int(server.info("memory")["used_memory"])
            full = [submit(client, number) for number in range(given.jobs, given.jobs + given.submits)]
    measured = {
        "jobs": given.jobs,
        "submit_ms_at_empty_queue": quantiles(empty),
        "submit_ms_at_full_queue": quantiles(full),
        "full_over_empty_p50": round(statistics.median(full) / statistics.median(empty), 3),
        "redis_bytes_per_job": round((after - before) / given.jobs),
        f"submits_per_s_of_{THREADS}_threads": round(len(filling) / filled_s, 1),
    }
    report("bench.queue", "queue", measured)


if __name__ == "__main__":
    main()
