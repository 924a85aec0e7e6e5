"""Saying before the work what it will take."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping
from typing import Any

from common.errors import Overloaded
from common.models.protocol import AUTO, CACHES, PRECISIONS, ModelSpec
from common.settings import Settings

#: CPU seconds a cell and ensemble member, one thread, measured with 200 x 10 to 5,000 x 50 tables and 8 members.
FIT_S_PER_CELL = {
    "tabicl-v2": 1.1e-4,
    "tabicl-mini": 7e-6,
    "tabpfn-v2": 2.3e-4,
    "tabpfn-v2.5": 3.4e-4,
    "tabpfn-v2.6": 3.4e-4,
    "tabpfn-v3": 1.9e-4,
    "tabpfn-v3.5": 3.8e-4,
}
#: What a fit takes whatever its size: reading the table, writing and verifying the context.
FIT_S_LEAST = 0.3
#: What a one-shot takes whatever its size, measured with 150 x 10; and the search for a column's power transform,
#: which ensembles of two members and more make.
ONE_SHOT_S_LEAST, POWER_S_PER_COLUMN = 0.01, 0.008
#: How far one measurement moves a pace.
PACE_WEIGHT = 0.1
#: Slots beside the features that the model computes for each row.
EXTRA_COLUMNS = 4


def estimate_fit_s(spec: ModelSpec, rows: int, columns: int, options: Mapping[str, Any]) -> float:
    """Estimated seconds of a fit on one CPU thread, from its shape alone."""
    members = int(options.get("n_estimators", 8))
    per_cell = FIT_S_PER_CELL.get(spec.name, 1.1e-4)
    return FIT_S_LEAST + per_cell * members * rows * (columns + EXTRA_COLUMNS)


#: Share of a predict worker's budget that a context may take before its precision is given up for room.
AUTO_SHARE = 0.5
#: Share of the disk budget, or of the disk, that one context may take.
STORE_SHARE = 0.5


def settle(
    spec: ModelSpec,
    options: Mapping[str, Any],
    *,
    rows: int,
    columns: int,
    classes: int,
    settings: Settings,
) -> dict[str, Any]:
    """The options with every `auto` decided, from the context's estimated bytes and the room for it.

    Keys and values as computed, then fp16, then int8: the first that takes at most AUTO_SHARE of a predict worker's budget.
    When none does, int8 as long as it fits the whole budget; then the rows' representations, as computed, fp16, int8.
    Equal shapes and settings give equal options.
    """
    settled = dict(options)
    if spec.sizes is None:
        return settled
    wanted = {name: settled.get(name, AUTO) for name in ("precision", "cache")}
    ladder = [
        {"precision": precision, "cache": cache}
        for cache in CACHES
        for precision in PRECISIONS
        if wanted["cache"] in (AUTO, cache) and wanted["precision"] in (AUTO, precision)
    ]
    whole = min(settings.device_budget_bytes, store_bytes(settings))
    share = min(settings.device_budget_bytes * AUTO_SHARE, whole)
    for rung, chosen in enumerate(ladder):
        last_of_kind = rung + 1 == len(ladder) or ladder[rung + 1]["cache"] != chosen["cache"]
        room = whole if last_of_kind or chosen["cache"] == "repr" else share
        if spec.sizes.context_bytes(rows, columns, classes, settled | chosen) <= room:
            return settled | chosen
    return settled | ladder[-1]


def store_bytes(settings: Settings) -> float:
    """Most bytes of one context on disk."""
    budget = settings.disk_budget_bytes
    if not budget:
        folder = next(place for place in (settings.data, *settings.data.parents) if place.exists())
        budget = shutil.disk_usage(folder).total
    return budget * STORE_SHARE


def estimate_one_shot_s(spec: ModelSpec, rows: int, columns: int, options: Mapping[str, Any]) -> float:
    """Estimated seconds of one thread for a fit and its predict in one go; `rows` counts both tables'."""
    members = int(options.get("n_estimators", 8))
    per_cell = FIT_S_PER_CELL.get(spec.name, 1.1e-4)
    power_s = POWER_S_PER_COLUMN * columns if members > 1 else 0.0
    return ONE_SHOT_S_LEAST + power_s + per_cell * members * rows * (columns + EXTRA_COLUMNS)


class Pace:
    """Real seconds for an estimated one, as measured lately."""

    def __init__(self) -> None:
        self.ratio = 1.0
        self._measured = False

    def learn(self, estimated_s: float, real_s: float) -> None:
        """Work of so many estimated seconds took so many real ones."""
        found = min(max(real_s / estimated_s, 0.02), 50.0)
        self.ratio = self.ratio + PACE_WEIGHT * (found - self.ratio) if self._measured else found
        self._measured = True


class UploadRoom:
    """The bytes of tables that a process receives at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._used = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        """Take room for a body; raises Overloaded. One that comes alone always finds room."""
        with self._lock:
            if self._used and self._used + size > self._most:
                raise Overloaded(
                    f"tables of {self._used} bytes are on their way in, the most at once is {self._most}",
                    retry_after_s=2,
                    limit=self._most,
                    size=size,
                )
            self._used += size

    def give_back(self, size: int) -> None:
        """The body is here, or will not come."""
        with self._lock:
            self._used -= size
