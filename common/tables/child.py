"""A warm subprocess that reads untrusted files, bounded in memory and time.

Neither the API nor a model's process ever parses an upload itself: a crafted file may crash a reader or make it
ask for any amount of memory. The child runs `python -m common.tables.child_main`; one JSON line on its stdin is a
request, one on its stdout the answer; tables travel as files. It sees none of the parent's environment beyond
what Python needs, and ends with its parent.

`memory_bytes` is address space on top of what the empty child needs for its own code (about 300 MB).
"""

from __future__ import annotations

import os
import secrets
import selectors
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from common.errors import InternalError, InvalidTable, Overloaded, decode
from common.tables.canonical import sync_folder
from common.tables.shape import MIB, TableLimits
from common.tables.training import ParsedTable, parse_training_file

__all__ = ["ParsedTable", "ParserChild", "parse_training_file"]

#: A child that has not said hello by then will not; imports on a busy machine take seconds.
START_TIMEOUT_S = 60.0
ENVIRONMENT = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "VIRTUAL_ENV",
)
PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class ParserChild:
    """One warm child; calls from several threads take turns.

    `timeout_s` bounds both the wait for the turn (Overloaded) and the work itself (InvalidTable, and a fresh
    child). After `uses` files a fresh child takes over. `scratch_dir` holds files only while a call runs.
    """

    def __init__(
        self, memory_bytes: int, timeout_s: float, uses: int = 200, scratch_dir: Path | None = None
    ) -> None:
        self.memory_bytes = memory_bytes
        self.timeout_s = timeout_s
        self.uses = uses
        self._scratch = scratch_dir
        self._turn = threading.Lock()
        self._running: _Running | None = None
        self._closed = False

    def __enter__(self) -> ParserChild:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The child's process id, None while there is none."""
        running = self._running
        return running.process.pid if running else None

    def start(self) -> None:
        """Start the child without waiting for it, so that the first file finds it warm."""
        with self._taking_turn():
            self._child()

    def ping(self) -> None:
        """Wait until the child answers; raises InternalError when it can't be started."""
        self._ask({"op": "ping"})

    def parse_training(
        self,
        path: Path,
        format: str,
        target: str | None,
        task: str | None,
        out_dir: Path,
        limits: TableLimits,
        *,
        delimiter: str | None = None,
        encoding: str | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> ParsedTable:
        """`parse_training_file` in the child: the canonical table ends up in `out_dir` under a name of its own.

        Raises what that raises, InvalidTable when the file needs more memory or time than the child has,
        Overloaded when the child is busy for `timeout_s`.
        """
        with _folder(out_dir) as scratch:
            answer = self._ask(
                {
                    "op": "train",
                    "path": os.path.abspath(path),
                    "format": format,
                    "target": target,
                    "task": task,
                    "out_dir": str(scratch),
                    "limits": asdict(limits),
                    "delimiter": delimiter,
                    "encoding": encoding,
                    "schema": schema,
                }
            )
            parsed = ParsedTable.decode(answer)
            # Two of the same content may be parsed at the same time.
            final = Path(os.path.abspath(out_dir)) / f".{secrets.token_hex(16)}.parquet"
            os.replace(parsed.path, final)
            sync_folder(final.parent)
        return replace(parsed, path=final)

    def parse_rows(
        self,
        source: Path | bytes,
        format: str,
        limits: TableLimits,
        *,
        delimiter: str | None = None,
        encoding: str | None = None,
        missing: Sequence[str] | None = None,
    ) -> bytes:
        """Rows to predict, as an Arrow IPC stream of plain types; CSV cells stay text, those of `missing` become gaps.

        Raises what `read_table` raises, and as `parse_training` does.
        """
        with _folder(self._scratch) as scratch:
            if isinstance(source, bytes):
                path = scratch / "body"
                path.write_bytes(source)
            else:
                path = Path(os.path.abspath(source))
            answer = self._ask(
                {
                    "op": "rows",
                    "path": str(path),
                    "format": format,
                    "out": str(scratch / "rows.arrow"),
                    "limits": asdict(limits),
                    "delimiter": delimiter,
                    "encoding": encoding,
                    "missing": missing,
                }
            )
            return Path(answer["out"]).read_bytes()

    def close(self) -> None:
        """End the child; calls that wait or work get an error. Later calls raise InternalError."""
        self._closed = True
        running = self._running
        if running is not None:
            running.kill()
        with self._turn:
            self._end()

    @contextmanager
    def _taking_turn(self) -> Iterator[None]:
        if not self._turn.acquire(timeout=self.timeout_s):
            raise Overloaded(
                "The parser is busy with other files; try again later.", retry_after_s=self.timeout_s
            )
        try:
            yield
        finally:
            self._turn.release()

    def _child(self) -> _Running:
        """The running child; a fresh one when there is none, it died between files, or was used up."""
        if self._closed:
            raise InternalError("The parser is closed.")
        running = self._running
        if running is not None and (running.used >= self.uses or running.process.poll() is not None):
            self._end()
            running = None
        if running is None:
            running = self._running = _Running.start(self.memory_bytes, self.timeout_s)
        return running

    def _end(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.end()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        with self._taking_turn():
            child = self._child()
            if not child.hello():
                self._end()
                raise InternalError("The parser process could not be started; its error is in the log.")
            line = child.exchange(orjson.dumps(request) + b"\n", self.timeout_s)
            if not isinstance(line, bytes):
                self._end()
                if self._closed:
                    raise InternalError("The parser was closed.")
                self._child()  # warms up while the caller reports the error
                raise self._too_slow() if line == TIMED_OUT else self._too_big()
            answer: dict[str, Any] = orjson.loads(line)
            if answer.get("retire"):
                self._end()
                self._child()
        if "error" in answer:
            raise self._too_big() if answer["error"] == "memory" else decode(answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def _too_slow(self) -> InvalidTable:
        return InvalidTable(
            f"Reading the file takes longer than {self.timeout_s:g} s, the most that is given to it.",
            what="seconds",
            limit=self.timeout_s,
        )

    def _too_big(self) -> InvalidTable:
        return InvalidTable(
            f"Reading the file needs more memory than {self.memory_bytes // MIB:,} MiB, the most that is given to it, "
            "or the file is damaged in a way that stops the reader.",
            what="memory_bytes",
            limit=self.memory_bytes,
        )


TIMED_OUT = "timed out"
DIED = "died"


@dataclass
class _Running:
    """A child process and its pipes."""

    process: subprocess.Popen[bytes]
    used: int = 0
    greeted: bool = False
    _waiting: bytes = b""

    @classmethod
    def start(cls, memory_bytes: int, timeout_s: float) -> _Running:
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        environment |= {
            "ARROW_DEFAULT_MEMORY_POOL": "system",  # so that a refused allocation is an error, not a crash
            "MALLOC_ARENA_MAX": "2",  # each arena reserves 64 MiB of address space
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "common.tables.child_main"]
        command += [str(memory_bytes), str(timeout_s), str(os.getpid())]

        def spawn() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=PACKAGE_ROOT,
                env=environment,
                start_new_session=True,
            )

        return cls(_spawner().submit(spawn).result())

    def hello(self) -> bool:
        """Whether the child is up; waits for its first line once."""
        if not self.greeted:
            self.greeted = isinstance(self._line(time.monotonic() + START_TIMEOUT_S), bytes)
        return self.greeted

    def exchange(self, request: bytes, timeout_s: float) -> bytes | str:
        """The answer's line, or TIMED_OUT or DIED."""
        self.used += 1
        deadline = time.monotonic() + timeout_s
        assert self.process.stdin is not None  # noqa: S101  (opened as a pipe above)
        try:
            self.process.stdin.write(request)
            self.process.stdin.flush()
        except OSError:
            return DIED
        return self._line(deadline)

    def _line(self, deadline: float) -> bytes | str:
        assert self.process.stdout is not None  # noqa: S101  (opened as a pipe above)
        descriptor = self.process.stdout.fileno()
        pieces = [self._waiting]
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in pieces[-1]:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    return TIMED_OUT
                piece = os.read(descriptor, MIB)
                if not piece:
                    return DIED
                pieces.append(piece)
        line, _, self._waiting = b"".join(pieces).partition(b"\n")
        return line

    def kill(self) -> None:
        """Stop the process at once."""
        self.process.kill()

    def end(self) -> None:
        """Stop the process, reap it and close its pipes."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue  # unsent bytes to a dead child


_spawners: dict[int, ThreadPoolExecutor] = {}
_spawners_guard = threading.Lock()


def _spawner() -> ThreadPoolExecutor:
    """This process's one spawning thread.

    The kernel sends a parent-death signal when the *thread* that forked ends, so children are started by a
    thread that lives as long as the process.
    """
    with _spawners_guard:
        pid = os.getpid()
        if pid not in _spawners:
            _spawners.clear()  # those of a process that forked
            _spawners[pid] = ThreadPoolExecutor(max_workers=1, thread_name_prefix="parser-spawner")
        return _spawners[pid]


@contextmanager
def _folder(parent: Path | None) -> Iterator[Path]:
    """A private folder that is gone afterwards with all that is in it."""
    folder = Path(tempfile.mkdtemp(prefix=".parse-", dir=parent)).absolute()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
