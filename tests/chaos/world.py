"""What the nemesis and the checker see of a running stack: its processes, its Redis, its folders."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from common.catalogue import Catalogue
from common.redis_url import unix_url
from common.settings import Settings
from tabrelay.up.embedded import Stack
from tests.support import wait_until

TENANT = "default"


@dataclass(frozen=True)
class Process:
    """One line of the process table."""

    pid: int
    parent: int
    state: str
    command: str
    started: int  # clock ticks since boot

    @property
    def age_s(self) -> float:
        """Seconds since its start."""
        up = float(Path("/proc/uptime").read_text().split()[0])
        return up - self.started / os.sysconf("SC_CLK_TCK")


def processes() -> dict[int, Process]:
    """Every process, by id; zombies are not listed."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            command = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            if fields[0] not in "ZX":
                found[int(entry)] = Process(int(entry), int(fields[1]), fields[0], command, int(fields[19]))
    return found


def anonymous_mib(pid: int) -> float:
    """Memory of its own, without the files that it maps."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Anonymous:"):
                return int(line.split()[1]) / 1024
    return 0.0


def mapped_paths() -> set[str]:
    """Every file that some process maps."""
    found: set[str] = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{entry}/maps").read_text().splitlines():
                    _, slash, path = line.partition("/")
                    if slash:
                        found.add(slash + path)
    return found


class World:
    """A running stack as seen from outside."""

    def __init__(self, stack: Stack, *, redis_url: str | None = None) -> None:
        """`redis_url` where the stack's Redis is not its own."""
        self.stack = stack
        self.settings = Settings(data_dir=stack.data_dir)
        self.data = self.settings.data
        if redis_url is None:
            password = (self.data / "redis" / "password").read_text().strip()
            redis_url = unix_url(str(self.settings.run / "redis.sock"), password)
        self.settings = Settings(data_dir=stack.data_dir, redis_url=redis_url)
        self.catalogue = Catalogue.connect(self.settings)
        self.redis: Any = redis.from_url(redis_url, decode_responses=True, socket_timeout=20)
        self.prefix = self.settings.redis_prefix

    # Processes

    def _below(self, module: str) -> list[Process]:
        return sorted(
            (p for p in processes().values() if p.parent == self.stack.pid and module in p.command),
            key=lambda p: p.pid,
        )

    def fit_parents(self) -> list[Process]:
        """The Celery parents."""
        return self._below("-m fit_workers")

    def fit_children(self) -> list[Process]:
        """The processes that fit."""
        parents = {p.pid for p in self.fit_parents()}
        return sorted(
            (p for p in processes().values() if p.parent in parents and "fit_workers" in p.command),
            key=lambda p: p.pid,
        )

    def predict_workers(self) -> list[Process]:
        """The predict workers."""
        return self._below("-m predict_workers")

    def redis_server(self) -> list[Process]:
        """The embedded server."""
        return [p for name in ("valkey-server", "redis-server") for p in self._below(name)]

    def api(self) -> list[Process]:
        """gunicorn's parent and workers."""
        parents = self._below("-m api")
        ids = {p.pid for p in parents}
        return parents + [p for p in processes().values() if p.parent in ids and "-m api" in p.command]

    def of_this_stack(self) -> list[Process]:
        """Every process whose environment names this data folder, whoever its parent is by now."""
        wanted = b"TABRELAY_DATA_DIR=" + os.fsencode(self.data)
        found = []
        for process in processes().values():
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                    found.append(process)
        return found

    def memory_mib(self) -> dict[str, float]:
        """The largest process of each kind."""
        kinds = {"api": self.api(), "fit parent": self.fit_parents(), "predict": self.predict_workers()}
        return {
            kind: max((anonymous_mib(p.pid) for p in members), default=0.0) for kind, members in kinds.items()
        }

    # The catalogue

    def key(self, *parts: str) -> str:
        """A key of this deployment."""
        return self.prefix + ":".join(parts)

    def keys(self, *parts: str) -> list[str]:
        """Every key of a kind."""
        return sorted(self.redis.scan_iter(match=self.key(*parts, "*"), count=1000))

    def held(self) -> dict[int, str]:
        """Job by the process that works on it; a dead holder's are in it too."""
        found = {}
        with contextlib.suppress(redis.RedisError):
            names = self.keys("holds")
            for text in self.redis.mget(names) if names else ():
                if text:
                    job, _, pid = text.split(" ")
                    found[int(pid)] = job
        return found

    def working(self) -> dict[int, str]:
        """Job by the living fit child that works on it."""
        held = self.held()
        return {p.pid: held[p.pid] for p in self.fit_children() if p.pid in held}

    def snapshot(self) -> list[str]:
        """What stands where, in words, for a run that does not come to its end."""
        told = [f"processes: {[(p.pid, p.state, p.command[-40:]) for p in self.of_this_stack()]}"]
        for name in sorted(self.redis.scan_iter(match=f"{self.prefix}*")):
            kind = name.removeprefix(self.prefix).partition(":")[0]
            read = {
                "list": lambda key: self.redis.lrange(key, 0, 20),
                "zset": lambda key: self.redis.zrange(key, 0, 20, withscores=True),
                "set": self.redis.smembers,
                "hash": lambda key: f"{self.redis.hlen(key)} fields",
                "string": lambda key: str(self.redis.get(key))[:200],
            }
            if kind in (
                "wait",
                "turns",
                "queued",
                "running",
                "holds",
                "pending",
                "worker",
                "celery",
                "janitor",
            ):
                told.append(f"{name}: {read[self.redis.type(name)](name)}")
        return told

    def redis_answers(self) -> bool:
        """Whether it takes commands."""
        with contextlib.suppress(redis.RedisError):
            return bool(self.redis.ping())
        return False

    def all_up(self, fit: int, predict: int) -> bool:
        """Whether every worker runs, none is stopped and all are registered."""
        with contextlib.suppress(redis.RedisError):
            return (
                len(self.fit_children()) == fit
                and len(self.predict_workers()) == predict
                and not any(p.state in "Tt" for p in self.of_this_stack())
                and len(self.keys("worker", "fit")) == fit
                and len(self.keys("worker", "predict")) == predict
            )
        return False

    def wait_all_up(self, fit: int, predict: int, within_s: float = 60) -> None:
        """Until every worker is back."""
        wait_until(lambda: self.all_up(fit, predict), f"{fit} fit and {predict} predict workers", within_s)


def send(pid: int, number: signal.Signals) -> bool:
    """Whether the process was still there to be signalled."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def now_ms() -> int:
    """Milliseconds since 1970, by this machine's clock, which is Redis' too."""
    return int(time.time() * 1000)
