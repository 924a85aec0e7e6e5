"""Small TabPFN checkpoints of random weights in the library's own formats, made where a test needs them (0.1 s each).

They answer nonsense, but through every line of code that real weights go through.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tabpfn.architectures import ARCHITECTURES
from tabpfn.architectures.shared.bar_distribution import FullSupportBarDistribution
from tabpfn.checkpoint import save_as_safetensors
from tabpfn.constants import ModelVersion
from tabpfn.inference_config import InferenceConfig

_OLDER = {"emsize": 24, "nlayers": 2, "nhead": 2}
_NEWER = {
    "embed_dim": 16,
    "dist_embed_num_blocks": 1,
    "dist_embed_num_heads": 2,
    "dist_embed_num_inducing_points": 8,
    "feat_agg_num_blocks": 1,
    "feat_agg_num_heads": 2,
    "feat_agg_num_cls_tokens": 2,
    "nlayers": 2,
    "icl_num_heads": 2,
    "icl_num_kv_heads_test": 1,
    "decoder_head_dim": 8,
    "decoder_num_heads": 2,
    "softmax_scaling_mlp_hidden_dim": 8,
}
SIZES: Mapping[str, Mapping[str, int]] = {
    "v2": _OLDER,
    "v2.5": _OLDER,
    "v2.6": _OLDER | {"num_thinking_rows": 8},
    "v3": _NEWER,
    "v3.5": _NEWER | {"fourier_encoding_num_frequencies": 4, "cell_ecdf_num_buckets": 64},
}
BUCKETS = 32
_WORDS = {"classification": "classifier", "regression": "regressor"}
_LIBRARY_TASKS = {"classification": "multiclass", "regression": "regression"}


def make(folder: Path, version: str, task: str, *, seed: int = 0) -> Path:
    """A checkpoint file of the version for the task; one of v3.5 serves both tasks."""
    path = folder / file_name(version, task)
    content = build(version, task, seed)
    folder.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_as_safetensors(content, path)
    else:
        torch.save(content, path)
    return path


def file_name(version: str, task: str) -> str:
    """What `make` calls the file."""
    if version == "v3.5":
        return "tabpfn-v3.5-random.safetensors"
    return f"tabpfn-{version}-{_WORDS[task]}-random.ckpt"


def build(version: str, task: str, seed: int = 0) -> dict[str, Any]:
    """A checkpoint's content as the library reads it."""
    name = "tabpfn_" + version.replace(".", "_")
    architecture = ARCHITECTURES[name]
    config: dict[str, Any] = dict(SIZES[version])
    both = version == "v3.5"
    config["max_num_classes"] = 10 if both or task == "classification" else 0
    if both or task == "regression":
        config["num_buckets"] = BUCKETS
    parsed, unused = architecture.parse_config(config)
    assert not unused, unused
    torch.manual_seed(seed)
    model = architecture.get_architecture(parsed)
    _draw(model, seed)
    tensors = {key: value.clone() for key, value in model.state_dict().items()}
    if task == "regression" and not any("borders" in key for key in tensors):
        bars = FullSupportBarDistribution(torch.linspace(-4, 4, BUCKETS + 1), ignore_nan_targets=True)
        tensors |= {f"criterion.{key}": value for key, value in bars.state_dict().items()}
    content = {"state_dict": tensors, "config": dataclasses.asdict(parsed)}
    if version != "v2":  # as in the published files: v2 has neither, v2.5 no inference configuration
        content["architecture_name"] = name
    if version not in ("v2", "v2.5"):
        content["inference_config"] = dataclasses.asdict(
            InferenceConfig.get_default(_LIBRARY_TASKS[task], ModelVersion.V2_5)
        )
    return content


def _draw(model: torch.nn.Module, seed: int) -> None:
    """Draw every matrix anew: some start at zero, and then all answers would be equal."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                scale = parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            elif not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
