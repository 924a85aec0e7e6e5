"""What do 16 clients gain from sharing forwards? `python -m bench.batching [--clients 16 --seconds 4 --rounds 5]`

1-row predicts over HTTP from one client, from many on one context, and from many on a context each; beside them our predictor in this
process with one row and with as many rows as there are clients. Sides take turns by rounds; predictions a second. Writes
`bench/results/batching.json`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import torch

from bench.report import report
from bench.serving import Caller, InProcess, fit, numeric, over_rounds, registry_of
from tabrelay.up.embedded import Stack
from tabrelay.up.stack import StackOptions

ROWS, COLUMNS = 200, 10


def rate_of(call: Callable[[], object], rows: int, seconds: float) -> float:
    """Rows a second of calls one after another."""
    call()
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        call()
        calls += 1
    return calls * rows / (time.perf_counter() - began)


def asking(url: str, datasets: Sequence[str], tables: Sequence[pa.Table], seconds: float) -> float:
    """Rows a second of one client for each name in `datasets`, a thread and a connection each."""
    counts = [0] * len(datasets)
    begin = threading.Barrier(len(datasets))

    def client(number: int) -> None:
        caller = Caller(url, datasets[number], tables[number])
        body = caller.body(number, 1)
        caller.ask(body)
        begin.wait()
        ends = time.perf_counter() + seconds
        while time.perf_counter() < ends:
            caller.ask(body)
            counts[number] += 1
        caller.close()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(len(datasets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


def clients_process(url: str, datasets: Sequence[str], tables: Sequence[pa.Table], seconds: float) -> float:
    """`asking` in a process of its own, as clients are."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(asking, (url, datasets, tables, seconds))


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each side's turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="tabicl-mini", help="NAME or NAME=PATH, as `tabrelay up --model`")
    given = parser.parse_args()
    torch.set_num_threads(1)
    names = [f"d{number}" for number in range(given.clients)]
    tables = [numeric(ROWS, COLUMNS, seed) for seed in range(given.clients)]
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder) / "data"
        model, registry = registry_of(given.model, data_dir)
        options = StackOptions(port=0, data_dir=data_dir, models=(given.model,), threads=1)
        with Stack(options, quiet=True) as stack:
            shown = [fit(stack.url, data, name) for name, data in zip(names, tables, strict=True)]
            ours = InProcess.of(shown[0], tables[0], data_dir, registry)
            sides: dict[str, Callable[[], float]] = {
                "predictor_one_row": lambda: rate_of(lambda: ours.ask(0, 1), 1, given.seconds),
                "predictor_all_rows": lambda: rate_of(
                    lambda: ours.ask(0, given.clients), given.clients, given.seconds
                ),
                "one_client": lambda: clients_process(stack.url, names[:1], tables[:1], given.seconds),
                "one_context": lambda: clients_process(
                    stack.url, [names[0]] * given.clients, [tables[0]] * given.clients, given.seconds
                ),
                "a_context_each": lambda: clients_process(stack.url, names, tables, given.seconds),
            }
            rounds = []
            for _ in range(given.rounds):
                rates = {f"{name}_rows_per_s": measure() for name, measure in sides.items()}
                one = rates["one_client_rows_per_s"]
                rates["one_context_over_predictor"] = (
                    rates["one_context_rows_per_s"] / rates["predictor_all_rows_rows_per_s"]
                )
                rates["one_context_over_one_client"] = rates["one_context_rows_per_s"] / one
                rates["a_context_each_over_one_client"] = rates["a_context_each_rows_per_s"] / one
                rounds.append(rates)
    measured = {
        "model": model,
        "table": f"{ROWS} x {COLUMNS}",
        "clients": given.clients,
        **over_rounds(rounds),
    }
    report("bench.batching", "batching", measured)


if __name__ == "__main__":
    main()
