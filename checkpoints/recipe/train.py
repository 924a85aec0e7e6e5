"""Trains the small classifier or regressor on one CPU core, from scratch or on from a checkpoint.

    python checkpoints/recipe/train.py --task classification --pool /tmp/pool --out /tmp/classifier.ckpt

The model is tabicl's own class and the optimiser tabicl's own Muon, so the result loads in an unmodified
tabicl. The loop is ours because `tabicl.train` needs wandb and transformers to import. The last step is
written, never one picked by its score.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from batches import Batch, draw_batch
from prior import Table, read_shard, seed_everything
from tabicl._model.tabicl import TabICL
from tabicl.train._muon import Muon
from torch import Tensor
from torch.nn import functional

QUANTILES = 99
# TabICL v2's options at a small size: 128, 3, 3 and 12 blocks there.
ARCHITECTURE: dict[str, Any] = {
    "max_classes": 10,
    "num_quantiles": 999,
    "embed_dim": 32,
    "col_num_blocks": 1,
    "col_nhead": 2,
    "col_num_inds": 16,
    "col_affine": False,
    "col_feature_group": "same",
    "col_feature_group_size": 3,
    "col_target_aware": True,
    "col_ssmax": "qassmax-mlp-elementwise",
    "row_num_blocks": 2,
    "row_nhead": 2,
    "row_num_cls": 4,
    "row_rope_base": 100000,
    "row_rope_interleaved": False,
    "icl_num_blocks": 4,
    "icl_nhead": 4,
    "icl_ssmax": "qassmax-mlp-elementwise",
    "ff_factor": 2,
    "dropout": 0.0,
    "activation": "gelu",
    "norm_first": True,
    "bias_free_ln": False,
    "zero_init": True,
}
# A regressor has no classes, and LayerNorms without bias, as TabICL v2's has.
REGRESSION = {"max_classes": 0, "num_quantiles": QUANTILES, "bias_free_ln": True}
WARM_UP_STEPS = 100
LAST_RATE = 0.02  # of the peak learning rate
LARGEST_GRADIENT = 5.0
STEPS_PER_REPORT = 200
VALIDATION_SHARDS = 2
VALIDATION_BATCHES = 32


@dataclass(frozen=True)
class Plan:
    """What one training run is asked to do."""

    regression: bool
    pool: Path
    out: Path
    init: Path | None
    cpu_minutes: float
    wall_minutes: float
    peak_rate: float
    cheap_share: float
    seed: int


@dataclass(frozen=True)
class Progress:
    """One line of the training log; the losses are cross entropy or pinball loss."""

    step: int
    cpu_s: float
    wall_s: float
    tables: int
    train_loss: float | None
    validation_loss: float
    validation_accuracy: float | None


class Clock:
    """The CPU and wall time a run has spent; whichever limit is nearer says how far it is."""

    def __init__(self, plan: Plan) -> None:
        self.limits_s = (plan.cpu_minutes * 60, plan.wall_minutes * 60)
        self.starts = (time.process_time(), time.monotonic())

    def spent(self) -> tuple[float, float]:
        return time.process_time() - self.starts[0], time.monotonic() - self.starts[1]

    def share_done(self) -> float:
        return max(spent / limit for spent, limit in zip(self.spent(), self.limits_s, strict=True))


def architecture(regression: bool) -> dict[str, Any]:
    return ARCHITECTURE | (REGRESSION if regression else {})


def build_model(plan: Plan) -> TabICL:
    model = TabICL(**architecture(plan.regression)).train()
    if plan.init is not None:
        model.load_state_dict(torch.load(plan.init, weights_only=True)["state_dict"])
    return model


def build_optimiser(model: TabICL, peak_rate: float) -> Muon:
    """Muon for the matrices inside the transformer blocks, its AdamW for all other parameters."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        inside = "tf_" in name and parameter.ndim >= 2 and min(parameter.shape) >= 16
        (matrices if inside else others).append(parameter)
    groups = [
        {"params": matrices, "use_muon": True, "lr": peak_rate},
        {"params": others, "use_muon": False, "lr": peak_rate},
    ]
    return Muon(
        groups,
        lr=peak_rate,
        weight_decay=0.01,
        momentum=0.95,
        matched_adamw_rms=0.2,
        adamw_betas=(0.9, 0.98),
    )


