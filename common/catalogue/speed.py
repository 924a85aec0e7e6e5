"""What fits took here beside what was estimated: weighted means in one hash, written at the end of each fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from common.catalogue.connection import Client, Scripts

#: How far one fit moves a ratio; a fit of few seconds, mostly overhead, moves it less.
RATIO_WEIGHT = 0.3
#: Estimated seconds at which a fit moves the ratio by half of that.
RATIO_HALF_S = 2.0
#: A ratio beyond these is a stopped process or a broken clock, not a speed.
RATIO_BOUNDS = (0.02, 50.0)
#: How far one fit moves the mean duration of its queue.
MEAN_WEIGHT = 0.2


@dataclass(frozen=True)
class Measured:
    """The means as they were read; what was never measured has no say."""

    ratios: Mapping[str, float] = field(default_factory=dict)  # by "model" and "model device"
    means: Mapping[str, float] = field(default_factory=dict)  # seconds of a job, by queue

    @classmethod
    def decode(cls, stored: Mapping[str, str]) -> Measured:
        """From the hash."""
        return cls(_named("ratio:", stored), _named("mean:", stored))

    def ratio(self, model: str, device: str = "") -> float:
        """Real seconds for an estimated one: of this device, else of all, else 1."""
        found = self.ratios.get(f"{model} {device}") if device else None
        return found or self.ratios.get(model) or 1.0

    def mean_s(self, queue: str) -> float | None:
        """Mean seconds of the queue's recent jobs."""
        return self.means.get(queue)


class Speed:
    """The hash `<prefix>speed`."""

    def __init__(self, client: Client, scripts: Scripts, prefix: str) -> None:
        self._client = client
        self._scripts = scripts
        self._key = f"{prefix}speed"

    def read(self) -> Measured:
        """What was measured up to now."""
        return Measured.decode(self._client.hgetall(self._key))

    def fitted(self, model: str, device: str, queue: str, *, estimated_s: float, real_s: float) -> None:
        """A fit that encoded has ended well."""
        changes: list[str | float] = [f"mean:{queue}", real_s, MEAN_WEIGHT]
        if estimated_s > 0:
            ratio = min(max(real_s / estimated_s, RATIO_BOUNDS[0]), RATIO_BOUNDS[1])
            weight = RATIO_WEIGHT * estimated_s / (estimated_s + RATIO_HALF_S)
            changes += [f"ratio:{model}", ratio, weight, f"ratio:{model} {device}", ratio, weight]
        self._scripts.run("learn", *changes)

    def republished(self, queue: str, *, real_s: float) -> None:
        """A job that found its context known has ended."""
        self._scripts.run("learn", f"mean:{queue}", real_s, MEAN_WEIGHT)


def _named(kind: str, stored: Mapping[str, str]) -> dict[str, float]:
    return {name.removeprefix(kind): float(text) for name, text in stored.items() if name.startswith(kind)}
