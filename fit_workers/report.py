"""Reporting a running job: phases, fractions, and the time that each phase took."""

from __future__ import annotations

import time

from common import logs
from common.catalogue import Catalogue, Phase
from common.catalogue.jobs import Claim
from common.errors import CatalogueUnavailable

log = logs.get("fit")

#: Least seconds between two reports of the same phase.
EVERY_S = 0.25


class Reporter:
    """Reports for one claim; a report may raise Cancelled or StaleClaim, which end the attempt."""

    def __init__(self, catalogue: Catalogue, claim: Claim) -> None:
        self._catalogue = catalogue
        self._claim = claim
        self._phase: Phase | None = None
        self._began = time.monotonic()
        self._reported = 0.0
        self.timings_ms: dict[str, float] = {}

    def phase(self, phase: Phase) -> None:
        """A phase begins; the one before it has ended."""
        self._close()
        self._phase, self._began = phase, time.monotonic()
        self._report(0.0)

    def fraction(self, fraction: float) -> None:
        """How much of the present phase is done, 0 to 1; most calls cost nothing."""
        if time.monotonic() - self._reported >= EVERY_S:
            self._report(fraction)

    def fitting(self, fraction: float) -> None:
        """An adapter's progress: preprocessing until the first model block, encoding from there."""
        if fraction > 0 and self._phase is not Phase.ENCODING:
            self.phase(Phase.ENCODING)
        self.fraction(fraction)

    def done(self) -> dict[str, float]:
        """Milliseconds of every phase, up to now."""
        self._close()
        self._began = time.monotonic()
        return dict(self.timings_ms)

    def _close(self) -> None:
        if self._phase is not None:
            spent = (time.monotonic() - self._began) * 1000
            name = str(self._phase)
            self.timings_ms[name] = round(self.timings_ms.get(name, 0.0) + spent, 1)

    def _report(self, fraction: float) -> None:
        self._reported = time.monotonic()
        try:
            self._catalogue.jobs.report(self._claim, self._phase or Phase.LOADING, fraction)
        except CatalogueUnavailable:
            log.warning("progress not reported, the catalogue can't be reached", job=self._claim.job.id)
