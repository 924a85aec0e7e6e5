"""Tests of the model families; one thread, so that equal work rounds equally."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import common.models.tabpfn  # noqa: F401  (fixes what tabpfn reads at import)


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
