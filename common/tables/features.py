"""Feature columns as a model takes them: float64 arrays and text columns, in the schema's order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Features:
    """Rows of features, column by column.

    `values[i]` is float64 (rows,), missing cells NaN, never infinite; or a `pa.StringArray` of `rows` cells,
    missing ones null.
    """

    names: tuple[str, ...]
    values: tuple[npt.NDArray[np.float64] | pa.StringArray, ...]
    rows: int

    def is_text(self, i: int) -> bool:
        """Whether column i is text."""
        return not isinstance(self.values[i], np.ndarray)

    def take(self, rows: slice | Sequence[int] | npt.NDArray[np.integer[Any]]) -> Features:
        """Some of the rows; a slice shares memory, a list or int array of indices copies."""
        if isinstance(rows, slice):
            start, stop, step = rows.indices(self.rows)
            if step == 1:
                count = max(0, stop - start)
                parts = tuple(
                    column[start : start + count]
                    if isinstance(column, np.ndarray)
                    else column.slice(start, count)
                    for column in self.values
                )
                return Features(self.names, parts, count)
            rows = range(start, stop, step)
        indices = np.asarray(rows, dtype=np.int64)
        indices = np.where(indices < 0, indices + self.rows, indices)
        taken = tuple(
            column[indices] if isinstance(column, np.ndarray) else column.take(pa.array(indices))
            for column in self.values
        )
        return Features(self.names, taken, len(indices))

    @staticmethod
    def concat(parts: Sequence[Features]) -> Features:
        """All rows of the parts, in order; raises ValueError when their columns differ or there are none."""
        if not parts:
            raise ValueError("no features to concatenate")
        first = parts[0]
        if len(parts) == 1:
            return first
        if any(part.names != first.names for part in parts):
            raise ValueError("features of different schemas can't be concatenated")
        values = tuple(
            pa.concat_arrays([part.values[i] for part in parts])
            if first.is_text(i)
            else np.concatenate([part.values[i] for part in parts])
            for i in range(len(first.names))
        )
        return Features(first.names, values, sum(part.rows for part in parts))

    def to_frame(self) -> pd.DataFrame:
        """A data frame: float64 columns, and object columns of `str` with `np.nan` for missing cells."""
        import pandas as pd

        columns = {}
        for name, values in zip(self.names, self.values, strict=True):
            if isinstance(values, np.ndarray):
                columns[name] = pd.Series(values, dtype=np.float64)
            else:
                cells = np.array(
                    [np.nan if cell is None else cell for cell in values.to_pylist()], dtype=object
                )
                columns[name] = pd.Series(cells, dtype=object)
        return pd.DataFrame(columns, index=pd.RangeIndex(self.rows))
