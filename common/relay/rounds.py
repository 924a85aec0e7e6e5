"""Asking workers in turn until one answers: what is tried again, how often, and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from common import logs
from common.catalogue.records import PredictWorker
from common.errors import DeadlinePassed, DeviceFull, NoPredictWorker, WorkerBusy
from common.relay.client import Lost, Refused, WorkerConnections

log = logs.get("relay")

#: A request whose connection was lost this often is given up, so that one deadly request can't fell every worker.
LOST_MOST = 2
#: Seconds between two rounds over workers that all refused.
PAUSE_S = 0.05

T = TypeVar("T")


def ask_in_turn(
    workers: Callable[[], Sequence[PredictWorker]],
    ask: Callable[[PredictWorker, float], T],
    connections: WorkerConnections,
    deadline: float,
    request_id: str,
) -> T:
    """The first answer; `ask` gets a worker and the seconds left, `workers` is called again for each round.

    Raises WorkerBusy (429), DeviceFull and NoPredictWorker (503), DeadlinePassed (504), and what the worker reports.
    """
    lost = 0
    busy: WorkerBusy | DeviceFull | None = None
    while True:
        for worker in workers():
            left = deadline - time.monotonic()
            if left <= 0:
                raise _too_late(busy, reached=bool(lost))
            try:
                return ask(worker, left)
            except Refused:
                connections.forget(worker.address)
            except Lost as error:
                connections.forget(worker.address)
                lost += 1
                log.warning("connection lost", worker=worker.name, request_id=request_id, error=str(error))
                if lost >= LOST_MOST:
                    raise NoPredictWorker(
                        f"the connection was lost {lost} times while this request was being answered",
                        retry_after_s=1,
                    ) from error
            except (WorkerBusy, DeviceFull) as error:
                busy = error
        if busy is not None:
            raise busy
        left = deadline - time.monotonic()
        if left <= PAUSE_S:
            raise _too_late(busy, reached=bool(lost))
        time.sleep(PAUSE_S)


def _too_late(
    busy: WorkerBusy | DeviceFull | None, *, reached: bool
) -> DeadlinePassed | DeviceFull | NoPredictWorker | WorkerBusy:
    if busy is not None:
        return busy
    return DeadlinePassed(retry_after_s=1) if reached else NoPredictWorker(retry_after_s=2)
