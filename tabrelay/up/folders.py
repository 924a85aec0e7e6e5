"""The stack's folders, and the lock that keeps two stacks out of one data folder."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tabrelay.up.errors import CannotStart

#: How long the processes of a killed stack are waited for; its guard ends them within 5 s.
LEFTOVERS_S = 15.0


def private_folder(path: Path) -> Path:
    """Make sure of a folder that is ours and closed to others; it may stand in a shared place such as /tmp."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise CannotStart(f"{path} is not a folder of this user")
        path.chmod(0o700)
    except OSError as error:
        raise CannotStart(f"{path} can't be used: {error.strerror}") from error
    return path


def data_folder(path: Path) -> Path:
    """Make the data folder, 0700; one that is there already keeps its mode, since others may work in it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CannotStart(f"{path} can't be used: {error.strerror}") from error
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise CannotStart(f"{path} can't be used: it is not writable")
    return path


def write_private(path: Path, text: str) -> None:
    """Write a file that nobody else may read, all of it or nothing."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, 0o600)
        file.write(text)
        file.flush()
        os.fsync(descriptor)
    beside.rename(path)


@contextmanager
def locked(data: Path, say: Callable[[str], None]) -> Iterator[int]:
    """Hold the data folder; gives a descriptor for the children to inherit.

    Two locks: `lock` is the supervisor's alone and names its process; `children.lock` ends with the last process
    that inherited it, so that a stack which was killed and started again at once never has two Redis servers
    writing one log.
    """
    descriptor = os.open(data / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not _taken(descriptor):
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise CannotStart(
                f"another tabrelay up (process {holder}) runs on {data}; stop it or choose another --data-dir"
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        children = os.open(data / "children.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _wait_for_leftovers(children, data, say)
            yield children
        finally:
            os.close(children)
    finally:
        os.close(descriptor)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for_leftovers(descriptor: int, data: Path, say: Callable[[str], None]) -> None:
    if _taken(descriptor):
        return
    say("waiting for the processes of an earlier run to end")
    ends = time.monotonic() + LEFTOVERS_S
    while not _taken(descriptor):
        if time.monotonic() >= ends:
            raise CannotStart(
                f"processes of an earlier run still use {data}; `fuser {data}/children.lock` names them"
            )
        time.sleep(0.1)
