"""The README as written: its commands run, and end with answers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tabrelay.up.embedded import Stack
from tests.support import Service

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
URL = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def run(command: str, folder: Path, url: str) -> str:
    """A shell command of the README, its address replaced, in a folder that has the customers' files."""
    text = command.replace(URL, url).replace(".venv/bin/tabrelay", f"{sys.executable} -m tabrelay")
    done = subprocess.run(
        ["sh", "-ec", text],
        cwd=folder,
        env={**os.environ, "TABRELAY_URL": url, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the examples, as the repository's root has them."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    return tmp_path


def test_the_python_example_predicts(stack: Stack, folder: Path) -> None:
    (example,) = blocks("python")
    (folder / "example.py").write_text(example.replace(URL, stack.url))
    printed = run(f"{sys.executable} example.py", folder, stack.url)
    assert "churned" not in printed.splitlines()[0]
    assert printed.strip()


def test_the_command_line_example_predicts(stack: Stack, folder: Path) -> None:
    example = next(block for block in blocks("sh") if "tabrelay fit" in block)
    run(example, folder, stack.url)
    lines = (folder / "scored.csv").read_text().splitlines()
    assert len(lines) == 21
    assert "prediction" in lines[0]


def test_the_curl_example_predicts(stack: Stack, folder: Path) -> None:
    example = next(block for block in blocks("sh") if "curl -F" in block)
    fit, poll, predict = re.split(r"\n(?=curl)", example.strip())
    job = json.loads(run(fit.replace("curl", "curl -s", 1), folder, stack.url))
    with Service(stack.url) as service:
        assert service.end_of(job["id"])["state"] == "succeeded"
    polled = json.loads(
        run(poll.replace("curl", "curl -s", 1).replace("JOB_ID", job["id"]), folder, stack.url)
    )
    assert polled["state"] == "succeeded"
    answer = json.loads(run(predict.replace("curl", "curl -s", 1), folder, stack.url))
    assert len(answer["predictions"]) == 1
    assert sum(answer["probabilities"][0]) == pytest.approx(1)


def test_every_listing_has_a_json_form(stack: Stack, folder: Path) -> None:
    for command in ("jobs", "datasets", "models", "limits", "workers"):
        json.loads(run(f".venv/bin/tabrelay {command} --json", folder, stack.url))


def test_an_error_is_one_line_and_a_status(stack: Stack, folder: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tabrelay",
            "--url",
            stack.url,
            "predict",
            "never-fitted",
            "examples/new_customers.csv",
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "never-fitted" in done.stderr
    assert done.stdout == ""


def test_the_demo_beats_its_baselines_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tabrelay", "demo"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("good") == 4
    assert "/v1/datasets/churn/predict" in done.stdout
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("tabrelay-")] == []


def test_the_makefile_has_what_the_readme_names() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", README)) <= targets
    assert {"help", "setup", "demo", "up", "test", "slow", "check", "fix"} <= targets
