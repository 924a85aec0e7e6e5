"""`python -m predict_workers`: serve predicts on one device."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import torch
import uvicorn
import uvloop

from common import logs
from common.catalogue import Catalogue
from common.contexts.store import ContextStore
from common.errors import LicenceNotAccepted, ModelNotReady
from common.files import private_folder
from common.models.registry import Registry
from common.process import die_with_parent, parse_bind
from common.settings import Settings
from predict_workers.batcher import Batcher
from predict_workers.heartbeat import Heartbeat
from predict_workers.one_shot import OneShots
from predict_workers.residency import Backbones, Residency
from predict_workers.server import PredictServer

log = logs.get("predict")

#: Seconds between two looks at the files of what is loaded.
SWEEP_S = 1.0
#: The API closes idle connections first (see common.relay.client).
KEEP_ALIVE_S = 120


def warm(registry: Registry, backbones: Backbones) -> tuple[str, ...]:
    """Load the default model's weights; returns every model that has weights here."""
    ready = []
    for spec in registry.specs():
        for task in spec.files:
            with contextlib.suppress(ModelNotReady, LicenceNotAccepted):
                registry.weights(spec.name, task)
                ready.append(spec.name)
                if spec.name == registry.default_model():
                    backbones.get(spec.name, task)
    return tuple(dict.fromkeys(ready))


async def sweep(residency: Residency, heartbeat: Heartbeat) -> None:
    """Drop deleted contexts and those that somebody wrote into, until cancelled."""
    while True:
        await asyncio.sleep(SWEEP_S)
        if await residency.sweep():
            heartbeat.changed()


@contextlib.asynccontextmanager
async def serving(settings: Settings, name: str) -> AsyncIterator[PredictServer]:
    """Everything that runs beside the HTTP server."""
    registry = Registry(settings)
    backbones = Backbones(registry, settings.device)
    beats: list[Heartbeat] = []
    residency = Residency(
        ContextStore(settings),
        backbones,
        settings.device_budget_bytes,
        on_change=lambda: beats[0].changed(),
    )
    batcher = Batcher(
        rows_per_forward=settings.rows_per_forward,
        max_in_flight=settings.max_in_flight,
        max_rows_in_flight=settings.max_rows_in_flight,
    )
    models = await asyncio.to_thread(warm, registry, backbones)
    heartbeat = Heartbeat(Catalogue.connect(settings), settings, name, models, residency, batcher)
    beats.append(heartbeat)
    one_shots = OneShots(settings, name, backbones, batcher)
    server = PredictServer(settings, name, residency, batcher, one_shots)
    running = (batcher.run(), one_shots.run(), sweep(residency, heartbeat))
    tasks = [asyncio.create_task(work) for work in running]
    heartbeat.start()
    server.ready = True
    try:
        yield server
    finally:
        heartbeat.stop()
        for task in tasks:
            task.cancel()
        batcher.close()
        residency.close()


def listen(bind: str) -> socket.socket:
    """The listening socket; a Unix socket left by a dead predecessor is replaced."""
    where = parse_bind(bind)
    if where.path is None:
        found = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)[0]
        tcp = socket.socket(found[0], socket.SOCK_STREAM)
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tcp.bind(found[4])
        return tcp
    path = Path(where.path)
    private_folder(path.parent)
    path.unlink(missing_ok=True)
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    unix.bind(str(path))
    path.chmod(0o600)
    return unix


async def serve(settings: Settings, name: str) -> None:
    """Listen until SIGTERM or SIGINT, then answer what is in flight and leave."""
    async with serving(settings, name) as app:
        config = uvicorn.Config(
            app,
            loop="none",
            http="httptools",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=5,
        )
        server = uvicorn.Server(config)
        log.info("serving", bind=settings.predict_bind, device=settings.device, threads=settings.threads)
        # uvicorn stops by its own handlers, then raises the signal again for the one that was there before.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        await server.serve(sockets=[listen(settings.predict_bind)])


def main() -> None:
    """Read the settings and serve."""
    settings = Settings.load()
    name = settings.worker_name or f"{socket.gethostname()}-{os.getpid()}"
    if not settings.predict_bind:
        settings = settings.model_copy(update={"predict_bind": f"unix:{settings.run}/{name}.sock"})
    logs.configure(settings, name)
    die_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    torch.set_num_threads(settings.threads)
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(settings, name))


if __name__ == "__main__":
    main()
