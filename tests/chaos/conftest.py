"""What a chaos test leaves behind of its own clients."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_sockets_left() -> Iterator[None]:
    """The HTTP client leaves the socket of a connection that was reset in a reference cycle; collect it here."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
