"""What TabPFN takes from its process: fixed settings, and memory for each context's own bytes and one module."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from common.models.tabpfn.environment import FIXED
from tests.models import fitting

ROOT = Path(__file__).parents[2]


def test_every_setting_of_the_library_is_fixed() -> None:
    from tabpfn.settings import TabPFNSettings

    names = {f"TABPFN_{name.upper()}" for name in TabPFNSettings.model_fields}
    assert names <= FIXED.keys() | {"TABPFN_MODEL_CACHE_DIR"}


SHARED = """
import gc, json, sys
from pathlib import Path
import common.models.tabpfn
import torch
from common.contexts.reader import open_context
from common.models.protocol import PredictOptions
from common.models.tabpfn.adapter import ADAPTER
from common.tables.target import Target
from tests.models import fitting

def resident():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

torch.set_num_threads(1)
paths, digest, rows = json.loads(sys.argv[2]), sys.argv[3], fitting.table("classification", "numeric").features.take(slice(0, 8))

def thaw(path):
    mapped = open_context(Path(path), digest, "disk")
    backbone = ADAPTER.load(fitting.weights(Path(sys.argv[1]), "v2", "classification"), "cpu")
    predictor = ADAPTER.thaw(mapped.tensors, mapped.manifest.state, backbone, Target.decode(mapped.manifest.target))
    predictor.predict(rows, PredictOptions())
    return predictor, backbone

first = thaw(paths[0])  # what the library and torch keep for themselves, once
before = resident()
held = [thaw(path) for path in paths[1:]]
print(json.dumps({"grown": resident() - before, "own": sum(p.nbytes for p, _ in held), "module": first[1].nbytes}))
"""


@pytest.mark.slow
def test_twenty_contexts_cost_their_own_bytes_and_one_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.models import checkpoints

    # As large as the real v2: 29 MB of weights, 6 MB a context.
    monkeypatch.setitem(checkpoints.SIZES, "v2", {})
    folder = tmp_path / "checkpoints"
    weights = fitting.weights(folder, "v2", "classification")
    fitted = fitting.fit(tmp_path, weights, fitting.table("classification", "numeric"), n_estimators=2)
    paths = []
    for at in range(21):  # each its own file, so its own pages
        paths.append(str(tmp_path / f"copy-{at}"))
        Path(paths[-1]).write_bytes(fitted.path.read_bytes())
    command = [sys.executable, "-c", SHARED, str(folder), json.dumps(paths), fitted.digest]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["module"] > 25e6
    # Twenty contexts beside the first one, and no second module.
    assert told["grown"] <= told["own"] * 1.1, told
    assert told["grown"] >= told["own"] * 0.9, told
