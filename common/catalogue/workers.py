"""Workers register at every heartbeat and are gone when their key runs out."""

from __future__ import annotations

from common.catalogue.connection import Client
from common.catalogue.records import FitWorker, PredictWorker
from common.settings import Settings


class Workers:
    """The worker side of the catalogue."""

    def __init__(self, client: Client, settings: Settings) -> None:
        self._client = client
        self._prefix = settings.redis_prefix
        self._ttl_ms = int(settings.worker_ttl_s * 1000)

    def register_predict(self, worker: PredictWorker) -> None:
        """Say what this predict worker holds now."""
        self._register("predict", worker.name, worker.encode())

    def register_fit(self, worker: FitWorker) -> None:
        """Say that this fit worker lives."""
        self._register("fit", worker.name, worker.encode())

    def predict(self) -> list[PredictWorker]:
        """Predict workers heard of lately, by name."""
        return [PredictWorker.decode(text) for text in self._read("predict")]

    def fit(self) -> list[FitWorker]:
        """Fit workers heard of lately, by name."""
        return [FitWorker.decode(text) for text in self._read("fit")]

    def has_turn(self, task: str, name: str, lasts_s: float, *, as_substitute: bool) -> bool:
        """Whether this worker is the one of all that does a common task now; its turn runs out after `lasts_s`.

        With `as_substitute` only while no fit worker lives.
        """
        if as_substitute and self.fit():
            return False
        lasts_ms = max(int(lasts_s * 1000), 1)
        return bool(self._client.set(f"{self._prefix}{task}", name, nx=True, px=lasts_ms))

    def leave(self, kind: str, name: str) -> None:
        """This worker stops on purpose."""
        self._client.delete(f"{self._prefix}worker:{kind}:{name}")
        self._client.srem(f"{self._prefix}workers:{kind}", name)

    def _register(self, kind: str, name: str, text: str) -> None:
        self._client.set(f"{self._prefix}worker:{kind}:{name}", text, px=self._ttl_ms)
        self._client.sadd(f"{self._prefix}workers:{kind}", name)

    def _read(self, kind: str) -> list[str]:
        names = sorted(self._client.smembers(f"{self._prefix}workers:{kind}"))
        if not names:
            return []
        found = self._client.mget([f"{self._prefix}worker:{kind}:{name}" for name in names])
        gone = [name for name, text in zip(names, found, strict=True) if text is None]
        if gone:
            self._client.srem(f"{self._prefix}workers:{kind}", *gone)
        return [text for text in found if text is not None]
