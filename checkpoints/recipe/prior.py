"""Draws a pool of synthetic tables from tabicl's own prior and writes it as shards.

    python checkpoints/recipe/prior.py --out /tmp/pool --tables 4000 --cpu-minutes 18

The prior costs 50 to 500 ms a table, far more than a training step of a small model, so `train.py` draws
each table many times (other rows, other columns, another target) from a pool written once.
No real table enters the pool.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

SHARD_TABLES = 32
# Rows to a pool table: more than the longest training table, so that two draws of one table differ.
ROWS = 640
MAX_COLUMNS = 48
# The graph prior is what TabICL v2 was trained on; the MLP prior adds variety and is about twice as fast.
GRAPH_SHARE = 0.8


@dataclass(frozen=True)
class Table:
    """One synthetic table; `numeric` says that the target is a number rather than a class id."""

    features: torch.Tensor
    target: torch.Tensor
    numeric: bool


def seed_everything(seed: int) -> None:
    """Seeds every generator that tabicl's prior and the training loop draw from."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def import_prior() -> tuple[Any, Any]:
    """tabicl's `PriorDataset` and `PriorConfig`, without installing xgboost.

    `tabicl.prior` imports xgboost at the top of its tree prior, the one prior that is not used here: a stub
    with the one name it looks up saves a dependency of hundreds of megabytes. It is never instantiated.
    """
    if "xgboost" not in sys.modules:
        stub = types.ModuleType("xgboost")
        stub.XGBRegressor = type("XGBRegressor", (), {})  # type: ignore[attr-defined]  # a module made by hand
        sys.modules["xgboost"] = stub
    from tabicl.prior import PriorDataset
    from tabicl.prior.graph_lib._config import PriorConfig

    return PriorDataset, PriorConfig


def build_sources() -> dict[tuple[bool, str], Any]:
    """One prior for each kind of target (numeric or not) and each kind of generator."""
    prior_dataset, prior_config = import_prior()
    sources: dict[tuple[bool, str], Any] = {}
    for numeric in (False, True):
        for kind in ("graph_scm", "mlp_scm"):
            graph = kind == "graph_scm"
            # Graphs whose target cannot be predicted from the columns teach nothing.
            extra = {"config": prior_config(filter_unpredictable_graphs=True)} if graph else {}
            sources[numeric, kind] = prior_dataset(
                regression=numeric,
                batch_size=1,
                batch_size_per_gp=1,
                min_features=4,
                max_features=MAX_COLUMNS,
                max_classes=10,
                max_seq_len=ROWS,
                min_train_size=0.3,
                max_train_size=0.9,
                prior_type=kind,
                n_jobs=1,
                log_n_features=graph,
                **extra,
            )
    return sources


def draw_tables() -> Iterator[Table | None]:
    """Tables without end; None stands for a draw that failed or held a value that is not finite."""
    sources = build_sources()
    while True:
        numeric = random.random() < 0.5
        kind = "graph_scm" if random.random() < GRAPH_SHARE else "mlp_scm"
        try:
            x, y, columns, _, _ = sources[numeric, kind].get_batch(1)
        except (ValueError, RuntimeError, IndexError) as error:
            # A random graph may be degenerate: no edge to the target, or a single class.
            print(f"a draw failed: {error!r:.100}", flush=True)
            yield None
            continue
        features = x[0, :, : int(columns[0])].float().clone()
        target = y[0].float().clone()
        usable = features.shape[1] >= 2 and bool(features.isfinite().all()) and bool(target.isfinite().all())
        yield Table(features, target, numeric) if usable else None


def write_shard(tables: list[Table], path: Path) -> None:
    """Writes tensors and flags only, and renames at the end, so that a trainer never sees half a shard."""
    partial = path.with_suffix(".partial")
    torch.save([(table.features, table.target, table.numeric) for table in tables], partial)
    os.replace(partial, path)


def read_shard(path: Path) -> list[Table]:
    return [Table(*entry) for entry in torch.load(path, weights_only=True)]


def write_pool(folder: Path, tables: int, cpu_minutes: float, seed: int) -> int:
    """Writes whole shards until `tables` are there or the CPU time is spent; returns how many there are."""
    folder.mkdir(parents=True, exist_ok=True)
    seed_everything(seed)
    shard: list[Table] = []
    written = 0
    for table in draw_tables():
        if table is not None:
            shard.append(table)
        if len(shard) == SHARD_TABLES:
            write_shard(shard, folder / f"shard-{seed}-{written // SHARD_TABLES:05d}.pt")
            written += len(shard)
            shard = []
            print(f"{written} tables, {time.process_time():.0f} CPU-s", flush=True)
        if written >= tables or time.process_time() >= cpu_minutes * 60:
            return written
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the shards; keep it out of git")
    parser.add_argument("--tables", type=int, default=4000)
    parser.add_argument("--cpu-minutes", type=float, default=20.0, help="stop here even with fewer tables")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    written = write_pool(arguments.out, arguments.tables, arguments.cpu_minutes, arguments.seed)
    print(f"{written} tables in {arguments.out}")


if __name__ == "__main__":
    main()
