"""What a predict worker holds: within its bytes, pinned ones always, each loaded once, none unmapped while it is read."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import ContextGone, DeviceFull, TooLarge
from common.models.protocol import PredictOptions
from predict_workers import residency
from predict_workers.residency import LoadedContext, Residency
from tests.support import numeric
from tests.unit import fitting


class Store:
    """Files of 60 bytes; `touched` in order."""

    def __init__(self) -> None:
        self.touched: list[tuple[str, str]] = []
        self.sizes: dict[str, int] = {}

    def touch(self, tenant: str, digest: str) -> None:
        assert threading.current_thread() is not threading.main_thread()
        self.touched.append((tenant, digest))

    def size(self, tenant: str, digest: str) -> int:
        return self.sizes.get(digest, 60)


def holding(store: Any, budget: int, opened: Callable[[str], None] = lambda _: None) -> Any:
    """A residency whose contexts hold nothing but their size; `opened` is called at each load."""
    held: Any = Residency(store, None, budget)  # type: ignore[arg-type]  # backbones are not asked

    def open(tenant: str, digest: str) -> LoadedContext:
        opened(digest)
        return LoadedContext(tenant, digest, None, None, None, store.size(tenant, digest), "disk")  # type: ignore[arg-type]  # likewise

    held._open = open
    return held


def names(held: Any) -> list[str]:
    return [resident.context for resident in held.residents()]


def test_use_is_noted_at_load_and_at_most_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = Store()
    held = holding(store, 100)
    now = [0.0]
    monkeypatch.setattr(residency.time, "monotonic", lambda: now[0])

    async def ask(*digests: str) -> list[str]:
        for digest in digests:
            await held.get("t", digest)
        held._notes.submit(lambda: None).result()
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
    held._held["t", "c"] = LoadedContext("t", "c", None, None, None, 60, "disk")  # type: ignore[arg-type]  # likewise
    asyncio.run(held.get("t", "c"))


def test_least_recently_used_contexts_go_first_and_the_budget_is_never_passed() -> None:
    store: Any = Store()
    most = [0]
    held = holding(store, 200, lambda _: most.__setitem__(0, max(most[0], held.used_bytes)))

    async def story() -> None:
        for digest in "abc":
            await held.get("t", digest)
        await held.get("t", "a")
        await held.get("t", "d")
        assert names(held) == ["c", "a", "d"]
        store.sizes["big"] = 150
        await held.get("t", "big")
        assert names(held) == ["big"]
        store.sizes["huge"] = 201
        with pytest.raises(TooLarge):
            await held.get("t", "huge")
        assert names(held) == ["big"]

    asyncio.run(story())
    assert (most[0], held.loads, held.evictions) == (180, 5, 4)  # what is being read counts too


def test_pinned_contexts_are_never_evicted_and_where_they_leave_no_room_nothing_is() -> None:
    held = holding(Store(), 200)
    held.pinned = frozenset({("t", "a"), ("t", "b")})

    async def story() -> None:
        for digest in "abcd":
            await held.get("t", digest)
        assert names(held) == ["a", "b", "d"]
        held.pinned = frozenset({("t", "a"), ("t", "b"), ("t", "d")})
        with pytest.raises(DeviceFull):
            await held.get("t", "e")
        assert names(held) == ["a", "b", "d"]
        assert not held.evict_one(keep=("t", "a"))
        held.pinned = frozenset()
        assert held.evict_one(keep=("t", "a"))
        assert names(held) == ["a", "d"]

    asyncio.run(story())


def test_concurrent_misses_load_once_and_a_large_load_holds_up_no_small_one() -> None:
    large = threading.Event()
    opened: list[str] = []

    def loading(digest: str) -> None:
        opened.append(digest)
        if digest == "large":
            assert large.wait(10)

    held = holding(Store(), 1000, loading)

    async def story() -> None:
        waiting = [asyncio.create_task(held.get("t", "large")) for _ in range(5)]
        await asyncio.sleep(0.05)
        waiting[0].cancel()  # one asker leaves; the others still get it
        assert (await held.get("t", "small")).digest == "small"
        large.set()
        assert {context.digest for context in await asyncio.gather(*waiting[1:])} == {"large"}

    asyncio.run(story())
    assert sorted(opened) == ["large", "small"]


def test_a_load_that_fails_gives_its_bytes_back() -> None:
    def gone(_: str) -> None:
        raise ContextGone

    held = holding(Store(), 100, gone)
    with pytest.raises(ContextGone):
        asyncio.run(held.get("t", "a"))
    assert (held.used_bytes, held._loading) == (0, {})


class Held:
    """A real context in a residency of its own."""

    def __init__(self, data: Path) -> None:
        self.fitted = fitting.fit(fitting.training(numeric(rows=30)), data, n_estimators=1)
        backbones: Any = type(
            "B", (), {"get": lambda *_: (fitting.adapter(), fitting.backbone("classification"))}
        )()
        self.residency = Residency(self.fitted.store, backbones, 2**30)

    async def get(self) -> LoadedContext:
        return await self.residency.get("default", self.fitted.digest)

    def mapped(self) -> bool:
        """Whether this process has the context's file mapped."""
        gc.collect()
        with open("/proc/self/maps") as maps:
            return self.fitted.path.name in maps.read()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Held:
    held = Held(tmp_path_factory.mktemp("real"))
    object.__setattr__(held.fitted, "predictor", None)  # its map would be seen beside ours
    return held


