"""TabPFN behind the model protocol."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch

from common.errors import ContextIncompatible
from common.models.protocol import Frozen, Progress, TrainingTable, Weights
from common.models.tabpfn import fit as fitting
from common.models.tabpfn import state as states
from common.models.tabpfn.backbone import TabPFNBackbone, inspect_checkpoint, load_backbone
from common.models.tabpfn.predict import TabPFNPredictor
from common.tables.target import Target


class TabPFNAdapter:
    """The TabPFN family: v2, v2.5, v2.6, v3 and v3.5."""

    family = "tabpfn"
    state_version = states.STATE_VERSION

    def versions(self) -> Mapping[str, str]:
        """Versions of the libraries that a fit's numbers depend on."""
        names = ("tabpfn", "torch", "scikit-learn", "scipy", "numpy", "pandas")
        return {name: version(name) for name in names}

    def tolerance(self, device: str, precision: str) -> float:
        """Bit for bit on CPU; a GPU's kernels depend on how many members one forward holds."""
        return 0.0 if torch.device(device).type == "cpu" else 1e-3

    def inspect(self, path: Path, model: str) -> tuple[str, ...]:
        """The tasks of a checkpoint file of this model; raises InvalidRequest in words when it is not one."""
        return inspect_checkpoint(path, model)

    def load(self, weights: Weights, device: str) -> TabPFNBackbone:
        """Load weights; raises ModelNotReady when the file is not what `weights` says."""
        return load_backbone(weights, device)

    def fit(
        self, table: TrainingTable, backbone: Any, options: Mapping[str, Any], progress: Progress
    ) -> fitting.TabPFNFitted:
        """Encode the training table; see `common.models.tabpfn.fit.fit`."""
        return fitting.fit(table, cast(TabPFNBackbone, backbone), options, progress)

    def freeze(self, state: Any) -> Frozen:
        """The fitted estimator as tensors and JSON."""
        return states.freeze(cast(fitting.TabPFNFitted, state))

    def thaw(
        self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any], backbone: Any, target: Target
    ) -> TabPFNPredictor:
        """A predictor over the tensors, which it views on CPU and moves elsewhere.

        Raises ContextIncompatible when tensors, state, backbone and target don't belong together, or when the state
        names anything that a context may not hold.
        """
        try:
            return states.thaw(tensors, state, cast(TabPFNBackbone, backbone), target)
        except (LookupError, ValueError, TypeError, AttributeError, RecursionError, StopIteration) as error:
            raise ContextIncompatible(f"The context's state does not fit the model: {error}.") from error


ADAPTER = TabPFNAdapter()