def read_pool(folder: Path) -> tuple[list[Table], list[Table]]:
    """The tables to train on, and those of the first shards, kept for validation."""
    shards = sorted(folder.glob("shard-*.pt"))
    if len(shards) <= VALIDATION_SHARDS:
        raise SystemExit(f"{folder} holds {len(shards)} shards; run prior.py for longer")
    held_out = [table for shard in shards[:VALIDATION_SHARDS] for table in read_shard(shard)]
    pool = [table for shard in shards[VALIDATION_SHARDS:] for table in read_shard(shard)]
    return pool, held_out


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draws from a seed of its own inside, and goes on as if nothing had been drawn after."""
    plain, tensor = random.getstate(), torch.get_rng_state()
    random.seed(seed)
    torch.manual_seed(seed)
    yield
    random.setstate(plain)
    torch.set_rng_state(tensor)


def pinball(output: Tensor, target: Tensor) -> Tensor:
    levels = torch.linspace(0, 1, QUANTILES + 2)[1:-1]
    error = target[..., None] - output
    return torch.maximum(levels * error, (levels - 1) * error).mean()


def loss_and_accuracy(model: TabICL, batch: Batch, regression: bool) -> tuple[Tensor, float | None]:
    """Cross entropy and accuracy, or pinball loss and no accuracy, over the rows to predict."""
    output = model(batch.features, batch.target[:, : batch.context_rows])
    asked = batch.target[:, batch.context_rows :]
    if regression:
        return pinball(output, asked), None
    logits, classes = output.flatten(0, 1), asked.long().flatten()
    accuracy = (logits.argmax(1) == classes).float().mean().item()
    return functional.cross_entropy(logits, classes), accuracy


@torch.no_grad()
def validate(model: TabICL, batches: list[Batch], regression: bool) -> tuple[float, float | None]:
    scores = [loss_and_accuracy(model, batch, regression) for batch in batches]
    accuracies = [accuracy for _, accuracy in scores if accuracy is not None]
    return mean([loss.item() for loss, _ in scores]), mean(accuracies) if accuracies else None


def learning_rate(peak: float, step: int, done: float) -> float:
    """A short linear warm-up, then a cosine over the share of the time that is `done`."""
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return peak * min(1.0, (step + 1) / WARM_UP_STEPS) * (LAST_RATE + (1 - LAST_RATE) * cosine)


def take_step(model: TabICL, optimiser: Muon, batch: Batch, rate: float, regression: bool) -> float:
    """One update; a batch whose gradient is not finite is passed over."""
    for group in optimiser.param_groups:
        group["lr"] = rate
    model.zero_grad(set_to_none=True)
    loss, _ = loss_and_accuracy(model, batch, regression)
    torch.autograd.backward(loss)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
    if bool(torch.isfinite(norm)):
        optimiser.step()
    return loss.item()


def save(model: TabICL, plan: Plan) -> None:
    """TabICL's checkpoint format: its keyword arguments and the weights, which `weights_only=True` reads."""
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    torch.save({"config": architecture(plan.regression), "state_dict": weights}, plan.out)


def train(plan: Plan) -> Iterator[Progress]:
    """Trains until the time is spent; yields at the start, every 200 steps and at the end, once saved."""
    seed_everything(plan.seed)
    model = build_model(plan)
    optimiser = build_optimiser(model, plan.peak_rate)
    pool, held_out = read_pool(plan.pool)
    with seeded(123):
        fixed = [draw_batch(held_out, plan.regression, 0.0) for _ in range(VALIDATION_BATCHES)]
    clock = Clock(plan)
    step, tables = 0, 0
    losses: list[float] = []

    def report() -> Progress:
        cpu_s, wall_s = clock.spent()
        train_loss = mean(losses) if losses else None
        losses.clear()
        return Progress(step, cpu_s, wall_s, tables, train_loss, *validate(model, fixed, plan.regression))

    yield report()
    while (done := clock.share_done()) < 1:
        batch = draw_batch(pool, plan.regression, plan.cheap_share)
        rate = learning_rate(plan.peak_rate, step, done)
        losses.append(take_step(model, optimiser, batch, rate, plan.regression))
        step += 1
        tables += len(batch.features)
        if step % STEPS_PER_REPORT == 0:
            yield report()
    save(model, plan)
    yield report()


def parse_plan() -> Plan:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--task", choices=("classification", "regression"), required=True)
    parser.add_argument("--pool", type=Path, required=True, help="the folder that prior.py wrote")
    parser.add_argument(
        "--out", type=Path, required=True, help="the checkpoint; its log is beside it, .jsonl"
    )
    parser.add_argument("--init", type=Path, help="go on from this checkpoint")
    parser.add_argument("--cpu-minutes", type=float, default=45.0)
    parser.add_argument("--wall-minutes", type=float, default=math.inf, help="stop here on a busy machine")
    parser.add_argument("--lr", type=float, default=3e-3, help="the peak learning rate; 1e-3 with --init")
    parser.add_argument("--cheap-share", type=float, default=0.4, help="batches from the cheap prior")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    return Plan(
        regression=given.task == "regression",
        pool=given.pool,
        out=given.out,
        init=given.init,
        cpu_minutes=given.cpu_minutes,
        wall_minutes=given.wall_minutes,
        peak_rate=given.lr,
        cheap_share=given.cheap_share,
        seed=given.seed,
    )


def main() -> None:
    plan = parse_plan()
    torch.set_num_threads(1)
    plan.out.parent.mkdir(parents=True, exist_ok=True)
    with plan.out.with_suffix(".jsonl").open("w") as log:
        for progress in train(plan):
            line = json.dumps(asdict(progress))
            print(line, flush=True)
            print(line, file=log, flush=True)


if __name__ == "__main__":
    main()
