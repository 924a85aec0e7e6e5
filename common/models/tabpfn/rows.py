"""How many rows the model sees at once, so that a row's answer does not depend on its company.

Measured with tabpfn 9.2.0 (tests/models/test_tabpfn_batching.py repeats it): for a batch of any multiple of 32 rows a
row's answer has the same bits wherever it stands and whatever the others are; between sizes it moves by some 1e-7 in
float32. One thing moves more: the fingerprint, a hash of the prepared row, is another random number when a singular
value decomposition rounds the row's 12th decimal differently, which depends on how many rows are transformed at once
(up to 1 % of rows, 1e-4 of the answer). So rows are prepared in blocks of exactly 32, and forwards take any multiple.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from common.tables.features import Features

#: Rows of a block; padding repeats the last row.
BLOCK = 32
#: Rows of the largest forward.
MOST = 256


def padded_size(rows: int) -> int:
    """The multiple of BLOCK that holds so many rows."""
    return -(-rows // BLOCK) * BLOCK


def padded(features: Features) -> Features:
    """The rows, the last one repeated up to a multiple of BLOCK."""
    size = padded_size(features.rows)
    return features.take(np.minimum(np.arange(size), features.rows - 1))


def forwards(rows: int) -> Iterator[slice]:
    """The rows of each forward; `rows` is a multiple of BLOCK."""
    for start in range(0, rows, MOST):
        yield slice(start, min(start + MOST, rows))


def blocks(rows: int) -> Iterator[slice]:
    """The rows of each block; `rows` is a multiple of BLOCK."""
    for start in range(0, rows, BLOCK):
        yield slice(start, start + BLOCK)
