"""Which predict worker answers for a context. A policy is one object and can be replaced."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

from common.catalogue.records import PredictWorker, Version


class Placement(Protocol):
    """Orders the workers that could answer for a version, best first."""

    def order(self, tenant: str, version: Version, workers: Sequence[PredictWorker]) -> list[PredictWorker]:
        """Every worker that serves the version's model; an empty list when none does."""
        ...


class HoldersFirst:
    """Workers that hold the context first, the least busy of them leading; then those with the most room.

    Ties are broken by a hash of context and worker, so that requests which miss at the same time meet.
    """

    def order(self, tenant: str, version: Version, workers: Sequence[PredictWorker]) -> list[PredictWorker]:
        """See Placement."""

        def rank(worker: PredictWorker) -> tuple[bool, int, int, bytes]:
            holds = any(r.context == version.context and r.tenant == tenant for r in worker.residents)
            room = worker.budget_bytes - worker.used_bytes
            lacking = 0 if holds else max(version.context_bytes - room, 0)
            tie = hashlib.blake2b(f"{version.context}/{worker.name}".encode(), digest_size=8).digest()
            return (not holds, lacking, worker.rows_in_flight, tie)

        return sorted((worker for worker in workers if version.model in worker.models), key=rank)
