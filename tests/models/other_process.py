"""`python -m tests.models.other_process JOBS.json`: answer from contexts that another process fitted.

JOBS is a list of `{"version", "task", "checkpoints", "data", "digest", "rows": Arrow file, "out": .npz}`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

import common.models.tabpfn  # noqa: F401  (fixes what tabpfn reads at import)
from common.models.tabpfn.adapter import ADAPTER
from common.tables.schema import TableSchema
from common.tables.target import Target
from tests.models import fitting


def main(jobs: Path) -> None:
    torch.set_num_threads(1)
    for job in json.loads(jobs.read_text()):
        backbone = ADAPTER.load(fitting.weights(Path(job["checkpoints"]), job["version"], job["task"]), "cpu")
        mapped = fitting.stored(Path(job["data"])).open("default", job["digest"])
        target = Target.decode(mapped.manifest.target)
        predictor = ADAPTER.thaw(mapped.tensors, mapped.manifest.state, backbone, target)
        with pa.ipc.open_file(job["rows"]) as reader:
            rows = TableSchema.decode(mapped.manifest.schema).features(reader.read_all())
        np.savez(job["out"], *fitting.both_sizes(predictor, rows, job["task"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
