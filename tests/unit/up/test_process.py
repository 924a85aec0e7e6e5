"""common.process: addresses, and processes that end with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common import process
from common.process import Bind, parse_bind
from tests.unit.up.helpers import alive, until


@pytest.mark.parametrize(
    ("text", "bind"),
    [
        ("unix:/run/a b.sock", Bind(path="/run/a b.sock")),
        ("127.0.0.1:8000", Bind(host="127.0.0.1", port=8000)),
        ("localhost:0", Bind(host="localhost", port=0)),
        ("[::1]:8000", Bind(host="::1", port=8000)),
    ],
)
def test_bind_is_read_and_written_alike(text: str, bind: Bind) -> None:
    assert parse_bind(text) == bind
    assert str(bind) == text
    assert bind.is_unix == text.startswith("unix:")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8000",
        ":8000",
        "host:",
        "host:x",
        "host:-1",
        "host:65536",
        "::1:8000",
        "unix:a.sock",
        "unix:/" + "a" * 107,
    ],
)
def test_bind_that_can_not_be_used_is_refused_in_words(text: str) -> None:
    with pytest.raises(ValueError, match=r"unix|host"):
        parse_bind(text)


def _parent_of(child: list[str], before: str = "") -> subprocess.Popen[bytes]:
    """A process that starts `child` tied to itself, prints its id and sleeps."""
    code = (
        f"import subprocess, time\nfrom common import process\n{before}\n"
        f"print(subprocess.Popen(process.tied({child!r})).pid, flush=True)\ntime.sleep(600)"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)


def test_tied_command_ends_when_its_parent_is_killed() -> None:
    with _parent_of(["sleep", "600"]) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        until(lambda: Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep"))
        parent.kill()
        until(lambda: not alive(pid), 3)


def test_command_whose_parent_is_gone_already_ends_at_once() -> None:
    started = subprocess.run(
        [sys.executable, process.__file__, "--parent=1", "sleep", "600"], timeout=10, check=False
    )
    assert started.returncode == -signal.SIGTERM


def test_wrapper_becomes_the_command_and_says_when_there_is_none() -> None:
    done = subprocess.run(
        process.tied(["sh", "-c", "echo $0 $1; exit 5", "a", "b"]), capture_output=True, check=False
    )
    assert (done.stdout, done.returncode) == (b"a b\n", 5)
    missing = subprocess.run(process.tied(["/no/such/program"]), capture_output=True, text=True, check=False)
    assert (missing.returncode, missing.stderr) == (127, "/no/such/program: No such file or directory\n")


def test_guard_ends_only_the_groups_that_were_left() -> None:
    ignoring = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    left, let_go = (
        subprocess.Popen([sys.executable, "-c", ignoring], stdout=subprocess.PIPE, start_new_session=True)
        for _ in range(2)
    )
    with left, let_go:
        assert left.stdout is not None
        assert let_go.stdout is not None
        left.stdout.readline()
        let_go.stdout.readline()
        guard = subprocess.Popen([sys.executable, process.__file__, "--guard", "0.5"], stdin=subprocess.PIPE)
        began = time.monotonic()
        guard.communicate(f"+{left.pid}\n+{let_go.pid}\n-{let_go.pid}\n".encode())
        assert time.monotonic() - began < 5
        assert left.wait(5) == -signal.SIGKILL
        assert alive(let_go.pid)
        let_go.kill()


def test_guard_ends_at_once_when_nothing_was_left() -> None:
    done = subprocess.run(
        [sys.executable, process.__file__, "--guard", "60"], input=b"+1\n-1\n", timeout=10, check=False
    )
    assert done.returncode == 0


def test_wrapper_and_guard_need_the_standard_library_only() -> None:
    """They run isolated, whatever stands in the folder and the environment of whoever starts the stack."""
    environ = {**os.environ, "PYTHONPATH": "/nowhere", "PYTHONSTARTUP": "/nowhere"}
    done = subprocess.run(process.tied(["true"]), env=environ, cwd="/", check=False)
    assert done.returncode == 0
