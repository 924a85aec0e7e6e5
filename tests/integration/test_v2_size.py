"""Weights of TabICL v2's real size, random: 1,000 x 20 through the whole stack."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tabrelay.up.embedded import Stack
from tests.integration.oracle import Oracle
from tests.support import Service, children_of, numeric

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "classification": "tabicl-classifier-v2-20260212.ckpt",
    "regression": "tabicl-regressor-v2-20260212.ckpt",
}


def peak_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return round(int(status.split("VmHWM:")[1].split()[0]) / 1024, 1)


def test_a_model_of_v2_s_size_fits_and_answers_as_the_library(
    private_stack: Callable[..., Stack], oracle: Oracle, tmp_path: Path
) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    for task, name in FILES.items():
        script = ROOT / "checkpoints" / "recipe" / "random_checkpoint.py"
        made = [sys.executable, str(script), "--size", "v2", "--task", task, "--out", str(weights / name)]
        subprocess.run(made, check=True, cwd=ROOT)
    stack = private_stack(models=(f"tabicl-v2={weights}",))
    table = numeric(rows=1000, columns=20)
    rows = table.drop_columns(["y"])
    sizes = (1, 4, 20)
    with Service(stack.url) as service:
        job = service.end_of(service.submit(table, "v2").json()["id"], 600)
        assert (job["state"], job["model"]) == ("succeeded", "tabicl-v2"), job
        answers = [service.predict("v2", rows.slice(0, size)) for size in sizes]
        warm = [service.predict("v2", rows.slice(0, 1))["timings_ms"]["total"] for _ in range(10)]
        peaks = {
            command.split("-m ")[-1].split()[0]: peak_mib(pid)
            for pid, command in children_of(stack.pid).items()
            if " -m " in command
        }
    slices = [slice(0, size) for size in sizes]
    expected = oracle.ask(table, "y", "classification", slices, checkpoint=weights / FILES["classification"])
    for size, answer, wanted in zip(sizes, answers, expected, strict=True):
        assert np.array_equal(answer["probabilities"], wanted["probabilities"]), f"{size} rows"
    measured = {
        "fit_ms": job["timings_ms"],
        "context_bytes": job["context_bytes"],
        "warm_1_row_ms": sorted(warm)[len(warm) // 2],
        "peak_mib": peaks,
    }
    (tmp_path / "v2.json").write_text(json.dumps(measured))
    print(json.dumps(measured))
