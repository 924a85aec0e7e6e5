"""What a fit worker's parent does beside its child: keep the lease, say that it lives, look after lost jobs.

The lease is renewed here and not by the thread that fits, because a long call into C can hold the interpreter
lock for longer than the lease. It is renewed only while the child that claimed the job lives and is not
stopped; the child's death ends it at once.

The parent forks a new child just when the keeper is busy with the old one's death. A lock that the keeper's thread held
at that moment (an import's, a connection pool's) would stay locked in the child for ever, so forks wait for the keeper's
round to end.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import threading
import time
from pathlib import Path

from celery import Celery

from common import logs
from common.catalogue import Catalogue, check_in
from common.catalogue.jobs import QUEUES, Held
from common.catalogue.records import FitWorker
from common.contexts.store import ContextStore
from common.errors import CatalogueUnavailable
from common.janitor import Sweeper
from common.lost_jobs import LostJobs
from common.settings import Settings
from common.wake import TASK

log = logs.get("keeper")

#: How often the child is looked at.
LOOK_S = 0.5


def child_state(pid: int) -> str:
    """The kernel's state letter of one of our children; "" when it is not there, or not ours any more."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, parent = stat.rpartition(")")[2].split()[:2]
    if int(parent) != os.getpid() or state in "ZX":
        return ""
    return state


class Keeper:
    """One thread in the parent."""

    def __init__(self, settings: Settings, name: str, holder: str, app: Celery) -> None:
        """`holder` is this life of the worker; the name may have lived before."""
        self._settings = settings
        self._name = name
        self._holder = holder
        self._app = app
        self._catalogue = Catalogue.connect(settings)
        self._store = ContextStore(settings)
        self._lost = LostJobs(self._catalogue, settings, name)
        self._sweeper = Sweeper(self._catalogue, settings, name)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
        self._round = threading.Lock()
        os.register_at_fork(
            before=self._round.acquire,
            after_in_parent=self._round.release,
            after_in_child=self._round.release,
        )
        self._started_ms = int(time.time() * 1000)
        self._beat = -math.inf
        self._ended_token = ""
        self._renewed = ("", 0.0)

    def start(self) -> None:
        """Begin."""
        check_in(self._catalogue)
        self._thread.start()

    def stop(self) -> None:
        """End, and leave the catalogue."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=3)
        with contextlib.suppress(CatalogueUnavailable):
            self._catalogue.workers.leave("fit", self._name)

    def hand_back(self) -> None:
        """The worker is told to leave: end the child and put its job back, the attempt uncounted."""
        self._stop.set()
        with contextlib.suppress(CatalogueUnavailable):
            held = self._held()
            if held is None:
                return
            if child_state(held.pid):
                os.kill(held.pid, signal.SIGKILL)
            queue = self._catalogue.jobs.hand_back(held.job, held.token)
            if queue in QUEUES:
                log.info("job handed back", job=held.job)
                self._wake(queue)

    def _run(self) -> None:
        while not self._stop.is_set():
            pause_s = LOOK_S
            with self._round:
                try:
                    self._look()
                except CatalogueUnavailable:
                    log.warning("the catalogue can't be reached")
                    pause_s += 1.0
                except Exception:
                    log.exception("the keeper stumbled and goes on")
            self._stop.wait(pause_s)

    def _look(self) -> None:
        now = time.monotonic()
        self._keep_lease()
        if now - self._beat >= self._settings.heartbeat_s:
            self._beat = now
            self._register()
        for queue in self._lost.look():
            self._wake(queue)
        self._sweeper.look()

    def _held(self) -> Held | None:
        held = self._catalogue.jobs.held_by(self._holder)
        return None if held is None or held.token == self._ended_token else held

    def _keep_lease(self) -> None:
        held = self._held()
        if held is None:
            return
        state = child_state(held.pid)
        if not state:
            self._bury_attempt(held)
        elif why := self._catalogue.jobs.overstayed(held, self._settings.cancel_grace_s):
            log.warning("the child that fits a job is ended by force", job=held.job, why=why)
            os.kill(held.pid, signal.SIGKILL)
        elif state in "Tt":
            return  # stopped: whoever stopped it may never let it go on
        elif (
            time.monotonic() - self._renewed[1] >= self._settings.lease_renew_s
            or self._renewed[0] != held.token
        ):
            if self._catalogue.jobs.renew(held.job, held.token):
                self._renewed = held.token, time.monotonic()
            else:
                self._ended_token = held.token

    def _bury_attempt(self, held: Held) -> None:
        """The child is dead: its lease ends now, and what it was writing goes."""
        self._store.discard(held.token)
        queue = self._catalogue.jobs.release_dead(held.job, held.token)
        self._ended_token = held.token
        if queue:
            log.warning("the child that fitted a job is gone", job=held.job, then=queue)
        if queue in QUEUES:
            self._wake(queue)

    def _register(self) -> None:
        held = self._held()
        self._catalogue.workers.register_fit(
            FitWorker(
                name=self._name,
                host=socket.gethostname(),
                pid=os.getpid(),
                device=self._settings.device,
                queues=self._settings.queue_names,
                started_ms=self._started_ms,
                job=held.job if held else "",
            )
        )

    def _wake(self, queue: str) -> None:
        try:
            self._app.send_task(TASK, args=(queue,), queue=queue, ignore_result=True, retry=False)
        except Exception as error:  # kombu raises what its transport raises; the next sweep tries again
            log.warning("a wake-up was not sent", queue=queue, error=str(error))
