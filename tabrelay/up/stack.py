"""`tabrelay up`: Redis, fit workers, predict workers and the API, as children of this process."""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import redis
from pydantic import ValidationError

from common import errors, process
from common.catalogue.connection import connect
from common.catalogue.epoch import Epoch
from common.catalogue.jobs import QUEUES
from common.process import Bind
from common.redis_url import without_password
from common.settings import Settings, UnknownSetting
from tabrelay.up import devices, ready, redis_server
from tabrelay.up.children import Child, Supervisor
from tabrelay.up.errors import CannotStart
from tabrelay.up.folders import data_folder, locked, private_folder
from tabrelay.up.output import Output

# Children of one stage start together; they stop in reverse.
_REDIS_STAGE, _WORKER_STAGE, _API_STAGE = 0, 1, 2
#: Settings that belong to one process and must not be inherited by another.
_PER_PROCESS = ("WORKER_NAME", "PREDICT_BIND", "PREDICT_ADDRESS", "DEVICE", "API_BIND")


@dataclass(frozen=True)
class StackOptions:
    """What a stack is asked to be; None leaves it to the `TABRELAY_` settings."""

    port: int = 8000
    host: str = "127.0.0.1"
    data_dir: Path | None = None
    fit_workers: int | None = None
    predict_workers: int | None = None
    fit_devices: str = "cpu"
    predict_devices: str = "cpu"
    models: Sequence[str] = field(default=())
    threads: int | None = None
    redis_url: str | None = None
    #: Queues of each fit worker, comma-separated; the last one counts for all that follow.
    queues: Sequence[str] = field(default=())

    def arguments(self) -> list[str]:
        """The same options for the command `python -m tabrelay.up`."""
        given = {
            "--port": self.port,
            "--host": self.host,
            "--data-dir": self.data_dir,
            "--fit-workers": self.fit_workers,
            "--predict-workers": self.predict_workers,
            "--fit-devices": self.fit_devices,
            "--predict-devices": self.predict_devices,
            "--threads": self.threads,
            "--redis-url": self.redis_url,
        }
        flags = [f"{flag}={value}" for flag, value in given.items() if value is not None]
        flags += [f"--queues={queues}" for queues in self.queues]
        return flags + [f"--model={model}" for model in self.models]


@dataclass(frozen=True)
class Models:
    """What the models' names were resolved to."""

    default: str
    paths: dict[str, str]
    notes: tuple[str, ...] = ()


