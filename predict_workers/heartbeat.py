"""Tells the catalogue what this worker holds, at every beat and at once after a change."""

from __future__ import annotations

import os
import socket
import threading
import time

from common import logs
from common.catalogue import Catalogue, check_in
from common.catalogue.records import PredictWorker
from common.errors import CatalogueUnavailable
from common.janitor import Sweeper
from common.lost_jobs import LostJobs
from common.settings import Settings
from predict_workers.batcher import Batcher
from predict_workers.residency import Residency

log = logs.get("heartbeat")


class Heartbeat:
    """A thread of its own, so that a long forward or an unreachable Redis holds up nothing."""

    def __init__(
        self,
        catalogue: Catalogue,
        settings: Settings,
        name: str,
        models: tuple[str, ...],
        residency: Residency,
        batcher: Batcher,
    ) -> None:
        self._catalogue = catalogue
        self._settings = settings
        self._name = name
        self._models = models
        self._residency = residency
        self._batcher = batcher
        self._changed = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._lost = LostJobs(catalogue, settings, name, as_substitute=True)
        self._sweeper = Sweeper(catalogue, settings, name, as_substitute=True)
        self._mark = -1
        self._started_ms = int(time.time() * 1000)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def changed(self) -> None:
        """Beat at once."""
        self._changed.set()

    def stop(self) -> None:
        """Leave the catalogue and end."""
        self._stop.set()
        self._changed.set()
        self._thread.join(timeout=6)

    def _run(self) -> None:
        reachable = True
        check_in(self._catalogue)
        while not self._stop.is_set():
            self._changed.clear()
            try:
                self._catalogue.workers.register_predict(self._state())
                self._pins()
                self._lost.look()  # nobody is there to be woken
                self._sweeper.look()
                if not reachable:
                    log.info("the catalogue is reachable again")
                reachable = True
            except CatalogueUnavailable:
                if reachable:
                    log.warning("the catalogue can't be reached; resident contexts go on answering")
                reachable = False
            self._changed.wait(self._settings.heartbeat_s)
        try:
            self._catalogue.workers.leave("predict", self._name)
        except CatalogueUnavailable:
            log.info("left without telling the catalogue")

    def _pins(self) -> None:
        """Have pinned contexts stay, after anything in the catalogue changed; an emptied one unpins nothing."""
        datasets = self._catalogue.datasets
        mark = datasets.mark()
        if mark != self._mark and self._catalogue.epoch.matches():
            self._residency.pinned = datasets.pinned_contexts()
            self._mark = mark

    def _state(self) -> PredictWorker:
        settings = self._settings
        return PredictWorker(
            name=self._name,
            address=settings.predict_address or settings.predict_bind,
            host=socket.gethostname(),
            pid=os.getpid(),
            device=settings.device,
            models=self._models,
            budget_bytes=settings.device_budget_bytes,
            used_bytes=self._residency.used_bytes,
            in_flight=self._batcher.in_flight,
            rows_in_flight=self._batcher.rows_in_flight,
            served=self._batcher.served,
            started_ms=self._started_ms,
            residents=self._residency.residents(),
        )
