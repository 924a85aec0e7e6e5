"""Precision and cache of a fit, through the whole stack."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import Service, numeric

pytestmark = pytest.mark.integration


def test_a_fit_in_fewer_bytes_says_so_and_answers_nearly_alike(service: Service) -> None:
    table = numeric(rows=150, columns=6)
    rows = table.drop_columns(["y"])
    native = service.fit(table, "as-computed")
    assert (native["precision"], native["cache"], native["largest_difference"]) == ("native", "kv", 0.0)
    expected = np.array(service.predict("as-computed", rows)["probabilities"])
    sizes = {}
    for precision, cache in (("int8", "kv"), ("fp16", "repr")):
        name = f"{precision}-{cache}"
        job = service.fit(table, name, options=f'{{"precision": "{precision}", "cache": "{cache}"}}')
        shown = service.http.get(f"/v1/datasets/{name}").json()["versions"][0]
        for told in (job, shown):
            assert (told["precision"], told["cache"]) == (precision, cache)
            assert 0 < told["largest_difference"] < 0.03
        sizes[name] = job["context_bytes"]
        answer = np.array(service.predict(name, rows)["probabilities"])
        assert 0 < np.abs(answer - expected).max() < 0.03
    assert sizes["fp16-repr"] < sizes["int8-kv"] < native["context_bytes"] / 3


def test_a_fit_that_asks_for_what_auto_chose_publishes_the_same_context(service: Service) -> None:
    table = numeric(rows=60, columns=4, seed=12)
    chosen = service.fit(table, "chosen")
    asked = service.fit(table, "asked", options='{"precision": "native", "cache": "kv"}')
    assert asked["context"] == chosen["context"]
    assert (asked["precision"], asked["largest_difference"]) == ("native", 0.0)
