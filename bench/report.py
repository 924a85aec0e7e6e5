"""What every measurement records of itself."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

RESULTS = Path(__file__).parent / "results"


def report(module: str, name: str, measured: Mapping[str, Any]) -> None:
    """Write `bench/results/<name>.json` with command, machine and commit, and print it."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    result = {
        "command": f"python -m {module} {' '.join(sys.argv[1:])}".strip(),
        "machine": f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}",
        "commit": commit,
        **measured,
    }
    RESULTS.mkdir(exist_ok=True)
    text = orjson.dumps(result, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS)
    (RESULTS / f"{name}.json").write_bytes(text + b"\n")
    print(text.decode())