def test_eviction_in_the_middle_of_a_predict_neither_unmaps_nor_changes_its_answer(real: Held) -> None:
    def answer(context: LoadedContext) -> Any:
        return context.predictor.predict(real.fitted.features, PredictOptions()).probabilities

    async def story() -> None:
        context = await real.get()
        expected = answer(context)
        entered, go_on = threading.Event(), threading.Event()
        module = fitting.backbone("classification").module
        embedder = module.col_embedder
        original = embedder._compute_embeddings_with_cache

        def halting(*args: Any, **kwargs: Any) -> Any:
            entered.set()
            assert go_on.wait(10)
            return original(*args, **kwargs)

        embedder._compute_embeddings_with_cache = halting
        try:
            running = asyncio.create_task(asyncio.to_thread(answer, context))
            await asyncio.to_thread(entered.wait, 10)
            del context
            assert real.residency.evict_one(keep=("default", "another"))
            assert real.mapped()
        finally:
            del embedder._compute_embeddings_with_cache
            go_on.set()
        assert np.array_equal(await running, expected)
        del running
        await asyncio.sleep(0)
        assert not real.mapped()

    asyncio.run(story())


def test_a_mapped_file_that_somebody_writes_into_is_dropped(real: Held) -> None:
    async def story() -> None:
        await real.get()
        assert await real.residency.sweep() == 0
        real.fitted.store.touch("default", real.fitted.digest)  # a use is no change
        assert await real.residency.sweep() == 0
        replaced = real.fitted.path.with_name("again")
        replaced.write_bytes(real.fitted.path.read_bytes())
        os.replace(replaced, real.fitted.path)  # the same content published again
        assert await real.residency.sweep() == 0
        await real.residency.get("default", real.fitted.digest)
        assert real.residency.evict_one(keep=("", ""))
        await real.get()
        with real.fitted.path.open("r+b") as file:
            last = file.seek(-1, os.SEEK_END)
            value = file.read(1)
            file.seek(last)
            file.write(value)
        assert await real.residency.sweep() == 1
        assert real.residency.residents() == ()
        await real.get()
        whole = real.fitted.path.read_bytes()
        real.fitted.path.unlink()
        assert await real.residency.sweep() == 1
        real.fitted.path.write_bytes(whole)

    asyncio.run(story())


@pytest.mark.slow
def test_500_loads_and_evictions_leave_memory_as_it_was(real: Held) -> None:
    def resident() -> int:
        gc.collect()
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1])

    async def cycle() -> None:
        context = await real.get()
        context.predictor.predict(real.fitted.features.take(slice(0, 1)), PredictOptions())
        del context
        real.residency.evict_one(keep=("", ""))

    async def story() -> None:
        for _ in range(20):
            await cycle()
        before = resident()
        for _ in range(500):
            await cycle()
        assert resident() <= before * 1.05

    asyncio.run(story())
