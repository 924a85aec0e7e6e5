"""One stack for all tests that don't hurt it; a private one for those that do."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tabrelay.up.embedded import Stack
from tabrelay.up.stack import StackOptions
from tests.integration.oracle import Oracle
from tests.support import Service

#: Lines of each stack's log that a failure shows.
TAIL = 40
#: What they leave out: tests poll a lot.
POLL = re.compile(r"request method=GET .* status=200$")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test of a running stack shows what the stack wrote last."""
    report = yield
    if report.failed:
        fixtures = getattr(item, "funcargs", {})
        logs = {value.data_dir / "up.log" for value in fixtures.values() if isinstance(value, Stack)}
        if isinstance(folder := fixtures.get("tmp_path"), Path):
            logs |= set(folder.glob("*/up.log"))
        if isinstance(shared := fixtures.get("service"), Service) and shared.log:
            logs.add(shared.log)
        for path in sorted(log for log in logs if log.exists()):
            lines = [line for line in path.read_text(errors="replace").splitlines() if not POLL.search(line)]
            report.sections.append((f"the end of {path}", "\n".join(lines[-TAIL:])))
    return report


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
    with Service(stack.url, stack.data_dir / "up.log") as shared:
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
