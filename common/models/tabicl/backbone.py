"""TabICL checkpoints: `torch.save({"config": kwargs of TabICL, "state_dict": ...})`.

Upstream: tabicl/_sklearn/classifier.py and regressor.py, `_load_model`; tabicl/_model/tabicl.py.
"""

from __future__ import annotations

import inspect as introspection
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabicl._model.attention import set_flash_attn3_enabled
from tabicl._model.tabicl import TabICL

from common.errors import InvalidRequest, ModelNotReady
from common.models.protocol import Weights
from common.tables.canonical import file_digest

#: Where `few_rows` starts and ends to look.
FEWEST_ROWS, MOST_ROWS = 4, 32


@dataclass(eq=False)
class TabICLBackbone:
    """One checkpoint's module in evaluation mode; shared by every context, and holds none."""

    weights: Weights
    device: str
    nbytes: int
    module: Any  # tabicl._model.tabicl.TabICL
    few_rows: int  # matrix products of fewer rows than this round differently from those of more

    @property
    def max_classes(self) -> int:
        """Classes that the module tells apart; 0 for a regressor."""
        return int(self.module.max_classes)

    @property
    def placeholders(self) -> int:
        """Column slots that the library reserves in front of the features for its class tokens."""
        return int(self.module.row_interactor.num_cls)


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Configuration and mapped tensors of a checkpoint file; runs no code of the file.

    Raises InvalidRequest in words when it is not a TabICL checkpoint.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise InvalidRequest(f"{path} can't be read: {error.strerror or error}.") from error
    except Exception as error:  # torch.load raises half a dozen types on a foreign file
        raise InvalidRequest(f"{path} is not a checkpoint file that can be loaded safely.") from error
    config = content.get("config") if isinstance(content, Mapping) else None
    tensors = content.get("state_dict") if isinstance(content, Mapping) else None
    if not isinstance(config, Mapping) or not isinstance(tensors, Mapping):
        raise InvalidRequest(f"{path} is not a TabICL checkpoint: it has no `config` and `state_dict`.")
    known = introspection.signature(TabICL).parameters
    unknown = [str(key) for key in config if key not in known]
    if unknown:
        raise InvalidRequest(
            f"{path} is not a TabICL checkpoint of this version: it configures {', '.join(unknown[:5])}."
        )
    return dict(config), dict(tensors)


def inspect_checkpoint(path: Path) -> str:
    """The task of a checkpoint file, after comparing all its tensors' names and shapes; loads no weights.

    Raises InvalidRequest in words.
    """
    config, tensors = read_checkpoint(path)
    with torch.device("meta"), warnings.catch_warnings():
        # Beside tabpfn, torch registers operators of the meta device a second time, and says so.
        warnings.simplefilter("ignore")
        module = _build(config, path)
    _check_tensors(module, tensors, path)
    return _task(module)


def load_backbone(weights: Weights, device: str) -> TabICLBackbone:
    """Load a checkpoint; 0.4 s for 110 MB.

    Raises ModelNotReady when the file is not what `weights` says: another digest, another task, no checkpoint.
    """
    try:
        digest = file_digest(weights.path)
        if digest != weights.digest:
            raise ModelNotReady(
                f"{weights.path} has changed since it was chosen; restart to use the new file."
            )
        config, tensors = read_checkpoint(weights.path)
        module = _build(config, weights.path)
        _check_tensors(module, tensors, weights.path)
    except (InvalidRequest, OSError) as error:
        raise ModelNotReady(f"The weights of {weights.model!r} can't be used: {error}") from error
    if _task(module) != weights.task:
        raise ModelNotReady(wrong_task(weights.path, _task(module), weights.task))
    module.load_state_dict(tensors, strict=True)
    # Parameters keep `requires_grad`, as in the library: without it torch picks other kernels for 2 to 4 rows, which
    # round the last bit differently.
    module.eval()
    # A process-wide switch that fits and predicts must see alike; its kernels would answer in half precision.
    set_flash_attn3_enabled(False)
    module = module.to(torch.device(device))
    nbytes = sum(p.numel() * p.element_size() for p in module.parameters())
    return TabICLBackbone(weights, device, nbytes, module, few_rows(module))


@torch.inference_mode()
def few_rows(module: Any) -> int:
    """From how many rows on this machine's matrix products with the module's weights round as those of many rows do.

    It depends on the CPU and on the weights' widths: 4 on one, 16 on another. `docs/decisions/0003-bit-equality.md`.
    """
    few, most = FEWEST_ROWS, 4 * MOST_ROWS
    layers = {layer.weight.shape: layer for layer in module.modules() if isinstance(layer, torch.nn.Linear)}
    for (_, width), layer in layers.items():
        chance = torch.Generator().manual_seed(width)
        rows = torch.randn(most, width, generator=chance).to(layer.weight)
        product = partial(torch.nn.functional.linear, weight=layer.weight, bias=layer.bias)
        whole = product(rows)
        unlike = [n for n in range(1, MOST_ROWS) if not torch.equal(product(rows[:n]), whole[:n])]
        few = max([few, *(n + 1 for n in unlike)])
    return few


def wrong_task(path: Path, found: str, wanted: str) -> str:
    """What to say when a checkpoint of one task is given for the other."""
    names = {"classification": "classifier", "regression": "regressor"}
    return f"{path} is a {names[found]}, but was given as the {names[wanted]}."


def _task(module: Any) -> str:
    return "classification" if module.max_classes > 0 else "regression"


def _build(config: Mapping[str, Any], path: Path) -> Any:
    try:
        return TabICL(**config)
    except Exception as error:  # assertions and torch's own complaints about sizes
        raise InvalidRequest(f"{path} configures a TabICL that can't be built: {error}.") from error


def _check_tensors(module: Any, tensors: Mapping[str, Any], path: Path) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    found = {name: tuple(getattr(tensor, "shape", ())) for name, tensor in tensors.items()}
    if wanted != found:
        at = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        raise InvalidRequest(f"{path} does not hold the tensors it configures: {', '.join(at[:3])} differ.")
