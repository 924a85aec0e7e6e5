"""Which contexts this worker holds: loaded once, least recently used dropped first, never more than the budget.

Dropping a context here lets go of it. Its memory is free when the last predict that reads it has ended, never before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from common import logs
from common.catalogue.records import Resident
from common.contexts.reader import Stamp
from common.contexts.store import ContextStore
from common.errors import ContextIncompatible, DeviceFull, TooLarge, WorkerBusy
from common.models.protocol import Adapter, Backbone, Predictor, Weights
from common.models.registry import Registry, load_adapter
from common.tables.schema import TableSchema
from common.tables.target import Target

log = logs.get("residency")

#: Seconds between two notes on disk that a context is in use.
TOUCH_S = 60.0
#: Contexts read at once: two, so that a small one does not wait for a large one to be hashed.
LOADERS = 2
#: Contexts that may wait for their turn to be read.
LOADS_MOST = 256
#: Loading gives way to computing where both want the same core.
LOADER_NICENESS = 5

Key = tuple[str, str]  # tenant, digest


class Backbones:
    """The weights of each model and task, loaded once and shared by every context."""

    def __init__(self, registry: Registry, device: str) -> None:
        self._registry = registry
        self._device = device
        self._loaded: dict[tuple[str, str], tuple[Adapter, Backbone]] = {}
        self._lock = threading.Lock()

    def get(self, model: str, task: str) -> tuple[Adapter, Backbone]:
        """Adapter and weights; raises ModelNotReady."""
        with self._lock:
            found = self._loaded.get((model, task))
            if found is None:
                weights: Weights = self._registry.weights(model, task)
                adapter = load_adapter(self._registry.spec(model))
                found = adapter, adapter.load(weights, self._device)
                self._loaded[model, task] = found
            return found


@dataclass(frozen=True)
class LoadedContext:
    """A context that can answer now. Dropping the last reference unmaps it, never before."""

    tenant: str
    digest: str
    predictor: Predictor
    schema: TableSchema
    target: Target
    nbytes: int
    tier: str
    stamp: Stamp | None = None


class Residency:
    """Loaded contexts under a byte budget; lives on the event loop, loads on threads of its own."""

    def __init__(
        self,
        store: ContextStore,
        backbones: Backbones,
        budget_bytes: int,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._backbones = backbones
        self._budget = budget_bytes
        self._on_change = on_change
        self._held: OrderedDict[Key, LoadedContext] = OrderedDict()
        self._loading: dict[Key, asyncio.Task[LoadedContext]] = {}
        self._reserved: dict[Key, int] = {}  # bytes of what is being read
        self._touched: dict[Key, float] = {}  # time.monotonic()
        self._loader = ThreadPoolExecutor(LOADERS, "loader", initializer=_give_way)
        self._notes = ThreadPoolExecutor(1, "notes")
        #: Contexts that are never evicted; whoever knows replaces it as a whole.
        self.pinned: Container[Key] = frozenset()
        self.loads = 0
        self.evictions = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all loaded contexts and of those being loaded."""
        held = sum(context.nbytes for context in list(self._held.values()))
        return held + sum(list(self._reserved.values()))

    def residents(self) -> tuple[Resident, ...]:
        """What is loaded now, least recently used first."""
        held = list(self._held.values())
        return tuple(Resident(c.tenant, c.digest, c.nbytes, c.tier) for c in held)

    async def get(self, tenant: str, digest: str) -> LoadedContext:
        """The context, loaded if need be; concurrent misses load once.

        Raises ContextGone, ContextDamaged, ContextIncompatible, ModelNotReady; TooLarge for a context that is larger
        than the whole budget, DeviceFull where pinned ones leave no room, WorkerBusy when LOADS_MOST wait.
        """
        key = tenant, digest
        held = self._held.get(key)
        if held is not None:
            self._held.move_to_end(key)
            self._touch(key)
            return held
        task = self._loading.get(key)
        if task is None:
            if len(self._loading) >= LOADS_MOST:
                raise WorkerBusy(
                    "the predict worker loads as many contexts as it may", retry_after_s=1, limit=LOADS_MOST
                )
            task = asyncio.create_task(self._load(key))
            self._loading[key] = task
            task.add_done_callback(lambda done: self._loaded(key, done))
        return await asyncio.shield(task)

    def _loaded(self, key: Key, done: asyncio.Task[LoadedContext]) -> None:
        self._loading.pop(key, None)
        if not done.cancelled() and (fault := done.exception()) is not None:  # its askers may all have left
            log.info("context not loaded", context=key[1][:12], error=str(fault))

    def _touch(self, key: Key) -> None:
        """Note on disk that a context is used, at most once in TOUCH_S."""
        now = time.monotonic()
        if now - self._touched.get(key, -TOUCH_S) >= TOUCH_S:
            self._touched[key] = now
            with contextlib.suppress(RuntimeError):  # leaving: no note is taken any more
                self._notes.submit(self._store.touch, *key)

    async def _load(self, key: Key) -> LoadedContext:
        loop = asyncio.get_running_loop()
        nbytes = await loop.run_in_executor(self._loader, self._store.size, *key)
        self._make_room(nbytes)
        self._reserved[key] = nbytes
        try:
            loaded = await loop.run_in_executor(self._loader, self._open, *key)
            self._held[key] = loaded
        finally:
            del self._reserved[key]
        self.loads += 1
        self._touched = {held: at for held, at in self._touched.items() if held in self._held and held != key}
        self._touch(key)
        self._on_change()
        return loaded

    def _open(self, tenant: str, digest: str) -> LoadedContext:
        began = time.monotonic()
        mapped = self._store.open(tenant, digest)
        manifest = mapped.manifest
        adapter, backbone = self._backbones.get(manifest.model, manifest.task)
        if backbone.weights.digest != manifest.weights_digest:
            raise ContextIncompatible(
                f"the context was made with weights {manifest.weights_digest[:12]}…, "
                f"this worker has {backbone.weights.digest[:12]}… of {manifest.model}"
            )
        if adapter.state_version != manifest.state_version:
            raise ContextIncompatible(
                f"the context has state version {manifest.state_version}, this worker reads {adapter.state_version}"
            )
        target = Target.decode(manifest.target)
        predictor = adapter.thaw(mapped.tensors, manifest.state, backbone, target)
        took_ms = round((time.monotonic() - began) * 1000, 1)
        log.info(
            "context loaded", context=digest[:12], bytes=mapped.nbytes, tier=mapped.tier, took_ms=took_ms
        )
        return LoadedContext(
            tenant=tenant,
            digest=digest,
            predictor=predictor,
            schema=TableSchema.decode(manifest.schema),
            target=target,
            nbytes=mapped.nbytes,
            tier=mapped.tier,
            stamp=mapped.stamp,
        )

    def _make_room(self, nbytes: int) -> None:
        """Evict what was used longest ago, or nothing at all where that does not make enough room."""
        if nbytes > self._budget:
            raise TooLarge(
                f"the context takes {nbytes} bytes, this worker may hold {self._budget} (TABRELAY_DEVICE_BUDGET_BYTES)",
                limit=self._budget,
                size=nbytes,
            )
        lacking = self.used_bytes + nbytes - self._budget
        going = []
        for key, context in self._held.items():
            if lacking <= 0:
                break
            if key not in self.pinned:
                going.append(key)
                lacking -= context.nbytes
        if lacking > 0:
            raise DeviceFull(retry_after_s=2, limit=self._budget, size=nbytes)
        for key in going:
            self._drop(key, "context evicted")

    def evict_one(self, keep: Key) -> bool:
        """Evict the context used longest ago that is neither pinned nor `keep`; False when there is none."""
        for key in self._held:
            if key != keep and key not in self.pinned:
                self._drop(key, "context evicted")
                self._on_change()
                return True
        return False

    def _drop(self, key: Key, why: str) -> None:
        context = self._held.pop(key)
        self.evictions += 1
        log.info(why, context=context.digest[:12], bytes=context.nbytes)

    async def sweep(self) -> int:
        """Drop contexts whose file was deleted from every tier or was written into; returns how many."""
        held = list(self._held.items())
        gone, broken = await asyncio.to_thread(self._look, held)
        for key, context in [*gone, *broken]:
            if self._held.get(key) is context:
                del self._held[key]
        for (_, digest), context in broken:
            path = str(context.stamp.path) if context.stamp else ""
            log.error("a mapped context file was written into; dropped", context=digest[:12], path=path)
        return len(gone) + len(broken)

    def _look(
        self, held: list[tuple[Key, LoadedContext]]
    ) -> tuple[list[tuple[Key, LoadedContext]], list[tuple[Key, LoadedContext]]]:
        """Those whose file is gone, and those whose file somebody wrote into."""
        gone = [(key, context) for key, context in held if self._store.best_path(*key) is None]
        broken = [(key, context) for key, context in held if context.stamp and context.stamp.broken()]
        return gone, broken

    def close(self) -> None:
        """Stop loading."""
        self._loader.shutdown(wait=False, cancel_futures=True)
        self._notes.shutdown(wait=False, cancel_futures=True)


def _give_way() -> None:
    """Lower this thread's priority; on Linux a thread has its own."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOADER_NICENESS)