def run_up(options: StackOptions) -> int:
    """Run the stack until it is told to stop; 0 then, 1 when it could not be started, which is explained.

    Standard output carries one line, `ready http://HOST:PORT`; everything else goes to standard error.
    """
    try:
        with _interrupted_by_sigterm():
            return _run(options)
    except CannotStart as error:
        print(f"tabrelay up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def _run(options: StackOptions) -> int:
    settings = _settings(options)
    output = Output(names=None if settings.log_format == "text" or os.isatty(2) else False)
    data = data_folder(settings.data)
    try:
        with _reserved(options.host, options.port) as api, locked(data, output.say) as lock:
            _sweep(data)
            children = _children(options, settings, api, output)
            url = children[-1].environ["TABRELAY_REDIS_URL"]

            def on_ready() -> None:
                _compare_epochs(settings, url, output)
                _announce(f"http://{api}")

            supervisor = Supervisor(children, output=output, on_ready=on_ready, pass_fds=(lock,))
            status = supervisor.run()
            _tidy(settings)
            return status
    finally:
        output.flush()


def _sweep(data: Path) -> None:
    """Remove what killed processes were writing; with the folder's lock held, nobody writes there now."""
    for left in [*data.glob("contexts/*/.tmp-*"), *data.glob("uploads/.*")]:
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def _tidy(settings: Settings) -> None:
    """Give back what lies outside the data folder: the host tier's memory, and sockets. The next start does without."""
    outside = [] if settings.run.is_relative_to(settings.data) else [settings.run]
    if settings.host is not None and settings.host_dir is None:
        outside.append(settings.host)
    for folder in outside:
        shutil.rmtree(folder, ignore_errors=True)


def _children(options: StackOptions, settings: Settings, api: Bind, output: Output) -> list[Child]:
    """The stack's processes, in the order of their start."""
    fits = devices.assign(options.fit_devices, options.fit_workers, os.environ)
    predicts = devices.assign(options.predict_devices, options.predict_workers, os.environ)
    private_folder(settings.run)
    children = []
    if "redis_url" in settings.model_fields_set:
        url = settings.redis_url
        _ping(url)
    else:
        server = redis_server.prepare(settings)
        url = server.url
        children.append(Child("redis", server.argv, ready=ready.RedisAnswers(url), stage=_REDIS_STAGE))
    shared = _shared_environment(settings, url)
    models = resolve_models(options.models, shared)
    for note in models.notes:
        output.say(note)
    shared["TABRELAY_DEFAULT_MODEL"] = models.default
    shared["TABRELAY_MODEL_PATHS"] = json.dumps(models.paths)
    children += [
        _fit_worker(at, device, _queues(options, at), settings, shared) for at, device in enumerate(fits)
    ]
    children += [_predict_worker(at, device, settings, shared) for at, device in enumerate(predicts)]
    return [*children, _api(api, shared)]


def _settings(options: StackOptions) -> Settings:
    given: dict[str, Any] = {
        "data_dir": options.data_dir,
        "redis_url": options.redis_url,
        "threads": options.threads,
    }
    try:
        return Settings.load(**{name: value for name, value in given.items() if value is not None})
    except UnknownSetting as error:
        raise CannotStart(str(error)) from error
    except ValidationError as error:
        first = error.errors()[0]
        raise CannotStart(f"setting {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _ping(url: str) -> None:
    try:
        ready.ping(url)
    except (redis.RedisError, ValueError) as error:
        raise CannotStart(f"Redis at {without_password(url)} does not answer: {error}") from error


@contextmanager
def _reserved(host: str, port: int) -> Iterator[Bind]:
    """Where the API will listen; a bound socket that never listens keeps the port from others until then."""
    host = "127.0.0.1" if host == "localhost" else host
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise CannotStart(f"{host!r} is no address; 127.0.0.1 is the usual one") from None
    if not address.is_loopback:
        raise CannotStart(f"keys are needed to listen on {host}; not available yet, so listen on 127.0.0.1")
    held = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET)
    with held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((host, port))
        except OSError as error:
            raise CannotStart(
                f"port {port} can't be had: {error.strerror}; choose another with --port"
            ) from error
        except OverflowError as error:
            raise CannotStart(f"there is no port {port}") from error
        bind = Bind(host=host, port=int(held.getsockname()[1]))
        if sys.platform != "linux":  # elsewhere two sockets can't be bound to one port
            held.close()
        yield bind


def _shared_environment(settings: Settings, redis_url: str) -> dict[str, str]:
    """What all children get: this process's environment, with the stack's settings in it."""
    threads = str(settings.threads)
    per_process = {f"TABRELAY_{name}" for name in _PER_PROCESS}
    environ = {name: value for name, value in os.environ.items() if name not in per_process}
    if settings.host_dir is not None:
        environ["TABRELAY_HOST_DIR"] = str(settings.host)
    return environ | {
        "TABRELAY_DATA_DIR": str(settings.data),
        "TABRELAY_RUN_DIR": str(settings.run),
        "TABRELAY_REDIS_URL": redis_url,
        "TABRELAY_THREADS": threads,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
        # `python -m` would put the current folder first, and an `api` folder there in place of ours.
        "PYTHONSAFEPATH": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def resolve_models(names: Sequence[str], environ: dict[str, str]) -> Models:
    """Find the weights, downloading what is missing; in a child, since loading them needs torch."""
    command = [sys.executable, "-m", "common.models.weights", "resolve", *names]
    child = subprocess.Popen(
        process.tied(command),
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        written, _ = child.communicate()
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise
    try:
        answer: dict[str, Any] = json.loads(written.strip().rpartition(b"\n")[2])
        if child.returncode:
            raise CannotStart(errors.decode(answer["error"]).detail)
        return Models(answer["default_model"], dict(answer["model_paths"]), tuple(answer.get("notes", ())))
    except (ValueError, KeyError, TypeError) as error:
        raise CannotStart(f"the models could not be resolved (exit status {child.returncode})") from error


def _python(module: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module)


def _queues(options: StackOptions, at: int) -> dict[str, str]:
    """The setting of the fit worker at this place; nothing when the option was not given."""
    if not options.queues:
        return {}
    chosen = options.queues[min(at, len(options.queues) - 1)]
    names = [name.strip() for name in chosen.split(",")]
    unknown = [name for name in names if name not in QUEUES]
    if unknown:
        raise CannotStart(f"--queues: {unknown[0]!r} is none of {', '.join(QUEUES)}")
    return {"TABRELAY_QUEUES": ",".join(names)}


def _fit_worker(
    at: int, device: devices.Device, queues: dict[str, str], settings: Settings, shared: dict[str, str]
) -> Child:
    name = f"fit-{at}"
    environ = shared | queues
    environ |= {
        "TABRELAY_WORKER_NAME": name,
        "TABRELAY_DEVICE": device.name,
        "CUDA_VISIBLE_DEVICES": device.visible,
        # The same table and options are to give the same context, whatever worker fits it.
        "PYTHONHASHSEED": "0",
    }
    key = f"{settings.redis_prefix}worker:fit:{name}"
    check = ready.KeyAppears(shared["TABRELAY_REDIS_URL"], key)
    return Child(name, _python("fit_workers"), environ, check, _WORKER_STAGE)


def _predict_worker(at: int, device: devices.Device, settings: Settings, shared: dict[str, str]) -> Child:
    name = f"predict-{at}"
    bind = Bind(path=str(settings.run / f"{name}.sock"))
    environ = shared | {
        "TABRELAY_WORKER_NAME": name,
        "TABRELAY_DEVICE": device.name,
        "TABRELAY_PREDICT_BIND": str(bind),
        "CUDA_VISIBLE_DEVICES": device.visible,
    }
    return Child(name, _python("predict_workers"), environ, ready.HttpAnswers(bind), _WORKER_STAGE)


def _api(bind: Bind, shared: dict[str, str]) -> Child:
    environ = shared | {"TABRELAY_API_BIND": str(bind)}
    return Child("api", _python("api"), environ, ready.ApiAnswers(bind), _API_STAGE)


def _compare_epochs(settings: Settings, url: str, output: Output) -> None:
    """Say in one line when Redis does not know what the data folder holds; the stack goes on all the same."""
    client = connect(url)
    try:
        if not Epoch(client, settings.redis_prefix, settings.data).ensure():
            output.say(str(errors.CatalogueEmptied()))
    except (errors.CatalogueUnavailable, OSError) as error:
        output.say(f"the catalogue's epoch can't be compared: {error}")
    finally:
        client.close()


def _announce(url: str) -> None:
    with suppress(BrokenPipeError):
        print(f"ready {url}", flush=True)


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Until the supervisor takes the signals, SIGTERM ends what is under way as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
