"""What a fit may say about its columns instead of what the schema would infer: `options.schema`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import FieldError, InvalidRequest

FIELD = "options.schema"
#: Lists of column names, each with the kind that it gives; `ignore` leaves columns out.
LISTS = {"categorical": "text", "numeric": "numeric", "datetime": "datetime", "ignore": "ignored"}
KEYS = (*LISTS, "missing")
#: Most spellings of a missing cell, and characters of each.
MARKERS_MOST, MARKER_LENGTH = 64, 64


@dataclass(frozen=True)
class Overrides:
    """Kinds given by name, and spellings of a missing cell.

    `missing` replaces the spellings that text formats know (`common.tables.text.MISSING`), the empty cell excepted;
    None leaves those.
    """

    kinds: Mapping[str, str]
    missing: tuple[str, ...] | None = None

    @classmethod
    def decode(cls, given: Any) -> Overrides:
        """From a fit's `options.schema`, None when it gives none; raises InvalidRequest that names what is wrong."""
        if given is None:
            return cls({})
        if not isinstance(given, Mapping):
            raise _refused([FieldError(FIELD, f"must be an object with any of {', '.join(KEYS)}")])
        faults = [
            FieldError(f"{FIELD}.{name}", f"is not known; there are {', '.join(KEYS)}")
            for name in map(str, given)
            if name not in KEYS
        ]
        kinds: dict[str, str] = {}
        for name, kind in LISTS.items():
            for column in _texts(f"{FIELD}.{name}", given.get(name, ()), "column names", faults):
                if kinds.setdefault(column, kind) != kind:
                    faults.append(FieldError(f"{FIELD}.{name}", f"{column!r} stands in another list too"))
        missing = given.get("missing")
        if missing is not None:
            field = f"{FIELD}.missing"
            missing = tuple(sorted(set(_texts(field, missing, "spellings", faults)) - {""}))
            if len(missing) > MARKERS_MOST or any(len(marker) > MARKER_LENGTH for marker in missing):
                limits = f"at most {MARKERS_MOST} spellings of at most {MARKER_LENGTH} characters"
                faults.append(FieldError(field, f"takes {limits}"))
        if faults:
            raise _refused(faults)
        return cls(kinds, missing)

    def encode(self) -> dict[str, Any]:
        """What `decode` reads, in one order whatever the order given; empty when nothing is overridden."""
        encoded: dict[str, Any] = {}
        for name, kind in LISTS.items():
            columns = sorted(column for column, given in self.kinds.items() if given == kind)
            if columns:
                encoded[name] = columns
        if self.missing is not None:
            encoded["missing"] = list(self.missing)
        return encoded

    def check(self, columns: Sequence[str], target: str) -> None:
        """Raise InvalidRequest when a named column is not in the table or is the target."""
        faults = []
        for name, kind in LISTS.items():
            for column, given in self.kinds.items():
                if given == kind and column == target:
                    faults.append(FieldError(f"{FIELD}.{name}", f"{column!r} is the target"))
                elif given == kind and column not in columns:
                    listed = ", ".join(map(repr, columns[:20]))
                    message = f"{column!r} is not a column of the table; its columns are {listed}"
                    faults.append(FieldError(f"{FIELD}.{name}", message))
        if faults:
            raise _refused(faults)


NONE = Overrides({})


def _texts(field: str, given: Any, what: str, faults: list[FieldError]) -> Iterable[str]:
    """The list's texts without surrounding whitespace; anything else is a fault."""
    whole = isinstance(given, Sequence) and not isinstance(given, str)
    if not whole or not all(isinstance(text, str) for text in given):
        faults.append(FieldError(field, f"must be a list of {what}"))
        return ()
    return [text.strip() for text in given]


def _refused(faults: Sequence[FieldError]) -> InvalidRequest:
    return InvalidRequest(f"{faults[0].field}: {faults[0].message}.", errors=faults)
