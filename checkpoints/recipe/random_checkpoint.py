"""Writes random weights in TabICL's checkpoint format, for latency and memory runs where no weights are at hand.

    python checkpoints/recipe/random_checkpoint.py --size v2 --task classification --out /tmp/v2.ckpt

Time and memory do not depend on the weights' values, so a random model of the real size measures both.
Its predictions mean nothing: never use one to show results.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from tabicl._model.tabicl import TabICL

# TabICL v2's sizes, as its training scripts and class defaults state them: about 28 million values, 110 MB.
V2: dict[str, Any] = {
    "max_classes": 10,
    "num_quantiles": 999,
    "embed_dim": 128,
    "col_num_blocks": 3,
    "col_nhead": 8,
    "col_num_inds": 128,
    "col_affine": False,
    "col_feature_group": "same",
    "col_feature_group_size": 3,
    "col_target_aware": True,
    "col_ssmax": "qassmax-mlp-elementwise",
    "row_num_blocks": 3,
    "row_nhead": 8,
    "row_num_cls": 4,
    "row_rope_base": 100000,
    "row_rope_interleaved": False,
    "icl_num_blocks": 12,
    "icl_nhead": 8,
    "icl_ssmax": "qassmax-mlp-elementwise",
    "ff_factor": 2,
    "dropout": 0.0,
    "activation": "gelu",
    "norm_first": True,
    "bias_free_ln": False,
}
# The same options at 0.2 MB, for tests that need a model but no sense in what it says.
TINY = V2 | {
    "num_quantiles": 99,
    "embed_dim": 16,
    "col_num_blocks": 1,
    "col_nhead": 2,
    "col_num_inds": 8,
    "row_num_blocks": 1,
    "row_nhead": 2,
    "row_num_cls": 2,
    "icl_num_blocks": 2,
    "icl_nhead": 2,
}
SIZES = {"v2": V2, "tiny": TINY}
REGRESSION = {"max_classes": 0, "bias_free_ln": True}


def build(size: str, task: str, seed: int) -> dict[str, Any]:
    """A checkpoint's contents: the keyword arguments of tabicl's model class, and its weights."""
    config = SIZES[size] | (REGRESSION if task == "regression" else {})
    torch.manual_seed(seed)
    # With zero_init=True every residual branch would add nothing, and a wrong cache would go unnoticed.
    model = TabICL(**config, zero_init=False)
    return {"config": config, "state_dict": model.state_dict()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), required=True)
    parser.add_argument("--task", choices=("classification", "regression"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    checkpoint = build(given.size, given.task, given.seed)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    torch.save(checkpoint, given.out)
    values = sum(tensor.numel() for tensor in checkpoint["state_dict"].values())
    print(f"{given.out}: {values / 1e6:.2f} M values, {given.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
