"""Clients on more datasets than a predict worker may hold: every answer is compared with the library's own."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tabrelay.up.embedded import Stack
from tests.integration.oracle import Oracle
from tests.support import Service, mixed, numeric

SECONDS = float(os.environ.get("SOAK_SECONDS", "180"))
SEED = int(os.environ.get("SOAK_SEED", "7"))
DATASETS, CLIENTS = 12, 8
#: Share of all contexts that the predict worker may hold.
ROOM = 0.35
#: The tolerance of a request that shares its forward with others (docs/decisions/0003).
TOLERANCE = 1e-6
#: What a busy worker may say instead of an answer.
REFUSALS = (429, 503)

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(SECONDS + 600)]


@dataclass
class Told:
    """What the clients saw."""

    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    refused: Counter[int] = field(default_factory=Counter)
    worst: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


def table(number: int) -> pa.Table:
    """A table of its own for each dataset."""
    if number % 3 == 2:
        return mixed(rows=120 + 20 * number, seed=number)
    return numeric(rows=150 + 40 * number, columns=4 + number, seed=number, classes=2 + number % 3)


def client(
    number: int, url: str, truths: dict[str, tuple[pa.Table, np.ndarray]], ends: float, told: Told
) -> None:
    """Ask random rows of random datasets until the end; popular ones more often."""
    chance = random.Random(f"{SEED}/{number}")
    names = list(truths)
    with Service(url) as service:
        while time.monotonic() < ends:
            name = names[min(int(chance.expovariate(0.25)), len(names) - 1)]
            rows, truth = truths[name]
            size = chance.choice((1, 1, 1, 2, 5, 20))
            start = chance.randrange(rows.num_rows - size + 1)
            response = service.ask(name, rows.slice(start, size))
            with told.lock:
                note(told, name, start, size, response, truth)


def note(told: Told, name: str, start: int, size: int, response: Any, truth: np.ndarray) -> None:
    """Compare one response with the truth."""
    if response.status_code in REFUSALS:
        told.refused[response.status_code] += 1
        return
    if response.status_code != 200:
        told.wrong.append(f"{name}: {response.status_code} {response.text[:200]}")
        return
    found = np.array(response.json()["probabilities"])
    expected = truth[start : start + size]
    told.answers[name] += 1
    if found.shape != expected.shape:
        told.wrong.append(f"{name}: rows {start}+{size} have shape {found.shape}, not {expected.shape}")
        return
    off = float(np.abs(found - expected).max())
    told.worst = max(told.worst, off)
    if off > TOLERANCE:
        told.wrong.append(f"{name}: rows {start}+{size} are off by {off:.2g}")


def test_no_answer_is_wrong_while_contexts_come_and_go(private_stack: Callable[..., Stack]) -> None:
    tables = {f"d{number}": table(number) for number in range(DATASETS)}
    stack = private_stack()
    with Service(stack.url) as service:
        total = sum(service.fit(data, name)["context_bytes"] for name, data in tables.items())
    folder = stack.data_dir
    stack.stop()
    truths = {}
    with Oracle() as oracle:
        for name, data in tables.items():
            [answer] = oracle.ask(data, "y", "classification", [slice(0, data.num_rows)])
            truths[name] = data.drop_columns(["y"]), np.array(answer["probabilities"])

    stack = private_stack(environ={"TABRELAY_DEVICE_BUDGET_BYTES": str(int(total * ROOM))})
    told = Told()
    ends = time.monotonic() + SECONDS
    threads = [
        threading.Thread(target=client, args=(number, stack.url, truths, ends, told))
        for number in range(CLIENTS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stack.stop()
    evictions = (folder / "up.log").read_text().count("context evicted")
    print(
        f"SOAK_SEED={SEED}: {sum(told.answers.values())} answers of {len(told.answers)} datasets, {evictions} evictions, "
        f"off by {told.worst:.2g} at most, refused {dict(told.refused)}"
    )
    assert told.wrong[:5] == []
    assert set(told.answers) == set(tables)
    assert evictions > DATASETS
    assert sum(told.refused.values()) <= sum(told.answers.values()) / 100
