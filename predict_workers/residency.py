"""Which contexts this worker holds: loaded once, least recently used dropped first, never more than the budget."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from common import logs
from common.catalogue.records import Resident
from common.contexts.store import ContextStore
from common.errors import ContextIncompatible, TooLarge
from common.models.protocol import Adapter, Backbone, Predictor, Weights
from common.models.registry import Registry, load_adapter
from common.tables.schema import TableSchema
from common.tables.target import Target

log = logs.get("residency")

#: Seconds between two notes on disk that a context is in use.
TOUCH_S = 60.0


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


class Residency:
    """Loaded contexts under a byte budget; lives on the event loop, loads on its own thread."""

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
        self._held: OrderedDict[tuple[str, str], LoadedContext] = OrderedDict()
        self._loading: dict[tuple[str, str], asyncio.Task[LoadedContext]] = {}
        self._touched: dict[tuple[str, str], float] = {}  # time.monotonic()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self.loads = 0
        self.evictions = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all loaded contexts."""
        return sum(context.nbytes for context in list(self._held.values()))

    def residents(self) -> tuple[Resident, ...]:
        """What is loaded now, least recently used first."""
        held = list(self._held.values())
        return tuple(Resident(c.tenant, c.digest, c.nbytes, c.tier) for c in held)

    async def get(self, tenant: str, digest: str) -> LoadedContext:
        """The context, loaded if need be; concurrent misses load once.

        Raises ContextGone, ContextDamaged, ContextIncompatible, ModelNotReady, or TooLarge for a context that is larger
        than the whole budget.
        """
        key = tenant, digest
        held = self._held.get(key)
        if held is not None:
            self._held.move_to_end(key)
            self._touch(key)
            return held
        task = self._loading.get(key)
        if task is None:
            task = asyncio.create_task(self._load(key))
            self._loading[key] = task
            task.add_done_callback(lambda _: self._loading.pop(key, None))
        return await asyncio.shield(task)

    def _touch(self, key: tuple[str, str]) -> None:
        """Note on disk that a context is used, at most once in TOUCH_S."""
        now = time.monotonic()
        if now - self._touched.get(key, -TOUCH_S) >= TOUCH_S:
            self._touched[key] = now
            with contextlib.suppress(RuntimeError):  # leaving: the loader takes nothing any more
                self._loader.submit(self._store.touch, *key)

    async def _load(self, key: tuple[str, str]) -> LoadedContext:
        loop = asyncio.get_running_loop()
        loaded = await loop.run_in_executor(self._loader, self._open, *key)
        self.loads += 1
        self._make_room(loaded.nbytes)
        self._held[key] = loaded
        self._touched = {held: at for held, at in self._touched.items() if held in self._held and held != key}
        self._touch(key)
        self._on_change()
        return loaded

    def _open(self, tenant: str, digest: str) -> LoadedContext:
        mapped = self._store.open(tenant, digest)
        manifest = mapped.manifest
        if mapped.nbytes > self._budget:
            raise TooLarge(
                f"the context takes {mapped.nbytes} bytes, this worker may hold {self._budget} (TABRELAY_DEVICE_BUDGET_BYTES)",
                limit=self._budget,
                size=mapped.nbytes,
            )
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
        log.info("context loaded", context=digest[:12], bytes=mapped.nbytes, tier=mapped.tier)
        return LoadedContext(
            tenant, digest, predictor, TableSchema.decode(manifest.schema), target, mapped.nbytes, mapped.tier
        )

    def _make_room(self, nbytes: int) -> None:
        while self._held and self.used_bytes + nbytes > self._budget:
            (_, digest), context = self._held.popitem(last=False)
            self.evictions += 1
            log.info("context evicted", context=digest[:12], bytes=context.nbytes)

    def drop_unlinked(self) -> int:
        """Drop contexts whose file was deleted from every tier; returns how many."""
        gone = [key for key in self._held if self._store.best_path(*key) is None]
        for key in gone:
            del self._held[key]
        return len(gone)

    def close(self) -> None:
        """Stop loading."""
        self._loader.shutdown(wait=False, cancel_futures=True)
