"""The models whose answers are compared; a further one is one line of MODELS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.integration.oracle import CHECKPOINTS


@dataclass(frozen=True)
class Model:
    """A served model, the library that it is compared with, and its checkpoints by task."""

    name: str
    library: str  # a key of tests.integration.oracle.LIBRARIES
    checkpoints: dict[str, Path] | None  # None: random ones that `conftest` makes
    members: int = 8
    within: float = 0.0  # of one forward that holds a request's rows alone
    shared: float = 1e-6  # of a request that was cut or shared its forward
    points: tuple[str, ...] = ("mean", "median")

    #: Tables that the model refuses, and a word of the reason.
    refuses: Mapping[str, str] = field(default_factory=dict)


MINI = {
    "classification": CHECKPOINTS / "tabicl-mini-classifier.ckpt",
    "regression": CHECKPOINTS / "tabicl-mini-regressor.ckpt",
}
MODELS = {
    model.name: model
    for model in (
        Model("tabicl-mini", "tabicl", MINI),
        Model("tabpfn-v2", "tabpfn", None, members=2, points=("mean", "median", "mode")),
    )
}
