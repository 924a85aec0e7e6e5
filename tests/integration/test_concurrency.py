"""Many clients, many datasets, one predict worker: everybody gets the answer of the dataset that was asked."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.support import Service, numeric

pytestmark = pytest.mark.integration

DATASETS = 4
CLIENTS = 4
CALLS = 500  # a client; 2,000 in all
TOLERANCE = 1e-6


def test_none_of_2000_concurrent_predicts_is_answered_from_another_context(service: Service) -> None:
    tables = [numeric(rows=80, seed=20 + i) for i in range(DATASETS)]
    contexts, expected = [], []
    asked = numeric(rows=40, seed=30).drop_columns(["y"])
    for i, table in enumerate(tables):
        contexts.append(service.fit(table, f"together-{i}")["context"])
        expected.append(np.array(service.predict(f"together-{i}", asked)["probabilities"]))
    assert min(np.abs(a - b).max() for i, a in enumerate(expected) for b in expected[:i]) > 100 * TOLERANCE
    wrong: list[str] = []
    answered = [0] * CLIENTS

    def client(number: int) -> None:
        rng = np.random.default_rng(number)
        with Service(service.url) as own:
            for _ in range(CALLS):
                which, start, size = rng.integers(DATASETS), rng.integers(34), rng.integers(1, 7)
                answer = own.predict(f"together-{which}", asked.slice(int(start), int(size)))
                off = np.abs(np.array(answer["probabilities"]) - expected[which][start : start + size]).max()
                if answer["context"] != contexts[which] or off > TOLERANCE:
                    wrong.append(f"dataset {which}, rows {start}+{size}: off by {off:.3g}")
                answered[number] += 1

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(answered) == CLIENTS * CALLS
    assert wrong == []
