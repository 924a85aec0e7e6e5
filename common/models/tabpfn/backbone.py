"""TabPFN checkpoints, and the one module a file and device that all contexts and both tasks share.

A checkpoint is a dict of `state_dict`, `config`, `architecture_name` (absent in v2, "base" in v2.5) and
`inference_config` (absent before v2.6), kept by `torch.save` or as safetensors with the rest in the header
(tabpfn/checkpoint.py). tabpfn's own loader would download a file that is missing, and reads pickles when an
environment variable says so; it never sees a path here.

Precision is applied to a shared module in place (tabpfn/inference.py, `set_dtype`), so all contexts of a module have
one: float32.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import safe_open
from tabpfn.architectures import ARCHITECTURES
from tabpfn.architectures.shared.bar_distribution import FullSupportBarDistribution
from tabpfn.base import ModelSpecs
from tabpfn.model_loading import _get_inference_config_from_checkpoint, get_loss_criterion

from common.errors import InvalidRequest, ModelNotReady
from common.models.protocol import TASKS, Weights
from common.tables.canonical import file_digest

PRECISION = torch.float32
#: Registry names to the architecture that their checkpoints must have.
ARCHITECTURE_OF = {
    "tabpfn-v2": "tabpfn_v2",
    "tabpfn-v2.5": "tabpfn_v2_5",
    "tabpfn-v2.6": "tabpfn_v2_6",
    "tabpfn-v3": "tabpfn_v3",
    "tabpfn-v3.5": "tabpfn_v3_5",
}
_CRITERION = "criterion."


@dataclass(eq=False)
class Loaded:
    """One file's module on one device; `specs` is what the library's estimators take, by task."""

    module: Any  # tabpfn.architectures.interface.Architecture
    specs: Mapping[str, Any]  # task -> tabpfn.base.ModelSpecs
    nbytes: int


@dataclass(eq=False)
class TabPFNBackbone:
    """A loaded checkpoint as the backbone of one task; holds no context."""

    weights: Weights
    device: str
    nbytes: int
    loaded: Loaded

    @property
    def specs(self) -> Any:
        """The `ModelSpecs` of this task."""
        return self.loaded.specs[self.weights.task]

    @property
    def limits(self) -> Any:
        """The `InferenceConfig` of the checkpoint: rows, features and classes that it takes."""
        return self.specs.inference_config


_shared: weakref.WeakValueDictionary[tuple[str, str], Loaded] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a checkpoint file, `state_dict` mapped; runs no code of the file.

    Raises InvalidRequest in words when it is not a TabPFN checkpoint.
    """
    try:
        if path.suffix == ".safetensors":
            content = _read_safetensors(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise InvalidRequest(f"{path} can't be read: {error.strerror or error}.") from error
    except Exception as error:  # torch.load raises half a dozen types on a foreign file
        raise InvalidRequest(f"{path} is not a checkpoint file that can be loaded safely.") from error
    known = isinstance(content, Mapping) and all(
        isinstance(content.get(part), Mapping) for part in ("config", "state_dict")
    )
    if not known:
        raise InvalidRequest(f"{path} is not a TabPFN checkpoint: it has no `config` and `state_dict`.")
    return dict(content)


def _read_safetensors(path: Path) -> dict[str, Any]:
    with safe_open(str(path), framework="pt", device="cpu") as file:
        header = file.metadata() or {}
        content: dict[str, Any] = {key: orjson.loads(text) for key, text in header.items()}
        content["state_dict"] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (not iterable)
    return content


def inspect_checkpoint(path: Path, model: str | None = None) -> tuple[str, ...]:
    """The tasks of a checkpoint file, after building its module and comparing all tensors.

    Raises InvalidRequest in words, also when the file is of another version than `model` says.
    """
    return tuple(_build(path, model).specs)


def load_backbone(weights: Weights, device: str) -> TabPFNBackbone:
    """A checkpoint on a device, loaded once a process whatever its tasks; 0.5 s and more by size.

    Raises ModelNotReady when the file is not what `weights` says (another digest, version or task, no checkpoint) or
    the device can't be used.
    """
    key = weights.digest, device
    with _lock:
        loaded = _shared.get(key)
        if loaded is None:
            loaded = _shared[key] = _load(weights, device)
    if weights.task not in loaded.specs:
        has = " and ".join(loaded.specs)
        raise ModelNotReady(f"{weights.path} is for {has}, but was given as the weights for {weights.task}.")
    return TabPFNBackbone(weights, device, loaded.nbytes, loaded)


def _load(weights: Weights, device: str) -> Loaded:
    try:
        if file_digest(weights.path) != weights.digest:
            raise ModelNotReady(
                f"{weights.path} has changed since it was chosen; restart to use the new file."
            )
        loaded = _build(weights.path, weights.model)
    except (InvalidRequest, OSError) as error:
        raise ModelNotReady(f"The weights of {weights.model!r} can't be used: {error}") from error
    try:
        loaded.module.to(torch.device(device))
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        said = str(error).strip().splitlines()[0]
        raise ModelNotReady(f"The device {device!r} can't be used: {said}") from error
    return loaded


def _build(path: Path, model: str | None) -> Loaded:
    content = read_checkpoint(path)
    name = content.get("architecture_name", "tabpfn_v2")
    name = "tabpfn_v2_5" if name == "base" else name
    if name not in ARCHITECTURES:
        raise InvalidRequest(f"{path} has an architecture that this release does not know: {str(name)[:80]}.")
    wanted = ARCHITECTURE_OF.get(model or "", name)
    if name != wanted:
        raise InvalidRequest(f"{path} is a {name} checkpoint, but {model} is {wanted}.")
    tensors = content["state_dict"]
    criterion = {key: value for key, value in tensors.items() if _CRITERION in key}
    try:
        config, _ = ARCHITECTURES[name].parse_config(content["config"])
        module = ARCHITECTURES[name].get_architecture(config)
        module.load_state_dict({key: value for key, value in tensors.items() if key not in criterion})
    except Exception as error:  # pydantic's, torch's and assertions
        said = str(error).strip().splitlines()[0][:200]
        raise InvalidRequest(f"{path} does not hold the tensors that it configures: {said}") from error
    module = module.type(PRECISION).eval()
    borders = criterion.get(f"{_CRITERION}borders", getattr(module, "regression_borders", None))
    specs = {
        task: _specs(task, module, config, content, borders)
        for task in TASKS
        if _serves(task, module, config, borders)
    }
    if not specs:
        raise InvalidRequest(f"{path} has neither a classifier's nor a regressor's head.")
    nbytes = sum(p.numel() * p.element_size() for p in module.parameters())
    return Loaded(module, specs, nbytes)


def _serves(task: str, module: Any, config: Any, borders: torch.Tensor | None) -> bool:
    """Whether the module has the task's head. v3.5 has one or both; older ones have one, told by its classes."""
    if task == "classification":
        return int(config.max_num_classes) >= 2
    if borders is None or getattr(module, "task_type", None) == "multiclass":
        return False
    two_heads = hasattr(module, "heads")
    return two_heads or int(config.max_num_classes) < 2


def _specs(
    task: str, module: Any, config: Any, content: Mapping[str, Any], borders: torch.Tensor | None
) -> Any:
    criterion: Any
    if task == "regression":
        criterion = FullSupportBarDistribution(
            borders.detach().to(torch.float32).clone(),  # type: ignore[union-attr]  # a regressor has borders
            ignore_nan_targets=True,
        )
    else:
        criterion = get_loss_criterion(config, estimator_type="classifier")
    return ModelSpecs(
        model=module,
        architecture_config=config,
        inference_config=_get_inference_config_from_checkpoint(dict(content), criterion),
        norm_criterion=criterion if task == "regression" else None,
    )
