"""What TabICL's contexts take, from a table's shape; imported by the API, so without torch.

The tensors are listed in `state.py`; a test compares with the bytes of real ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Class tokens of a row, and so vectors of `width` in a row's representation; slots in front of a table's features.
TOKENS = 4
#: With fewer groups of features than this, the placeholder slots stay: they decide how a few rows are rounded.
FEW_GROUPS = 4
#: Arrays (H,) of F64 or I64: `columns` and `means`, and the statistics of both scalings.
_COLUMN_ARRAYS = 2 + 4 + 9
_BYTES = {"native": 4, "fp16": 2, "int8": 1}
_SCALE_BYTES = 4


@dataclass(frozen=True)
class TabICLSizes:
    """A checkpoint's dimensions: `width` of a column's vector, `points` a block of the column stage attends to."""

    width: int
    column_blocks: int
    points: int
    blocks: int

    def context_bytes(self, rows: int, columns: int, classes: int, options: Mapping[str, Any]) -> int:
        """Bytes of the tensors when no column is dropped, categories of text not counted."""
        members = int(options["n_estimators"])
        slots = columns + (TOKENS if columns < FEW_GROUPS else 0)
        halves = members * slots * self.width * self.column_blocks * 2
        values, scales = halves * self.points, halves
        row = members * self.width * TOKENS
        if options["cache"] == "kv":
            values += row * rows * self.blocks * 2
            scales += row * self.blocks * 2
        else:
            values += row * rows
            scales += members * rows
        stored = values * _BYTES[options["precision"]]
        if options["precision"] == "int8":
            stored += scales * _SCALE_BYTES
        return stored + 8 * (columns * (_COLUMN_ARRAYS + members) + members * classes)
