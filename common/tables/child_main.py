"""The process that `ParserChild` starts: limits first, then one request a line, one answer a line."""

from __future__ import annotations

import ctypes
import errno
import importlib.abc
import math
import os
import resource
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class _NoPandas(importlib.abc.MetaPathFinder):
    """pyarrow imports pandas when it is there, for nothing that is needed here: 200 MB and half a second."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        """Refuse pandas and nothing else."""
        if fullname == "pandas":
            raise ModuleNotFoundError("pandas is not used in a parser child", name=fullname)


sys.meta_path.insert(0, _NoPandas())

import orjson
import pyarrow as pa

from common.errors import InternalError, StorageFull, TabrelayError
from common.tables.parse import read_table
from common.tables.shape import TableLimits
from common.tables.training import parse_training_file

THREADS = 2
#: CPU seconds beyond what the threads can use within the wall timeout, so that the parent's clock decides first.
CPU_SLACK_S = 5.0
PR_SET_PDEATHSIG = 1


def main(memory_bytes: int, timeout_s: float, parent: int) -> None:
    """Serve until stdin ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # the parent ended before the line above
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints goes to the log, not between answers
    pa.set_cpu_count(THREADS)
    pa.set_io_thread_count(THREADS)
    pa.compute.sum(pa.array([1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(resource.RLIMIT_AS, _address_space() + memory_bytes)
    _say(answers, {"ready": True})
    for line in sys.stdin.buffer:
        used = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = used.ru_utime + used.ru_stime + THREADS * timeout_s + CPU_SLACK_S
        _limit(resource.RLIMIT_CPU, math.ceil(cpu_s), hard=False)
        _say(answers, _answer(orjson.loads(line)))


def _limit(what: int, value: int, hard: bool = True) -> None:
    """Lower a limit; the hard one stays where the soft one must be raised again."""
    ceiling = resource.getrlimit(what)[1]
    soft = value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)
    resource.setrlimit(what, (soft, soft if hard else ceiling))


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _say(answers: Any, answer: Mapping[str, Any]) -> None:
    answers.write(orjson.dumps(answer) + b"\n")
    answers.flush()


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """`{"result": ...}` or `{"error": ...}`; after a refused allocation the process is not used again."""
    try:
        return {"result": _work(request)}
    except TabrelayError as error:
        return {"error": error.encode()}
    except MemoryError:
        return {"error": "memory", "retire": True}
    except OSError as error:
        traceback.print_exc()
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return {"error": StorageFull("There is no room left for the table.").encode()}
        return _broken()
    except Exception:
        traceback.print_exc()
        return _broken()


def _broken() -> dict[str, Any]:
    fault = InternalError("The parser failed; the log names the cause.")
    return {"error": fault.encode(), "retire": True}


def _work(request: Mapping[str, Any]) -> dict[str, Any]:
    if request["op"] == "ping":
        return {"pid": os.getpid()}
    path = Path(request["path"])
    limits = TableLimits(**request["limits"])
    options: dict[str, Any] = {"delimiter": request["delimiter"], "encoding": request["encoding"]}
    if request["op"] == "train":
        target, task, out_dir = request["target"], request["task"], Path(request["out_dir"])
        options["schema"] = request["schema"]
        return parse_training_file(path, request["format"], target, task, out_dir, limits, **options).encode()
    options["missing"] = request["missing"]
    table = read_table(path, request["format"], limits, text_only=True, **options)
    with pa.OSFile(request["out"], "wb") as out, pa.ipc.new_stream(out, table.schema) as stream:
        stream.write_table(table.combine_chunks())
    return {"out": request["out"]}


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
