"""One stack for all tests that don't hurt it; a private one for those that do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tabrelay.up.embedded import Stack
from tabrelay.up.stack import StackOptions
from tests.integration.oracle import Oracle
from tests.support import Service


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack with one fit and one predict worker on one thread each; never killed, never reconfigured."""
    data = tmp_path_factory.mktemp("stack") / "data"
    with Stack(
        StackOptions(port=0, data_dir=data, models=("tabicl-mini",), threads=1), quiet=True
    ) as running:
        yield running


@pytest.fixture(scope="session")
def service(stack: Stack) -> Iterator[Service]:
    """Its API."""
    with Service(stack.url) as shared:
        yield shared


@pytest.fixture(scope="session")
def oracle() -> Iterator[Oracle]:
    """The library itself."""
    with Oracle() as running:
        yield running


@pytest.fixture
def private_stack(tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    """Starts a stack of the test's own: `private_stack(environ={...}, **options)`; stopped at the end."""
    with ExitStack() as ending:

        def start(*, environ: dict[str, str] | None = None, **options: Any) -> Stack:
            chosen = {
                "port": 0,
                "data_dir": tmp_path / "data",
                "models": ("tabicl-mini",),
                "threads": 1,
                **options,
            }
            return ending.enter_context(Stack(StackOptions(**chosen), quiet=True, environ=environ))

        yield start
