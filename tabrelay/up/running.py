"""One supervised child: its specification, its present process, its output and when it is due again."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from common import process
from tabrelay.up.output import Lines, Output

#: How often a child that is starting is asked whether it is ready.
PROBE_EVERY_S = 0.05
_READ_BYTES = 65536
#: What is read at most after a process ended, 1 MiB.
_LAST_READS = 16


@dataclass(frozen=True)
class Restart:
    """When a child that ended is started again."""

    first_s: float = 0.2
    longest_s: float = 5.0
    #: A child that lived this long starts at `first_s` again.
    reset_after_s: float = 30.0
    #: Ends during the stack's start-up that are put up with; one more stops the stack.
    ends_while_starting: int = 3

    def delay_s(self, ends_in_a_row: int) -> float:
        """How long to wait after the given number of ends."""
        return min(self.longest_s, self.first_s * 2.0 ** min(ends_in_a_row - 1, 30))


@dataclass(frozen=True)
class Child:
    """What to run, and how to tell that it is ready.

    Children of one stage start together, after all of the stage before are ready; they stop in reverse.
    """

    name: str
    argv: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    ready: Callable[[], bool] = lambda: True
    stage: int = 0
    ready_timeout_s: float = 120.0
    restart: Restart = Restart()


class Running:
    """A child's present state; the supervisor's thread alone calls it."""

    def __init__(self, child: Child, output: Output, wake: Callable[[], None]) -> None:
        self.child = child
        self.process: subprocess.Popen[bytes] | None = None
        self.due_at: float | None = None
        self.ends_while_starting = 0
        self.last_end = ""
        self.gave_up = False
        self.first_started_at = 0.0
        self._started_at = 0.0
        self._ends_in_a_row = 0
        self._output = output
        self._lines = Lines()
        self._wake = wake
        self._ready = threading.Event()
        self._closing = threading.Event()
        output.register(child.name)

    @property
    def is_ready(self) -> bool:
        """Whether it has ever been ready."""
        return self._ready.is_set()

    def start(self, pass_fds: Sequence[int]) -> None:
        """Start the process, in a session of its own so that a terminal's Ctrl-C does not reach it."""
        self.due_at = None
        self._started_at = time.monotonic()
        if not self.first_started_at:
            self.first_started_at = self._started_at
            threading.Thread(target=self._probe, name=f"ready-{self.child.name}", daemon=True).start()
        try:
            self.process = subprocess.Popen(
                process.tied(self.child.argv),
                env=dict(self.child.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=tuple(pass_fds),
            )
        except OSError as error:
            self._ended(f"could not be started: {error}")
            return
        os.set_blocking(self.descriptor, False)

    @property
    def descriptor(self) -> int:
        """The read end of the process's output."""
        if self.process is None or self.process.stdout is None:
            raise RuntimeError(f"{self.child.name} is not running")
        return self.process.stdout.fileno()

    def read(self) -> bool:
        """Pass on what was written; False at the output's end."""
        try:
            data = os.read(self.descriptor, _READ_BYTES)
        except BlockingIOError:
            return True
        for line in self._lines.feed(data):
            self._output.line(self.child.name, line)
        return bool(data)

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self.process is not None and self.process.poll() is not None

    def bury(self) -> None:
        """After the end: end what the process left behind, read its last lines, plan the next start."""
        if self.process is None or self.process.stdout is None:
            return
        # A server's leftovers would hold its port. The kernel does not give a group's number to a new process
        # while the group has members.
        self.signal(signal.SIGKILL)
        for _ in range(_LAST_READS):
            if not select.select([self.descriptor], [], [], 0)[0] or not self.read():
                break
        for line in self._lines.end():
            self._output.line(self.child.name, line)
        self.process.stdout.close()
        status = self.process.returncode
        self.process = None
        self.gave_up = status == process.CONFIGURATION_EXIT
        self._ended(f"ended by {_signal_name(-status)}" if status < 0 else f"ended with status {status}")

    def _ended(self, how: str) -> None:
        now = time.monotonic()
        self.last_end = how
        self.ends_while_starting += 1
        lived_long = now - self._started_at >= self.child.restart.reset_after_s
        self._ends_in_a_row = 1 if lived_long else self._ends_in_a_row + 1
        self.due_at = now + self.child.restart.delay_s(self._ends_in_a_row)

    def terminate(self) -> None:
        """Ask the process to end; what it started itself is its own to end."""
        self.close()
        if self.process is not None:
            self.process.terminate()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and everything in its group."""
        if self.process is not None:
            try:
                os.killpg(self.process.pid, number)
            except (ProcessLookupError, PermissionError):
                return

    def close(self) -> None:
        """Ask no more whether it is ready, and do not start it again."""
        self._closing.set()
        self.due_at = None

    def _probe(self) -> None:
        while not self._closing.is_set():
            if self.child.ready():
                self._ready.set()
                self._wake()
                return
            self._closing.wait(PROBE_EVERY_S)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
