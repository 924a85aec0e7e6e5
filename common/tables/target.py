"""The target column: which task it makes, its labels with their types, and their codes.

Without a task: text and booleans are classes; numbers are classes when there are at most 10 distinct values and
all are whole, else a regression. With `classification` given, numbers must still look like labels: whole numbers
in at most 50 distinct values or a fifth of the rows, whichever is more; fractions in at most 10 distinct values,
each seen twice on average. How many classes a model takes is the model's limit, not checked here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from common.errors import FieldError, InvalidRequest, InvalidTarget
from common.tables.convert import combined, first_infinite

Task = Literal["classification", "regression"]
LabelType = Literal["int", "float", "bool", "text", "date"]  # a date is held as its ISO 8601 text
Label = int | float | bool | str

TASKS = ("classification", "regression")
FEW_CLASSES = 10  # numbers up to here are classes unless a task is given
MANY_CLASSES = 50


def take_target(table: pa.Table, name: str) -> Any:
    """The target's column; raises InvalidTarget that lists the columns when there is none of this name."""
    wanted = name.strip()
    if wanted in table.column_names:
        return table.column(wanted)
    listed = ", ".join(repr(column) for column in table.column_names[:20])
    more = f" and {table.num_columns - 20} more" if table.num_columns > 20 else ""
    message = f"is not a column of the table; its columns are {listed}{more}"
    raise InvalidTarget(f"The target {name[:80]!r} {message}.", errors=[FieldError("target", message)])


