"""The lines that children write: kept for error reports, and passed on without ever waiting for a reader."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque

TAIL_LINES = 20
#: A longer line is cut into pieces, so that a child that never ends one can't fill the memory.
LONGEST_LINE_BYTES = 64 * 1024
#: Lines that wait for a slow reader of the log; later ones are counted and dropped.
WAITING_LINES = 10_000
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)


class Output:
    """Writes log lines to a file descriptor from a thread of its own, each after its writer's name."""

    def __init__(self, descriptor: int = 2, *, names: bool | None = None) -> None:
        """`names` decides whether lines carry their writer's name; None: always, in colour on a terminal."""
        self._descriptor = descriptor
        self._colour = os.isatty(descriptor)
        self._names = True if names is None else names
        self._width = 0
        self._colour_of: dict[str, int] = {}
        self._tails: dict[str, deque[bytes]] = {}
        self._waiting: queue.Queue[bytes] = queue.Queue(WAITING_LINES)
        self._dropped = 0
        threading.Thread(target=self._write, name="up-output", daemon=True).start()

    def register(self, name: str) -> None:
        """Announce a writer, so that all names are padded alike."""
        self._width = max(self._width, len(name))
        self._colour_of.setdefault(name, _COLOURS[len(self._colour_of) % len(_COLOURS)])

    def line(self, name: str, line: bytes) -> None:
        """Pass on one line of `name`; never waits."""
        self._tails.setdefault(name, deque(maxlen=TAIL_LINES)).append(line)
        if self._names:
            padded = name.ljust(self._width).encode()
            if self._colour:
                padded = b"\x1b[%dm%s\x1b[0m" % (self._colour_of.get(name, 37), padded)
            line = padded + b" | " + line
        try:
            self._waiting.put_nowait(line + b"\n")
        except queue.Full:
            self._dropped += 1

    def say(self, text: str) -> None:
        """A line of the supervisor itself."""
        self.line("up", text.encode(errors="replace"))

    def tail(self, name: str) -> list[str]:
        """The last lines that `name` wrote."""
        return [line.decode(errors="replace") for line in self._tails.get(name, ())]

    def flush(self, timeout_s: float = 1.0) -> None:
        """Wait until all lines are written, or a reader has kept them waiting for `timeout_s`."""
        ends = time.monotonic() + timeout_s
        while self._waiting.unfinished_tasks and time.monotonic() < ends:
            time.sleep(0.005)

    def _write(self) -> None:
        while True:
            data = self._waiting.get()
            if self._dropped:
                data = b"(%d lines dropped, the log's reader was too slow)\n" % self._dropped + data
                self._dropped = 0
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:  # nobody reads the log any more; the stack goes on
                pass
            self._waiting.task_done()


class Lines:
    """Cuts what comes out of one pipe into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        return [line.rstrip(b"\r") for line in lines]

    def end(self) -> list[bytes]:
        """The last line, if it was never ended."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []
