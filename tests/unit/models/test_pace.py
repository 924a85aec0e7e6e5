"""A fit's fraction follows its time: the first forward is weighed by default, later ones as it was measured."""

from __future__ import annotations

import pytest

from common.models.tabicl import fit


def test_later_forwards_are_weighed_by_the_first_one_s_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(fit.time, "monotonic", lambda: now[0])
    pace = fit._Pace(blocks=4, columns=2)
    cost, seen = (1.0, 1.0, 6.0, 2.0), []
    for forward in range(3):
        now[0] += 100.0  # whatever the library does between forwards is no block's time
        if forward:
            pace.next_forward()
        pace.resume()
        for position, seconds in enumerate(cost):
            now[0] += seconds
            seen.append(pace.done(position))
    assert seen == sorted(seen)
    assert seen[:4] == pytest.approx([1 / 6, 2 / 6, 5 / 6, 1.0])
    assert seen[4:] == pytest.approx([1.1, 1.2, 1.8, 2.0, 2.1, 2.2, 2.8, 3.0])
