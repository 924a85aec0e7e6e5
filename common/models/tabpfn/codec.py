"""Fitted objects of the library as a JSON tree and tensors, and back; runs no code that a file names.

Numbers in arrays and tensors become tensors of the context file. Everything else becomes a tree of JSON: a plain
value stands for itself, any other is an object whose `is` says what it is. Objects of a class are rebuilt with
`cls.__new__` and their attributes, and only when `common.models.tabpfn.allowed` lists the class; functions and enum
members are looked up in its other two lists. There is no `__reduce__`, `__setstate__` or lookup by a free name.

Objects are numbered in the order in which they are met, and one met again is a reference, so that what was one
object stays one. Arrays keep their memory order: BLAS takes another path for columns after columns.
"""

from __future__ import annotations

import enum
import importlib
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from common.errors import InternalError
from common.models.protocol import TensorSource
from common.models.tabpfn.allowed import CLASSES, ENUMS, FUNCTIONS

_TENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_NUMBERS = "biuf"
_SEQUENCES: Mapping[str, type] = {"list": list, "tuple": tuple, "set": set}
_MAPPINGS: Mapping[str, type] = {"dict": dict, "ordered": OrderedDict}


class Refused(ValueError):
    """A tree names something that is not on the lists, or is not one."""


def qualified(kind: Any) -> str:
    """The dotted name of a class or function."""
    return f"{kind.__module__}.{kind.__qualname__}"


class Encoder:
    """Turns objects into a tree; `tensors` collects their numbers."""

    def __init__(self) -> None:
        self.tensors: list[TensorSource] = []
        self._met: dict[int, int] = {}
        self._kept: list[Any] = []  # or an id might be used again

    def __call__(self, value: Any) -> Any:
        """The tree of a value; raises InternalError for what can't be kept."""
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"is": "float", "of": repr(value)}
        met = self._met.get(id(value))
        if met is not None:
            return {"is": "again", "of": met}
        self._met[id(value)] = len(self._met)
        self._kept.append(value)
        return self._object(value)

    def _object(self, value: Any) -> dict[str, Any]:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return {"is": "tensor", "of": self._keep(value.detach())}
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, np.generic):
            return self._scalar(value)
        if isinstance(value, torch.dtype):
            return {"is": "torch dtype", "of": str(value).removeprefix("torch.")}
        if isinstance(value, np.dtype):
            return {"is": "dtype", "of": value.str}
        if isinstance(value, enum.Enum):
            return {"is": "enum", "of": self._listed(kind, ENUMS), "name": value.name}
        for name, cls in _SEQUENCES.items():
            if kind is cls:
                items = sorted(value, key=str) if cls is set else value
                return {"is": name, "of": [self(item) for item in items]}
        for name, cls in _MAPPINGS.items():
            if kind is cls:
                return {"is": name, "of": [[self(key), self(item)] for key, item in value.items()]}
        if kind is slice:
            return {"is": "slice", "of": [self(value.start), self(value.stop), self(value.step)]}
        if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
            return {"is": "function", "of": self._listed(value, FUNCTIONS)}
        if isinstance(value, dict):  # scikit-learn's Bunch
            items = [[self(key), self(item)] for key, item in value.items()]
            return {"is": "bunch", "of": self._listed(kind, CLASSES), "items": items}
        listed = self._listed(kind, CLASSES)
        attributes = [[key, self(item)] for key, item in vars(value).items()]
        return {"is": "object", "of": listed, "attributes": attributes}

    def _array(self, array: np.ndarray[Any, Any]) -> dict[str, Any]:
        shape = list(map(int, array.shape))
        if array.dtype.kind in "OU":
            return {
                "is": "cells",
                "of": [self(cell) for cell in array.ravel().tolist()],
                "shape": shape,
                "dtype": array.dtype.str,
            }
        if array.dtype.kind not in _NUMBERS:
            raise InternalError(f"an array of {array.dtype} can't be kept in a context")
        by_columns = bool(array.flags.f_contiguous and not array.flags.c_contiguous)
        # A copy in memory order: an SVD's components may run backwards, which torch can't view.
        flat = np.array(array.T if by_columns else array, order="C", copy=True).reshape(-1)
        try:
            kept = torch.from_numpy(flat)
            known = kept.dtype in _TENSORS
        except TypeError:
            known = False
        at = self._keep(kept if known else torch.from_numpy(flat.view(np.uint8)))
        return {"is": "array", "of": at, "shape": shape, "dtype": array.dtype.str, "by_columns": by_columns}

    def _scalar(self, value: np.generic) -> dict[str, Any]:
        if isinstance(value, np.str_):
            return {"is": "text", "of": str(value)}
        if value.dtype.kind not in _NUMBERS:
            raise InternalError(f"a {value.dtype} can't be kept in a context")
        return {"is": "number", "of": value.tobytes().hex(), "dtype": value.dtype.str}

    def _keep(self, tensor: torch.Tensor) -> str:
        if tensor.dtype not in _TENSORS:
            raise InternalError(f"a tensor of {tensor.dtype} can't be kept in a context")

        def parts() -> Iterator[memoryview]:
            yield tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data

        name = f"t{len(self.tensors)}"
        self.tensors.append(TensorSource(name, _TENSORS[tensor.dtype], tuple(tensor.shape), parts))
        return name

    @staticmethod
    def _listed(kind: Any, allowed: frozenset[str]) -> str:
        name = qualified(kind)
        if name not in allowed:
            raise InternalError(f"{name} can't be kept in a context")
        return name


