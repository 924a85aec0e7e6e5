"""The models whose answers are compared; a further one is one line of MODELS."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.integration.oracle import CHECKPOINTS


@dataclass(frozen=True)
class Model:
    """A served model, the library that it is compared with, and its checkpoints by task."""

    name: str
    library: str  # a key of tests.integration.oracle.LIBRARIES
    checkpoints: dict[str, Path]
    within: float = 0.0  # of one forward that holds a request's rows alone
    shared: float = 1e-6  # of a request that was cut or shared its forward
    points: tuple[str, ...] = ("mean", "median")

    def paths(self) -> dict[str, str]:
        """As `TABRELAY_MODEL_PATHS` has them."""
        return {f"{self.name}:{task}": str(path) for task, path in self.checkpoints.items()}


MINI = {
    "classification": CHECKPOINTS / "tabicl-mini-classifier.ckpt",
    "regression": CHECKPOINTS / "tabicl-mini-regressor.ckpt",
}
MODELS = {model.name: model for model in (Model("tabicl-mini", "tabicl", MINI),)}
