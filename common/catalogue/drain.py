"""How fast a queue drains, and so when a refused submission should come back."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: Retry-After of a full queue while nothing is known of its speed, and its bounds; seconds.
DRAIN_UNKNOWN_S, DRAIN_LEAST_S, DRAIN_MOST_S = 10.0, 1.0, 600.0


def drain_s(ends_ms: Sequence[int], now_ms: int) -> float:
    """Seconds until a full queue is likely to have a free place: one over its drain rate.

    `ends_ms` are the latest ends of running jobs, newest first. A queue that stands still looks slower and slower.
    """
    if not ends_ms:
        return DRAIN_UNKNOWN_S
    mean_s = max(now_ms - ends_ms[-1], 1) / len(ends_ms) / 1000
    return float(min(max(math.ceil(mean_s), DRAIN_LEAST_S), DRAIN_MOST_S))