class Decoder:
    """Turns a tree back into objects; a fresh one a tree."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], device: str) -> None:
        self._tensors = tensors
        self._device = torch.device(device)
        self._met: list[Any] = []

    def __call__(self, tree: Any) -> Any:
        """The value of a tree.

        Raises Refused for what is not allowed, and KeyError, TypeError, ValueError, IndexError or RecursionError
        for what is no tree. Arrays view the tensors; on CPU so do tensors.
        """
        if not isinstance(tree, dict):
            return tree
        kind, of = tree["is"], tree["of"]
        if kind == "float":
            return float(of)
        if kind == "again":
            return self._met[of]
        at = len(self._met)
        self._met.append(None)
        if kind in _SEQUENCES:
            return self._sequence(at, kind, of)
        if kind in _MAPPINGS:
            made = self._met[at] = _MAPPINGS[kind]()
            for key, item in of:
                made[self(key)] = self(item)
            return made
        if kind in ("object", "bunch"):
            return self._object(at, tree)
        self._met[at] = self._leaf(kind, of, tree)
        return self._met[at]

    def _sequence(self, at: int, kind: str, of: Any) -> Any:
        if kind != "list":
            self._met[at] = _SEQUENCES[kind](self(item) for item in of)
            return self._met[at]
        made = self._met[at] = []
        made.extend(self(item) for item in of)
        return made

    def _object(self, at: int, tree: Mapping[str, Any]) -> Any:
        cls = self._found(tree["of"], CLASSES)
        made = self._met[at] = cls.__new__(cls)
        if tree["is"] == "bunch":
            for key, item in tree["items"]:
                made[self(key)] = self(item)
            return made
        attributes = {str(key): self(item) for key, item in tree["attributes"]}
        made.__dict__.update(attributes)  # frozen data classes too
        return made

    def _leaf(self, kind: str, of: Any, tree: Mapping[str, Any]) -> Any:
        if kind == "tensor":
            return self._tensors[of].to(self._device)
        if kind == "array":
            flat = self._tensors[of].numpy().reshape(-1).view(_number(tree["dtype"]))
            shape = tuple(tree["shape"])
            return flat.reshape(shape[::-1]).T if tree["by_columns"] else flat.reshape(shape)
        if kind == "cells":
            cells = np.empty(len(of), dtype=np.dtype(tree["dtype"]))  # text or objects
            for i, cell in enumerate(of):
                cells[i] = self(cell)
            return cells.reshape(tuple(tree["shape"]))
        if kind == "number":
            return np.frombuffer(bytes.fromhex(of), dtype=_number(tree["dtype"]))[0]
        if kind == "text":
            return np.str_(of)
        if kind == "slice":
            return slice(*(self(bound) for bound in of))
        if kind == "dtype":
            return np.dtype(of)
        if kind == "torch dtype":
            return next(dtype for dtype in _TENSORS if str(dtype) == f"torch.{of}")
        if kind == "enum":
            return self._found(of, ENUMS)[tree["name"]]
        if kind == "function":
            return self._found(of, FUNCTIONS)
        raise Refused(f"{str(kind)[:80]!r} is unknown")

    @staticmethod
    def _found(name: Any, allowed: frozenset[str]) -> Any:
        if name not in allowed:
            raise Refused(f"{str(name)[:80]!r} is not allowed in a context")
        module, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(module), attribute)


def _number(text: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(text)
    if dtype.kind not in _NUMBERS:
        raise Refused(f"{str(text)[:80]!r} is no type of numbers")
    return dtype