@dataclass(frozen=True)
class Target:
    """What a dataset predicts.

    `classes` are Python values in ascending order (False before True, text by code point), empty for regression.
    """

    name: str
    task: Task
    label_type: LabelType
    classes: tuple[Label, ...] = ()

    @classmethod
    def infer(cls, column: Any, name: str, task: str | None = None) -> Target:
        """The target of a training column (`pa.ChunkedArray`).

        Raises InvalidTarget (missing or infinite label, wrong type, the other task fits), InvalidRequest
        (unknown task).
        """
        if task is not None and task not in TASKS:
            fault = FieldError("task", "must be classification or regression")
            raise InvalidRequest(f"Unknown task {task[:40]!r}; known are {', '.join(TASKS)}.", errors=[fault])
        label_type, values = _labels(column, name)
        if label_type in ("text", "bool", "date"):
            if task == "regression":
                what = {"text": "text", "bool": "booleans", "date": "dates"}[label_type]
                raise _refused(name, f'holds {what}, which is not a number; use task "classification"')
            distinct = pc.unique(values).to_pylist()
            return cls(name, "classification", label_type, tuple(sorted(distinct)))
        numbers = values.to_numpy(zero_copy_only=False)
        if label_type == "float" and (row := first_infinite(numbers)) is not None:
            raise _refused(name, f"row {row} is infinite; give a number")
        distinct_numbers = np.unique(numbers)
        whole = bool(label_type == "int" or (distinct_numbers == np.floor(distinct_numbers)).all())
        chosen = task or (
            "classification" if whole and len(distinct_numbers) <= FEW_CLASSES else "regression"
        )
        if chosen == "regression":
            return cls(name, "regression", "float")
        _check_labels(name, len(distinct_numbers), len(numbers), whole)
        return cls(name, "classification", label_type, tuple(distinct_numbers.tolist()))

    def encode_labels(self, column: Any) -> npt.NDArray[np.int64] | npt.NDArray[np.float64]:
        """int64 class codes, or float64 values for regression, both (rows,).

        Raises InvalidTarget for a label that is missing or not among the classes.
        """
        label_type, values = _labels(column, self.name)
        if self.task == "regression":
            if label_type in ("text", "bool", "date"):
                raise _refused(self.name, f"holds {label_type}, which is not a number")
            return cast(
                "npt.NDArray[np.float64]",
                values.to_numpy(zero_copy_only=False).astype(np.float64, copy=False),
            )
        if label_type != self.label_type:
            raise _refused(self.name, f"holds {label_type} labels; the dataset has {self.label_type}")
        codes = pc.index_in(values, value_set=pa.array(self.classes, values.type, from_pandas=False))
        if codes.null_count:
            row = codes.is_null().index(True).as_py()
            raise _refused(
                self.name, f"row {row + 1} holds {values[row].as_py()!r}, which is not among the classes"
            )
        return cast("npt.NDArray[np.int64]", codes.to_numpy(zero_copy_only=False).astype(np.int64))

    def labels(self, codes: npt.NDArray[np.integer[Any]] | Sequence[int]) -> list[Label]:
        """The Python values of class codes."""
        classes = self.classes
        return [classes[code] for code in codes]

    def array(self, labels: Sequence[Label]) -> Any:
        """Labels as a `pa.Array` of their own type: bool, int64 (uint64 where needed), float64, string or date32."""
        if self.label_type == "date":
            return pa.array(labels, pa.string()).cast(pa.date32())
        wide = any(isinstance(label, int) and label >= 2**63 for label in self.classes)
        types = {"int": pa.uint64() if wide else pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
        return pa.array(labels, types.get(self.label_type, pa.string()))

    def encode(self) -> dict[str, Any]:
        """A JSON object that `decode` turns into the same target, types of labels included."""
        return {
            "name": self.name,
            "task": self.task,
            "label_type": self.label_type,
            "classes": list(self.classes),
        }

    @classmethod
    def decode(cls, encoded: Mapping[str, Any]) -> Target:
        """The target that `encode` wrote; `label_type` restores 1.0 where a JSON writer shortened it to 1."""
        label_type = cast(LabelType, encoded["label_type"])
        restore = {"int": int, "float": float, "bool": bool, "text": str, "date": str}[label_type]
        classes = tuple(cast(Label, restore(label)) for label in encoded["classes"])
        return cls(str(encoded["name"]), cast(Task, encoded["task"]), label_type, classes)


def _labels(column: Any, name: str) -> tuple[LabelType, Any]:
    """The label type, and the labels as one array: bool, string, int64, uint64 or float64, none missing."""
    values = combined(column)
    type_ = values.type
    label_type: LabelType
    if pa.types.is_dictionary(type_):
        values = values.dictionary_decode()
        type_ = values.type
    if pa.types.is_boolean(type_):
        label_type = "bool"
    elif pa.types.is_string(type_) or pa.types.is_large_string(type_):
        label_type = "text"
    elif pa.types.is_date(type_):
        label_type, values = "date", values.cast(pa.date32()).cast(pa.string())
    elif pa.types.is_integer(type_):
        label_type = "int"
        values = values.cast(pa.uint64() if type_ == pa.uint64() else pa.int64())
    elif pa.types.is_floating(type_) or pa.types.is_decimal(type_):
        label_type, values = "float", values.cast(pa.float64())
    elif pa.types.is_null(type_):
        raise _refused(name, "has no label in any row")
    else:
        raise _refused(name, f"has type {type_}; a target holds numbers, text or booleans")
    _refuse_missing(values, name)
    return label_type, values


def _refuse_missing(values: Any, name: str) -> None:
    missing = values.is_null(nan_is_null=True)
    count = pc.sum(missing).as_py() or 0
    if not count:
        return
    row = missing.index(True).as_py() + 1
    if count == len(values):
        raise _refused(name, "has no label in any row")
    rows = (
        f"row {row} has no label" if count == 1 else f"{count:,} rows have no label, the first is row {row}"
    )
    raise _refused(name, f"{rows}; leave such rows out", row=row, missing=count)


def _check_labels(name: str, distinct: int, rows: int, whole: bool) -> None:
    """Refuse numbers that are quantities, not labels."""
    most = max(MANY_CLASSES, rows // 5) if whole else min(FEW_CLASSES, rows // 2)
    if distinct > most:
        what = "values" if whole else "values with fractions"
        raise _refused(
            name,
            f"holds {distinct:,} different {what} in {rows:,} rows, which are quantities rather than classes; "
            'use task "regression"',
        )


def _refused(name: str, message: str, **facts: Any) -> InvalidTarget:
    return InvalidTarget(f"Target {name!r}: {message}.", errors=[FieldError(name, message)], **facts)
