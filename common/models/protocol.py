"""What a model family implements, and what crosses that seam.

A context is fitted once, frozen to tensors and JSON, and thawed any number of times in other processes.
The weights (`Backbone`) are shared by every context of one model, task and device and never hold a context:
contexts are passed by argument, because a context left on a shared module answers for its neighbour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from common.tables.schema import Features, TableSchema
from common.tables.target import Target

TASKS = ("classification", "regression")
#: How a context's caches are stored: as computed, in half the bytes, in a quarter.
PRECISIONS = ("native", "fp16", "int8")
#: What is stored of the training rows: keys and values of every layer, or one vector a row, from which each predict
#: computes them again.
CACHES = ("kv", "repr")
#: An option's value that leaves the choice to the service.
AUTO = "auto"
#: Bytes of one value of each tensor type, by its safetensors name.
WIDTHS = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "BOOL": 1}

#: Reports a fraction of 0 to 1; raises Cancelled when the job was cancelled. A fit reports 0.0 when it begins to
#: preprocess, and every larger fraction counts model blocks: the first one above 0 means that it encodes.
Progress = Callable[[float], None]


def no_progress(fraction: float) -> None:
    """Progress that nobody asked for."""


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
    """One tensor to be written: parts are flat byte buffers whose bytes, in order, are the tensor's.

    Parts are produced one at a time so that merging ensemble groups never needs a second copy in memory.
    """

    name: str
    dtype: str  # safetensors name: F64 F32 F16 BF16 I64 I32 I8 U8 BOOL
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[memoryview]]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's body."""
        return WIDTHS[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class Frozen:
    """A fitted state as tensors in load order and a JSON object; no code, no class names."""

    tensors: Sequence[TensorSource]
    state: Mapping[str, Any]
    state_version: int
    precision: str = "native"  # one of PRECISIONS
    cache: str = "kv"  # one of CACHES


@dataclass(frozen=True)
class Prediction:
    """Answers for n rows.

    classification: `probabilities` float64 (n, k), columns in the order of the target's classes.
    regression: `mean` float64 (n,), `quantiles` float64 (n, len(levels)) when levels were asked for, `median` or
    `mode` float64 (n,) when that was the point asked for.
    """

    probabilities: npt.NDArray[np.float64] | None = None
    mean: npt.NDArray[np.float64] | None = None
    quantiles: npt.NDArray[np.float64] | None = None
    median: npt.NDArray[np.float64] | None = None
    mode: npt.NDArray[np.float64] | None = None

    def __len__(self) -> int:
        """Rows answered."""
        answers = self.probabilities if self.probabilities is not None else self.mean
        return 0 if answers is None else len(answers)


def spread(probabilities: Any, codes: Any, target: Target) -> Any:
    """(n, len(codes)) probabilities as float64 (n, k) over all classes of the target; the others are 0.0."""
    answer = np.asarray(probabilities).astype(np.float64)
    if answer.shape[1] == len(target.classes):
        return answer
    full = np.zeros((len(answer), len(target.classes)))
    full[:, np.asarray(codes, dtype=np.int64)] = answer
    return full


@dataclass(frozen=True)
class PredictOptions:
    """What a predict asks for beyond the defaults; part of what may share one forward."""

    quantiles: tuple[float, ...] = ()
    point: str = "mean"  # of a regression: one of its model's `points`


class Backbone(Protocol):
    """Loaded weights of one model and task on one device."""

    weights: Weights
    device: str
    nbytes: int


class FittedState(Protocol):
    """What `fit` returns; only its own adapter looks inside."""

    def predict(self, features: Features, options: PredictOptions = ...) -> Prediction:
        """The library's own answer, the oracle that a context is verified against."""
        ...


class Predictor(Protocol):
    """A thawed context; safe to use from several threads at once."""

    nbytes: int

    def predict(self, features: Features, options: PredictOptions) -> Prediction:
        """Answers for the rows; `features` come from the context's own schema."""
        ...


@dataclass(frozen=True)
class OneShot:
    """A small training table and the rows to answer from it, once."""

    table: TrainingTable
    rows: Features
    options: Mapping[str, Any]  # of the fit
    wanted: PredictOptions


@dataclass(frozen=True)
class Once:
    """A one-shot's answer, and the context that it came from."""

    predictor: Predictor
    prediction: Prediction
    members: int  # of its ensemble


class Adapter(Protocol):
    """One model family."""

    family: str
    state_version: int

    def versions(self) -> Mapping[str, str]:
        """Versions of the libraries that a fit's numbers depend on, for the context's manifest."""
        ...

    def tolerance(self, device: str, precision: str) -> float:
        """Largest difference between a context's answer and the fitted estimator's; 0.0 is bit for bit.

        Of probabilities, or of means in standard deviations of the target.
        """
        ...

    def inspect(self, path: Path, model: str) -> tuple[str, ...]:
        """The tasks of a checkpoint file; raises InvalidRequest in words when it is not one of this model."""
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
        """A predictor over mapped tensors; copies nothing on CPU.

        Raises ContextIncompatible when tensors and state don't belong together or to the backbone.
        """
        ...


@dataclass(frozen=True)
class ModelLimits:
    """What a model accepts."""

    max_rows: int
    max_columns: int
    max_classes: int


@dataclass(frozen=True)
class WholeNumber:
    """An option of a fit that takes a whole number from `least` to `most`."""

    default: int
    least: int
    most: int
    meaning: str


@dataclass(frozen=True)
class Choice:
    """An option of a fit that takes one of a few words."""

    default: str
    choices: tuple[str, ...]
    meaning: str


Option = WholeNumber | Choice


class Sizes(Protocol):
    """What a model's contexts take, from a table's shape alone; knows nothing of torch."""

    def context_bytes(self, rows: int, columns: int, classes: int, options: Mapping[str, Any]) -> int:
        """Bytes of the tensors when no column is dropped, categories of text not counted.

        `options` say which precision and cache, never `auto`; `classes` is 0 for a regression.
        """
        ...


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
    state_version: int  # of its adapter; part of a context's key
    points: tuple[str, ...] = ("mean", "median")  # point estimates of its regressions, the default first
    withheld: Mapping[str, str] = field(default_factory=dict)  # output -> why it is not offered
    options: Mapping[str, Option] = field(default_factory=dict)
    sizes: Sizes | None = None
    bundled: bool = False  # the files are in the `checkpoints` folder of the installation
    hub: Mapping[str, str] = field(default_factory=dict)  # task -> repository that has its file
    hub_revision: str | None = None
    libraries: tuple[str, ...] = ()  # whose exact versions a context needs; part of its key
    gated: bool = False  # used only when `accept_license` names the model; never downloaded by us
    notice: str = ""  # what the licence asks to be shown
