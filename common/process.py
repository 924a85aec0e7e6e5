"""What every process of a stack needs: an end together with its parent, and addresses.

Run as a program, it is the wrapper and the guard that the supervisor uses; both import the standard library
only, so that they start in a few milliseconds and stay small:

    python -m common.process [--parent=PID] COMMAND ARGUMENT...    die_with_parent, then become COMMAND
    python -m common.process --guard [SECONDS]                     read process groups, end them at end of input
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

#: A process that ends with this status (sysexits' EX_CONFIG) says that another start can't help.
CONFIGURATION_EXIT = 78
#: How long the guard lets processes end by themselves after their supervisor was killed.
GUARD_GRACE_S = 4.0

_PR_SET_PDEATHSIG = 1
#: sockaddr_un holds 108 bytes, the last of them zero.
_UNIX_PATH_BYTES = 107


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel send SIGTERM to this process when its parent ends; nothing where there is no prctl.

    Give the `parent`'s id when it could have ended before this call. The kernel watches the parent's *thread*,
    so parents start such children from a thread that lives as long as they do. It lasts through exec.
    """
    if sys.platform != "linux":
        return
    expected = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != expected:
        os.kill(os.getpid(), signal.SIGTERM)


def tied(command: Sequence[str]) -> list[str]:
    """The command, wrapped so that it ends with this process; start it from a thread that lives as long."""
    return [sys.executable, "-I", "-S", __file__, f"--parent={os.getpid()}", *command]


@dataclass(frozen=True)
class Bind:
    """Where a server listens: a Unix socket's path, or a host and a port."""

    path: str | None = None
    host: str = ""
    port: int = 0

    @property
    def is_unix(self) -> bool:
        """Whether it is a Unix socket."""
        return self.path is not None

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_bind(text: str) -> Bind:
    """Read `unix:/path`, `host:port` or `[v6-address]:port`; ValueError says what is wrong with anything else."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path.startswith("/"):
            raise ValueError(f"{text!r}: a Unix socket's path is absolute")
        if len(os.fsencode(path)) > _UNIX_PATH_BYTES:
            raise ValueError(f"{text!r}: a Unix socket's path holds at most {_UNIX_PATH_BYTES} bytes")
        return Bind(path=path)
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"{text!r} is neither unix:/path nor host:port")
    return Bind(host=host, port=int(port))


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def guard(source: int, grace_s: float = GUARD_GRACE_S) -> None:
    """Follow `+GROUP` and `-GROUP` lines; when they end, nothing of the groups still listed outlives `grace_s`.

    A supervisor that is killed closes its end of the pipe without a word. The kernel's SIGTERM reaches its
    children, but not what they started, and a process that hangs in its own shutdown ignores it.
    """
    groups: set[int] = set()
    rest = b""
    while data := os.read(source, 65536):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            change = groups.add if line.startswith(b"+") else groups.discard
            change(int(line[1:]))
    if sys.platform != "linux":
        for group in groups:
            _signal_group(group, signal.SIGTERM)
    ends = time.monotonic() + grace_s
    while groups := {group for group in groups if _group_lives(group)}:
        if time.monotonic() >= ends:
            for group in groups:
                _signal_group(group, signal.SIGKILL)
            return
        select.select([], [], [], 0.05)


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return


def main(arguments: list[str]) -> int:
    """Be the guard, or become the command."""
    if arguments and arguments[0] == "--guard":
        guard(0, float(arguments[1]) if len(arguments) > 1 else GUARD_GRACE_S)
        return 0
    parent = None
    if arguments and arguments[0].startswith("--parent="):
        parent = int(arguments.pop(0).removeprefix("--parent="))
    if not arguments:
        print("usage: python -m common.process [--parent=PID] COMMAND ARGUMENT...", file=sys.stderr)
        return 2
    die_with_parent(parent)
    try:
        os.execvp(arguments[0], arguments)  # noqa: S606  (no shell is what is wanted)
    except OSError as error:
        print(f"{arguments[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
