"""A program that supervises the children described in its argument; the tests start and signal it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tabrelay.up.children import Child, Restart, Supervisor
from tabrelay.up.output import Output


def _child(given: dict[str, Any]) -> Child:
    file = given.pop("ready_file", None)
    code = given.pop("code")
    restart = Restart(**given.pop("restart", {}))
    return Child(
        argv=[sys.executable, "-c", code],
        environ=dict(os.environ),
        ready=Path(file).exists if file else lambda: True,
        restart=restart,
        **given,
    )


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    supervisor = Supervisor(
        [_child(child) for child in asked["children"]],
        output=Output(),
        on_ready=lambda: print("all ready", flush=True),
        grace_s=asked.get("grace_s", 8.0),
    )
    sys.exit(supervisor.run())
