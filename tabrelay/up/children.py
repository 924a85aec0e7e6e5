"""The supervisor: starts children stage by stage, keeps them running, passes their output on, stops them all.

One thread and one selector, so that nothing it does can wait for a child: ready checks and the writing of the
log have threads of their own.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from common import process
from tabrelay.up.output import Output
from tabrelay.up.running import Child, Restart, Running

__all__ = ["Child", "Restart", "Supervisor"]

#: What is left after this is killed; everything is over within 10 s.
GRACE_S = 8.0
#: How much of the grace the last stage has for itself, however long the others take.
LAST_STAGE_S = 1.0
#: Launchers pass a terminal's Ctrl-C on, so that it comes twice; a later one is meant.
SECOND_INTERRUPT_S = 0.3
_REAP_S = 1.0


class Supervisor:
    """Runs children until SIGINT, SIGTERM or SIGHUP; at most one per process, in the main thread."""

    def __init__(
        self,
        children: Sequence[Child],
        *,
        output: Output,
        on_ready: Callable[[], None] = lambda: None,
        pass_fds: Sequence[int] = (),
        grace_s: float = GRACE_S,
    ) -> None:
        """`on_ready` is called once, when all are ready; `pass_fds` stay open in every child."""
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._output = output
        self._running = [Running(child, output, self._wake) for child in children]
        self._on_ready = on_ready
        self._pass_fds = tuple(pass_fds)
        self._grace_s = grace_s
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._guard: subprocess.Popen[bytes] | None = None
        self._stop_asked_at: float | None = None
        self._kill_asked = False

    def run(self) -> int:
        """Start, supervise and stop; 0 after a signal, 1 when the children could not be started."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "the supervisor runs in the main thread; use tabrelay.up.embedded.Stack elsewhere"
            )
        with self._signals(), self._guarded():
            try:
                started = self._start()
                if started:
                    self._on_ready()
                    while self._stop_asked_at is None:
                        self._step()
            finally:
                self._stop()
        self._output.flush()
        return 0 if started else 1

    # Starting

    def _start(self) -> bool:
        """True when all are ready or a stop was asked for, False when it failed, with the reasons shown."""
        for stage in sorted({running.child.stage for running in self._running}):
            members = [running for running in self._running if running.child.stage == stage]
            for running in members:
                self._spawn(running)
            while not all(running.is_ready for running in members):
                self._step()
                if self._stop_asked_at is not None:
                    return True
                if self._failure_shown(members):
                    return False
        return True

    def _failure_shown(self, members: Sequence[Running]) -> bool:
        now = time.monotonic()
        for running in self._running:
            if running.gave_up or running.ends_while_starting > running.child.restart.ends_while_starting:
                times = "" if running.gave_up else f" {running.ends_while_starting} times"
                self._show_failure(running, f"{running.last_end}{times} while starting")
                return True
        for running in members:
            if not running.is_ready and now - running.first_started_at > running.child.ready_timeout_s:
                self._show_failure(running, f"was not ready within {running.child.ready_timeout_s:g} s")
                return True
        return False

    def _show_failure(self, running: Running, what: str) -> None:
        name = running.child.name
        tail = self._output.tail(name)
        self._output.say(f"{name} {what}; " + ("its last lines:" if tail else "it wrote nothing"))
        for line in tail:
            self._output.say(f"    {line}")

    def _spawn(self, running: Running) -> None:
        running.start(self._pass_fds)
        if running.process is not None:
            self._tell_guard("+", running.process.pid)
            self._selector.register(running.descriptor, selectors.EVENT_READ, running)

    # One turn

    def _step(self, longest_s: float = 1.0) -> None:
        """Wait for output, a signal, an end or a start that is due, and handle it."""
        now = time.monotonic()
        due = [running.due_at for running in self._running if running.due_at is not None]
        timeout = max(0.0, min([longest_s, *(at - now for at in due)]))
        for key, _ in self._selector.select(timeout):
            if isinstance(key.data, Running):
                if not key.data.read():
                    self._selector.unregister(key.fd)
            else:
                self._drain_wakes()
        self._reap()
        now = time.monotonic()
        for running in self._running:
            if running.due_at is not None and running.due_at <= now:
                self._spawn(running)

    def _reap(self) -> None:
        for running in self._running:
            if running.process is None or not running.has_ended():
                continue
            pid, descriptor = running.process.pid, running.descriptor
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
            running.bury()
            self._tell_guard("-", pid)
            if self._stop_asked_at is not None:
                running.close()
            elif running.due_at is not None:
                wait_s = running.due_at - time.monotonic()
                self._output.say(
                    f"{running.child.name} {running.last_end}; starting it again in {wait_s:.1f} s"
                )

    def _wake(self) -> None:
        try:
            self._wake_writer.send(b"\0")
        except OSError:  # full: a wake-up is under way; closed: nobody sleeps any more
            return

    def _drain_wakes(self) -> None:
        try:
            while self._wake_reader.recv(4096):
                pass
        except BlockingIOError:
            return

    # Stopping

    def _stop(self) -> None:
        """The last stage first; a stage that takes too long does not keep the next from being asked."""
        began = time.monotonic()
        if self._stop_asked_at is None:
            self._stop_asked_at = began
        for running in self._running:
            running.close()
        stages = sorted({running.child.stage for running in self._running}, reverse=True)
        for at, stage in enumerate(stages, 1):
            for running in self._running:
                if running.child.stage == stage:
                    running.terminate()
            self._wait_until_gone(began + self._share_s(at, len(stages)), stage)
        alive = [running.child.name for running in self._running if running.process is not None]
        if alive:
            self._output.say(f"killing {', '.join(alive)}")
        for running in self._running:
            running.signal(signal.SIGKILL)
        self._kill_asked = False
        self._wait_until_gone(time.monotonic() + _REAP_S)

    def _share_s(self, at: int, stages: int) -> float:
        """When the `at`-th of the stages, counted from 1, has had its time."""
        if at == stages:
            return self._grace_s
        return max(0.0, self._grace_s - LAST_STAGE_S) * at / (stages - 1)

    def _wait_until_gone(self, ends: float, stage: int | None = None) -> None:
        """Wait for the children of `stage` and those above, or for all."""
        who = [running for running in self._running if stage is None or running.child.stage >= stage]
        while not self._kill_asked and any(running.process is not None for running in who):
            left_s = ends - time.monotonic()
            if left_s <= 0:
                return
            self._step(left_s)

    # Signals and the guard

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._stop_asked_at is None:
            self._stop_asked_at = now
        elif number == signal.SIGINT and now - self._stop_asked_at > SECOND_INTERRUPT_S:
            self._kill_asked = True

    @contextmanager
    def _signals(self) -> Iterator[None]:
        handlers = {
            signal.SIGINT: self._on_signal,
            signal.SIGTERM: self._on_signal,
            signal.SIGCHLD: lambda number, frame: None,  # its wake-up is what is wanted
        }
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup
            handlers[signal.SIGHUP] = self._on_signal
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        wake_before = signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wake_before)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.close()
            self._wake_reader.close()
            self._wake_writer.close()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Keep a process that ends all groups should this one be killed."""
        command = [sys.executable, "-I", "-S", process.__file__, "--guard"]
        quiet = subprocess.DEVNULL
        self._guard = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True, bufsize=0
        )
        try:
            yield
        finally:
            guard, self._guard = self._guard, None
            if guard.stdin is not None:
                guard.stdin.close()
            with suppress(subprocess.TimeoutExpired):  # it still waits for what could not be killed
                guard.wait(0.5)

    def _tell_guard(self, change: str, group: int) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            try:
                os.write(self._guard.stdin.fileno(), f"{change}{group}\n".encode())
            except OSError:  # it was killed; the kernel's SIGTERM to each child remains
                return
