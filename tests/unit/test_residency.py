"""Use of a context is noted on disk, seldom and beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from predict_workers import residency
from predict_workers.residency import LoadedContext, Residency


class Store:
    def __init__(self) -> None:
        self.touched: list[tuple[str, str]] = []

    def touch(self, tenant: str, digest: str) -> None:
        assert threading.current_thread() is not threading.main_thread()
        self.touched.append((tenant, digest))


def test_use_is_noted_at_load_and_at_most_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = Store()
    held: Any = Residency(store, None, 100)  # type: ignore[arg-type]  # backbones are not asked

    def opened(tenant: str, digest: str) -> LoadedContext:
        return LoadedContext(tenant, digest, None, None, None, 60, "disk")  # type: ignore[arg-type]  # likewise

    monkeypatch.setattr(held, "_open", opened)
    now = [0.0]
    monkeypatch.setattr(residency.time, "monotonic", lambda: now[0])

    async def ask(*digests: str) -> list[str]:
        for digest in digests:
            await held.get("t", digest)
        held._loader.submit(lambda: None).result()
        return [digest for _, digest in store.touched]

    async def story() -> None:
        assert await ask("a", "a", "a") == ["a"]
        now[0] = 59.0
        assert await ask("a") == ["a"]
        now[0] = 60.0
        assert await ask("a", "a") == ["a", "a"]
        assert await ask("b", "a") == ["a", "a", "b", "a"]  # evicted and loaded again

    asyncio.run(story())
    held.close()
    held._held["t", "c"] = opened("t", "c")
    asyncio.run(held.get("t", "c"))
