"""What a model family implements, and what crosses that seam.

A context is fitted once, frozen to tensors and JSON, and thawed any number of times in other processes.
The weights (`Backbone`) are shared by every context of one model, task and device and never hold a context:
contexts are passed by argument, because a context left on a shared module answers for its neighbour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from common.tables.schema import Features, TableSchema
from common.tables.target import Target

#: Reports a fraction of 0 to 1 within the present phase; raises Cancelled when the job was cancelled.
Progress = Callable[[float], None]


@dataclass(frozen=True)
class Weights:
    """One checkpoint file of a model."""

    model: str
    task: str  # "classification" or "regression"
    path: Path
    digest: str  # blake3 of the file, hex


@dataclass(frozen=True)
class TrainingTable:
    """What a fit sees: features in schema order and the encoded target.

    `y` is int64 class codes (n,) for classification, float64 values (n,) for regression.
    """

    features: Features
    schema: TableSchema
    target: Target
    y: npt.NDArray[Any]


@dataclass(frozen=True)
class TensorSource:
    """One tensor to be written: parts are C-contiguous buffers whose bytes, in order, are the tensor's.

    Parts are produced one at a time so that merging ensemble groups never needs a second copy in memory.
    """

    name: str
    dtype: str  # safetensors name: F64 F32 F16 BF16 I64 I32 I8 U8 BOOL
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[memoryview]]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's body."""
        width = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "BOOL": 1}[self.dtype]
        return width * int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Frozen:
    """A fitted state as tensors in load order and a JSON object; no code, no class names."""

    tensors: Sequence[TensorSource]
    state: Mapping[str, Any]
    state_version: int
    precision: str = "native"


@dataclass(frozen=True)
class Prediction:
    """Answers for n rows.

    classification: `probabilities` float64 (n, k), columns in the order of the target's classes.
    regression: `mean` float64 (n,), and `quantiles` float64 (n, len(levels)) when levels were asked for.
    """

    probabilities: npt.NDArray[np.float64] | None = None
    mean: npt.NDArray[np.float64] | None = None
    quantiles: npt.NDArray[np.float64] | None = None

    def __len__(self) -> int:
        answers = self.probabilities if self.probabilities is not None else self.mean
        return 0 if answers is None else len(answers)


@dataclass(frozen=True)
class PredictOptions:
    """What a predict asks for beyond the defaults; part of what may share one forward."""

    quantiles: tuple[float, ...] = ()


class Backbone(Protocol):
    """Loaded weights of one model and task on one device."""

    weights: Weights
    device: str
    nbytes: int


class FittedState(Protocol):
    """What `fit` returns; only its own adapter looks inside."""

    def predict(self, features: Features) -> Prediction:
        """The library's own answer, the oracle that a context is verified against."""
        ...


class Predictor(Protocol):
    """A thawed context; safe to use from several threads at once."""

    nbytes: int

    def predict(self, features: Features, options: PredictOptions) -> Prediction:
        """Answers for the rows; `features` come from the context's own schema."""
        ...


class Adapter(Protocol):
    """One model family."""

    state_version: int

    def inspect(self, path: Path) -> str:
        """The task of a checkpoint file; raises InvalidRequest in words when it is not one of this family."""
        ...

    def load(self, weights: Weights, device: str) -> Backbone:
        """Load weights, once a process, model, task and device."""
        ...

    def fit(
        self, table: TrainingTable, backbone: Backbone, options: Mapping[str, Any], progress: Progress
    ) -> FittedState:
        """Encode the training table; seconds to half an hour."""
        ...

    def freeze(self, state: FittedState) -> Frozen:
        """The state as tensors and JSON."""
        ...

    def thaw(
        self, tensors: Mapping[str, Any], state: Mapping[str, Any], backbone: Backbone, target: Target
    ) -> Predictor:
        """A predictor over mapped tensors; copies nothing on CPU."""
        ...


@dataclass(frozen=True)
class ModelLimits:
    """What a model accepts."""

    max_rows: int
    max_columns: int
    max_classes: int


@dataclass(frozen=True)
class ModelSpec:
    """A served model."""

    name: str
    title: str
    adapter: str  # "module:attribute", imported only in worker processes
    licence: str
    licence_url: str
    files: Mapping[str, str]  # task -> file name
    limits: ModelLimits
    options: Mapping[str, Any] = field(default_factory=dict)
    hub_repo: str | None = None
    hub_revision: str | None = None
