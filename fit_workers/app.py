"""The Celery application of fit workers. The parent process imports this and never torch."""

from __future__ import annotations

import os
import signal
import warnings
from types import FrameType
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery, signals
from celery.exceptions import SecurityWarning
from kombu.exceptions import OperationalError

from common import logs
from common.names import new_id
from common.process import die_with_parent
from common.settings import Settings
from common.wake import LANE, TASK, celery_config
from fit_workers.keeper import Keeper

log = logs.get("fit")

#: Seconds between the soft limit, which ends a fit with an error, and the hard one, which kills the child.
HARD_AFTER_S = 30


def worker_name(settings: Settings) -> str:
    """This fit worker's name; ask in the parent, the child inherits it."""
    return (
        settings.worker_name
        or f"fit-{os.uname().nodename}-{os.environ.get('TABRELAY_FIT_PARENT', os.getpid())}"
    )


def make_app(settings: Settings, name: str) -> Celery:
    """The application with its one task and what runs beside it in the parent."""
    app = Celery("tabrelay-fit", set_as_current=True)
    app.conf.update(celery_config(settings))
    app.conf.update(
        task_soft_time_limit=settings.fit_time_limit_s,
        task_time_limit=settings.fit_time_limit_s + HARD_AFTER_S,
    )
    holder = f"{name}:{new_id()}"
    keeper = Keeper(settings, name, holder, app)

    @app.task(name=TASK)  # type: ignore[untyped-decorator]  # Celery has no types
    def wake(queue: str, **_: Any) -> None:
        """Fit one-shots that wait, then the next job of a queue; ends at once when there is none."""
        from fit_workers.fit import fit_next, serve_one_shots

        try:
            serve_one_shots(name)
            if queue == LANE:
                return
            for waiting in fit_next(name, holder, queue):
                app.send_task(TASK, args=(waiting,), queue=waiting, ignore_result=True, retry=False)
        except SoftTimeLimitExceeded:
            log.warning("a fit passed its time limit outside of its job", queue=queue)
        except OperationalError as error:
            log.warning("a wake-up was not sent; the janitor will", error=str(error))

    @signals.worker_process_init.connect(weak=False)  # type: ignore[untyped-decorator]  # Celery has no types
    def warm(**_: Any) -> None:
        """In the child: load torch and the default model before the first job comes."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        logs.configure(settings, name)
        from fit_workers.fit import warm_up

        warm_up(name)

    @signals.worker_ready.connect(weak=False)  # type: ignore[untyped-decorator]  # Celery has no types
    def ready(**_: Any) -> None:
        celery_leaves = signal.getsignal(signal.SIGTERM)

        def leave(number: int, frame: FrameType | None) -> None:
            """The job goes back before Celery ends the child, or its end would count as a lost attempt."""
            keeper.hand_back()
            if callable(celery_leaves):
                celery_leaves(number, frame)

        signal.signal(signal.SIGTERM, leave)
        keeper.start()
        log.info("waiting for fits", queues=settings.queues, device=settings.device, threads=settings.threads)

    @signals.worker_shutdown.connect(weak=False)  # type: ignore[untyped-decorator]  # Celery has no types
    def left(**_: Any) -> None:
        keeper.stop()

    return app


def main() -> None:
    """Run a fit worker until SIGTERM, which hands a running job back to its queue."""
    settings = Settings.load()
    name = worker_name(settings)
    logs.configure(settings, name)
    die_with_parent()
    # Celery warns root because messages could carry pickles; ours are JSON and carry a queue's name.
    warnings.simplefilter("ignore", SecurityWarning)
    app = make_app(settings, name)
    app.worker_main(
        [
            "--quiet",
            "worker",
            "--pool=prefork",
            "--concurrency=1",
            f"--queues={settings.queues},{LANE}",
            f"--hostname={name}@%h",
            "--without-gossip",
            "--without-mingle",
            "--without-heartbeat",
            f"--loglevel={settings.log_level}",
        ]
    )
