"""A whole stack for the length of a `with` block: demos, notebooks, tests."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from common import process
from tabrelay.up.errors import CannotStart
from tabrelay.up.folders import data_folder
from tabrelay.up.stack import StackOptions

#: The stack itself is over within 10 s of SIGTERM.
STOP_S = 15.0
_TAIL_LINES = 20


class Stack:
    """`with Stack(StackOptions(port=0)) as stack: ...` runs `python -m tabrelay.up`; `stack.url` answers.

    With `quiet`, what the children write goes to `<data>/up.log`, else to standard error. Without a `data_dir`
    the data is in a temporary folder that goes with the stack.
    """

    def __init__(
        self,
        options: StackOptions | None = None,
        *,
        quiet: bool = False,
        start_timeout_s: float = 300.0,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """`environ` is added to this process's environment. Port 0, a free one, is the default here."""
        self._options = options or StackOptions(port=0)
        self._quiet = quiet
        self._start_timeout_s = start_timeout_s
        self._environ = {**os.environ, **(environ or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._url: str | None = None
        self._log_begins = 0

    @property
    def url(self) -> str:
        """Where the API answers."""
        if self._url is None:
            raise RuntimeError("the stack is not running")
        return self._url

    @property
    def data_dir(self) -> Path:
        """The data folder in use."""
        if self._temporary is not None:
            return Path(self._temporary.name)
        if self._options.data_dir is None:
            raise RuntimeError("the stack is not running")
        return self._options.data_dir

    @property
    def pid(self) -> int:
        """The supervisor's process."""
        if self._process is None:
            raise RuntimeError("the stack is not running")
        return self._process.pid

    def start(self) -> Self:
        """Start, and return when it answers; CannotStart tells why not."""
        if self._process is not None:
            raise RuntimeError("the stack is running already")
        if self._options.data_dir is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="tabrelay-", ignore_cleanup_errors=True)
        environ = self._environ | {"PYTHONSAFEPATH": "1"}
        if self._options.redis_url is not None:
            environ["TABRELAY_REDIS_URL"] = self._options.redis_url  # arguments are anybody's to read
        options = replace(self._options, data_dir=self.data_dir, redis_url=None)
        command = [sys.executable, "-m", "tabrelay.up", *options.arguments()]
        if threading.current_thread() is threading.main_thread():
            # The kernel follows the starting thread; only the main one is sure to live as long as the program.
            command = process.tied(command)
        with self._log() as log:
            self._process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._url = self._ready_url(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop everything; nothing when it is not running."""
        running, self._process, self._url = self._process, None, None
        if running is not None:
            running.send_signal(signal.SIGTERM)
            try:
                running.wait(STOP_S)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()
            if running.stdout is not None:
                running.stdout.close()
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @contextmanager
    def _log(self) -> Iterator[IO[bytes] | None]:
        if not self._quiet:
            yield None
            return
        data_folder(self.data_dir)
        descriptor = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "ab") as file:
            self._log_begins = file.tell()
            yield file

    @property
    def _log_path(self) -> Path:
        return self.data_dir / "up.log"

    def _with_tail(self, what: str) -> str:
        """The reason, with the log's last lines where they are not on the screen already."""
        if not self._quiet:
            return what
        with self._log_path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_begins, size - 64 * 1024))
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join([f"{what}:", *lines[-_TAIL_LINES:]])

    def _ready_url(self, running: subprocess.Popen[bytes]) -> str:
        if running.stdout is None:
            raise RuntimeError("the stack has no standard output")
        ends = time.monotonic() + self._start_timeout_s
        written = b""
        while b"\n" not in written:
            left_s = ends - time.monotonic()
            if left_s <= 0:
                raise CannotStart(
                    self._with_tail(f"the stack was not ready within {self._start_timeout_s:g} s")
                )
            if not select.select([running.stdout], [], [], left_s)[0]:
                continue
            data = os.read(running.stdout.fileno(), 4096)
            if not data:
                raise CannotStart(
                    self._with_tail(f"the stack ended with status {running.wait()} before it was ready")
                )
            written += data
        word, _, url = written.partition(b"\n")[0].decode().partition(" ")
        if word != "ready":
            raise CannotStart(self._with_tail(f"the stack said {word!r} where its ready line was expected"))
        return url
