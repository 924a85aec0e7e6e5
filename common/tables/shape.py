"""Limits on a table's shape and the rules for column names, the same for every format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import FieldError, InvalidTable, TooLarge
from common.settings import Settings

MIB = 1024**2
#: Decompressed bytes that one cell may take on average; 64 bytes is a long number, quoted, four times over.
BYTES_PER_CELL = 64


@dataclass(frozen=True)
class TableLimits:
    """The largest table that is read."""

    max_rows: int
    max_columns: int
    max_cells: int

    @property
    def max_bytes(self) -> int:
        """Bytes that a compressed file may hold once decompressed."""
        return max(16 * MIB, BYTES_PER_CELL * self.max_cells)


def predict_limits(settings: Settings) -> TableLimits:
    """The most rows that one predict may ask."""
    return TableLimits(settings.max_predict_rows, settings.max_columns, settings.max_cells)


def check_rows(rows: int, columns: int, limits: TableLimits) -> None:
    """Refuse more rows or cells than the limits with TooLarge; `rows` may be what was read so far."""
    if rows > limits.max_rows:
        raise TooLarge(
            f"The table has more than {limits.max_rows:,} rows, the most that is accepted.",
            what="rows",
            limit=limits.max_rows,
            size=rows,
        )
    if rows * columns > limits.max_cells:
        raise TooLarge(
            f"The table has more than {limits.max_cells:,} cells (rows x columns), the most that is accepted.",
            what="cells",
            limit=limits.max_cells,
            size=rows * columns,
        )


def check_columns(columns: int, limits: TableLimits) -> None:
    """Refuse more columns than the limits with TooLarge."""
    if columns > limits.max_columns:
        raise TooLarge(
            f"The table has {columns:,} columns; {limits.max_columns:,} is the most that is accepted.",
            what="columns",
            limit=limits.max_columns,
            size=columns,
        )


def check_bytes(size: int, limits: TableLimits) -> None:
    """Refuse decompressed content above `max_bytes` with TooLarge."""
    if size > limits.max_bytes:
        raise TooLarge(
            f"The file holds more than {limits.max_bytes:,} bytes once decompressed, the most that is accepted.",
            what="decompressed_bytes",
            limit=limits.max_bytes,
            size=size,
        )


def empty_table(why: str) -> InvalidTable:
    """The error of a table without rows or columns."""
    return InvalidTable(f"Empty table: {why}.")


def checked_names(names: Sequence[str]) -> list[str]:
    """Column names without surrounding whitespace.

    Raises InvalidTable that names every column without a name and every name that stands twice, with the
    positions, counted from 1.
    """
    stripped = [name.strip() for name in names]
    if not stripped:
        raise empty_table("it has no columns")
    positions: dict[str, list[int]] = {}
    for position, name in enumerate(stripped, 1):
        positions.setdefault(name, []).append(position)
    faults = [
        FieldError(f"column {position}", "has no name; give every column a name of its own")
        for position in positions.pop("", [])
    ]
    faults += [
        FieldError(name, f"names columns {', '.join(map(str, at))}; give every column a name of its own")
        for name, at in positions.items()
        if len(at) > 1
    ]
    if faults:
        listed = "; ".join(f"{fault.field} {fault.message.split(';')[0]}" for fault in faults[:5])
        raise InvalidTable(f"Column names must be given and distinct: {listed}.", errors=faults)
    return stripped
