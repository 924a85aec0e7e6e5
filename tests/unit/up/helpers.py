"""Start the supervising program, and look at what is alive."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SUPERVISE = Path(__file__).with_name("supervise.py")


def until(true: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for a condition."""
    ends = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < ends, "it did not come true in time"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie, which a container without an init may keep, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Supervised:
    """The supervising program as a process; `with` makes sure of its end."""

    def __init__(self, folder: Path, *children: dict[str, Any], **options: Any) -> None:
        self.folder = folder
        asked = json.dumps({"children": children, **options})
        self._log = (folder / "supervisor.log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, str(SUPERVISE), asked], stdout=subprocess.PIPE, stderr=self._log, cwd=folder
        )

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"all ready\n", self.log

    @property
    def log(self) -> str:
        return (self.folder / "supervisor.log").read_text()

    def pids(self, name: str) -> list[int]:
        """The processes that children noted in the file `name`."""
        file = self.folder / name
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, float]:
        """Signal it; its status, and the seconds that it took to end."""
        began = time.monotonic()
        self.process.send_signal(number)
        status = self.process.wait(20)
        return status, time.monotonic() - began

    def __enter__(self) -> Supervised:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()


def noting(name: str, then: str) -> str:
    """A child's code: append its id to the file `name`, then go on."""
    return f"import os, sys, time, signal, pathlib\nopen({name!r}, 'a').write(f'{{os.getpid()}}\\n')\n{then}"


def stopping(name: str) -> str:
    """A child's code that notes its polite end in the file `stopped`."""
    note = f"signal.signal(signal.SIGTERM, lambda *_: (open('stopped', 'a').write({name + ' '!r}), sys.exit(0)))\n"
    return noting(name, note + f"pathlib.Path({name + '.ready'!r}).touch()\ntime.sleep(600)")


def group_pids(group: int) -> list[int]:
    """The live members of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and alive(int(entry.name)):
            try:
                if os.getpgid(int(entry.name)) == group:
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
    return found
