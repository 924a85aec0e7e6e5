"""`python -m tests.models.other_process JOBS.json TOLD.json`: answer from contexts that another process fitted.

JOBS is a list of `{"version", "task", "checkpoints", "data", "digest", "rows": Arrow file, "out": .npz}`. TOLD gets what
was reached for over the network, which is refused, and tabpfn's settings.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

reached: list[str] = []


def refuse(event: str, arguments: Any) -> None:
    """Note and stop whoever looks for a host."""
    if event in ("socket.connect", "socket.getaddrinfo", "webbrowser.open"):
        reached.append(f"{event} {arguments}")
        raise OSError("nothing is to be reached")


def main(jobs: Path, told: Path) -> None:
    sys.addaudithook(refuse)
    import numpy as np
    import pyarrow as pa
    import torch

    from common.models.tabpfn.adapter import ADAPTER
    from common.tables.schema import TableSchema
    from common.tables.target import Target
    from tests.models import fitting

    torch.set_num_threads(1)
    for job in json.loads(jobs.read_text()):
        backbone = ADAPTER.load(fitting.weights(Path(job["checkpoints"]), job["version"], job["task"]), "cpu")
        mapped = fitting.stored(Path(job["data"])).open("default", job["digest"])
        target = Target.decode(mapped.manifest.target)
        predictor = ADAPTER.thaw(mapped.tensors, mapped.manifest.state, backbone, target)
        with pa.ipc.open_file(job["rows"]) as reader:
            rows = TableSchema.decode(mapped.manifest.schema).features(reader.read_all())
        np.savez(job["out"], *fitting.both_sizes(predictor, rows, job["task"]))
    from tabpfn.settings import settings  # not before the adapter, which fixes them

    fitting.fit(Path(job["data"]), backbone.weights, fitting.table(job["task"], "mixed"))
    told.write_text(json.dumps({"reached": reached, "settings": settings.tabpfn.model_dump(mode="json")}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
