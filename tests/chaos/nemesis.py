"""Breaks one thing after another, seeded; says what and when, and mends everything at the end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tests.chaos.world import TENANT, Process, World, mapped_paths, now_ms, send

#: A step of the nemesis in the log.
Say = Callable[[str], None]


class Nemesis:
    """One thread; every choice comes from the seed, what is there to be chosen does not."""

    def __init__(
        self, world: World, seed: int, *, fit: int, predict: int, lease_s: float, small_disk: bool
    ) -> None:
        """`small_disk`: the data folder is a small file system that may be filled."""
        self._world = world
        self._rng = np.random.default_rng([seed, 0xC4A05])
        self._began = time.monotonic()
        self._lease_s = lease_s
        self._workers = fit, predict
        self._stopped: set[int] = set()
        self.done: Counter[str] = Counter()
        self.damaged: set[str] = set()
        self.redis_killed_ms: list[int] = []
        self.faults: list[str] = []
        self._actions: list[tuple[Callable[[], str], float]] = [
            (self.kill_fit_child, 6),
            (self.kill_fit_parent, 2),
            (self.kill_predict_worker, 2),
            (self.stop_fit_child, 1.5),
            (self.stop_fit_worker, 1),
            (self.kill_redis, 1.5),
            (self.pause_redis, 0.7),
            (self.damage_context, 3),
        ]
        if small_disk:
            self._actions.append((self.fill_disk, 1.5))
        else:
            self._say(
                "not filling the disk: the data folder is no small file system (mounting one was refused)"
            )

    def run(self, stop: threading.Event) -> None:
        """Until told to stop; then everything goes on and the disk is free."""
        weights = np.array([weight for _, weight in self._actions])
        try:
            while not stop.wait(float(self._rng.uniform(0.3, 3.0))):
                act = self._actions[int(self._rng.choice(len(weights), p=weights / weights.sum()))][0]
                try:
                    did = act()
                except Exception as error:
                    did = f"failed: {error!r}"
                    self.faults.append(f"the nemesis stumbled in {act.__name__}: {error!r}")
                self.done[act.__name__] += bool(did)
                self._say(f"{act.__name__}: {did or 'nothing there'}")
        finally:
            self.mend()

    def mend(self) -> None:
        """Let everything go on."""
        for pid in self._stopped:
            send(pid, signal.SIGCONT)
        self._stopped.clear()
        self._ballast.unlink(missing_ok=True)

    # Processes

    def kill_fit_child(self) -> str:
        """Mostly one that works."""
        working = self._world.working()
        children = [p.pid for p in self._world.fit_children()]
        chosen = sorted(working) if working and self._rng.random() < 0.8 else children
        return self._kill(chosen, working)

    def kill_fit_parent(self) -> str:
        """The kernel takes its child with it."""
        return self._kill([p.pid for p in self._world.fit_parents()], {})

    def kill_predict_worker(self) -> str:
        """With what it was answering."""
        return self._kill([p.pid for p in self._world.predict_workers()], {})

    def stop_fit_child(self) -> str:
        """Past its lease, then on; its parent is not to renew meanwhile."""
        working = self._world.working()
        if not working:
            return ""
        pid = sorted(working)[int(self._rng.integers(len(working)))]
        return self._pause([pid], self._lease_s + float(self._rng.uniform(1, 3))) + f", job {working[pid]}"

    def stop_fit_worker(self) -> str:
        """Parent and child past the lease, then on."""
        parents = self._world.fit_parents()
        if not parents:
            return ""
        parent = parents[int(self._rng.integers(len(parents)))].pid
        children = [p.pid for p in self._world.fit_children() if p.parent == parent]
        return self._pause([parent, *children], self._lease_s + float(self._rng.uniform(1, 3)))

    def kill_redis(self) -> str:
        """The supervisor starts it again."""
        servers = self._world.redis_server()
        if not servers:
            return ""
        self.redis_killed_ms.append(now_ms())
        return self._kill([p.pid for p in servers], {})

    def pause_redis(self) -> str:
        """Longer than a client waits for one command; what was sent meanwhile is carried out later."""
        servers = self._world.redis_server()
        return self._pause([servers[0].pid], float(self._rng.uniform(1, 8))) if servers else ""

    def _kill(self, pids: list[int], working: dict[int, str]) -> str:
        if not pids:
            return ""
        pid = pids[int(self._rng.integers(len(pids)))]
        job = f" with job {working[pid]}" if pid in working else ""
        return f"SIGKILL {pid}{job}" if send(pid, signal.SIGKILL) else ""

    def _pause(self, pids: list[int], seconds: float) -> str:
        self._stopped.update(pids)
        for pid in pids:
            send(pid, signal.SIGSTOP)
        time.sleep(seconds)
        for pid in pids:
            send(pid, signal.SIGCONT)
        self._stopped.difference_update(pids)
        return f"SIGSTOP {pids} for {seconds:.1f} s"

    # Files

    @property
    def _ballast(self) -> Path:
        return self._world.data / "ballast"

    def fill_disk(self) -> str:
        """Until nothing fits any more, for some seconds."""
        taken = fill(self._ballast)
        seconds = float(self._rng.uniform(1, 5))
        time.sleep(seconds)
        self._ballast.unlink(missing_ok=True)
        return f"{taken / 1024**2:.0f} MiB for {seconds:.1f} s"

    def damage_context(self) -> str:
        """A file at rest, in each tier that has it: a damaged copy takes its name, as a disk's rot would."""
        data, host = self._world.data / "contexts" / TENANT, self._world.settings.host
        files = sorted(data.glob("[0-9a-f]*.safetensors"))
        mapped = mapped_paths()
        files = [path for path in files if str(path) not in mapped and path.stem not in self.damaged]
        if not files:
            return ""
        path = files[int(self._rng.integers(len(files)))]
        places = [path, *([host / TENANT / path.name] if host is not None else [])]
        how = ("truncated", "flipped", "emptied", "header overwritten")[int(self._rng.integers(4))]
        done = []
        with lock_of(self._world.data) as held:
            if not held:
                return ""
            for place in places:
                if place.exists() and str(place) not in mapped:
                    with contextlib.suppress(OSError):  # a full disk
                        self._damage(place, how)
                        done.append(place.parts[1])
        return f"{path.stem[:12]} {how} in {done}" if done else ""

    def _damage(self, place: Path, how: str) -> None:
        content = bytearray(place.read_bytes())
        if how == "truncated":
            del content[int(self._rng.integers(1, len(content))) :]
        elif how == "flipped":
            for at in self._rng.integers(0, len(content), size=3):
                content[at] ^= 1 << int(self._rng.integers(8))
        elif how == "emptied":
            content.clear()
        else:
            content[:64] = bytes(64)
        copy = place.with_name(".chaos")
        try:
            copy.write_bytes(content)
            self.damaged.add(place.stem)  # before it can be seen
            os.replace(copy, place)
        finally:
            copy.unlink(missing_ok=True)

    def _say(self, what: str) -> None:
        print(f"[{time.monotonic() - self._began:7.2f}] {what}", flush=True)


def fill(ballast: Path) -> int:
    """Write until the disk is full; returns how many bytes went in."""
    taken = 0
    with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
        for piece in (bytes(1024**2), bytes(4096)):
            with contextlib.suppress(OSError):
                while True:
                    taken += file.write(piece)
    return taken


@contextmanager
def lock_of(data: Path) -> Iterator[bool]:
    """The tenant's lock, so that no file is renamed over while the product unlinks it; False when it is taken."""
    descriptor = os.open(data / "locks" / TENANT, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        for _ in range(50):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield True
                return
            time.sleep(0.02)
        yield False
    finally:
        os.close(descriptor)


@contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[bool]:
    """A small file system in memory at `folder`; False where mounting is refused."""
    folder.mkdir(parents=True, exist_ok=True)
    size = f"size={mebibytes}m,mode=0700"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], capture_output=True, check=False
    )
    try:
        yield mounted.returncode == 0
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)


def youngest(found: list[Process]) -> Process:
    """The process that was started last."""
    return max(found, key=lambda p: p.started)
