"""One predict from name to answer: resolve, place, send, and retry what may be retried."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from common import logs
from common.catalogue.records import PredictWorker, Version
from common.errors import ContextGone, DeadlinePassed, NoPredictWorker, WorkerBusy
from common.placement import HoldersFirst, Placement
from common.relay.client import Lost, Refused, WorkerConnections
from common.relay.snapshot import RoutingSnapshot
from common.relay.wire import Answer, Question

log = logs.get("relay")

#: A request whose connection was lost this often is given up, so that one deadly request can't fell every worker.
LOST_MOST = 2
#: Seconds between two rounds over workers that all refused.
PAUSE_S = 0.05


@dataclass(frozen=True)
class Asked:
    """A predict as the service layer hands it over; `rows` is an Arrow IPC stream, or JSON as the client sent it."""

    tenant: str
    dataset: str
    version: int | None
    rows: bytes
    kind: str  # content type of the rows
    request_id: str
    deadline: float  # time.monotonic()
    quantiles: tuple[float, ...] = ()


class Relay:
    """Sends predicts to predict workers."""

    def __init__(self, snapshot: RoutingSnapshot, placement: Placement | None = None) -> None:
        self._snapshot = snapshot
        self._placement = placement or HoldersFirst()
        self._connections = WorkerConnections()

    def close(self) -> None:
        """Close the idle connections."""
        self._connections.close()

    def predict(self, asked: Asked, version: Version) -> tuple[Version, Answer]:
        """The answer of exactly this version's context, or the documented error.

        Raises ContextGone (410), WorkerBusy (429), NoPredictWorker (503), DeadlinePassed (504), and what the worker
        reports for the rows.
        """
        try:
            return version, self._send(asked, version)
        except ContextGone:
            again = self._snapshot.resolve_again(asked.tenant, asked.dataset, asked.version)
            if again.context == version.context:
                raise
            return again, self._send(asked, again)

    def _send(self, asked: Asked, version: Version) -> Answer:
        lost = 0
        busy: WorkerBusy | None = None
        while True:
            workers = self._placement.order(asked.tenant, version, self._snapshot.workers)
            for worker in workers:
                left = asked.deadline - time.monotonic()
                if left <= 0:
                    raise self._too_late(busy, reached=bool(lost))
                try:
                    return self._ask(worker, asked, version, left)
                except Refused:
                    self._connections.forget(worker.address)
                except Lost as error:
                    self._connections.forget(worker.address)
                    lost += 1
                    log.warning(
                        "connection lost", worker=worker.name, request_id=asked.request_id, error=str(error)
                    )
                    if lost >= LOST_MOST:
                        raise NoPredictWorker(
                            f"the connection was lost {lost} times while this request was being answered",
                            retry_after_s=1,
                        ) from error
                except WorkerBusy as error:
                    busy = error
            if busy is not None:
                raise busy
            left = asked.deadline - time.monotonic()
            if left <= PAUSE_S:
                raise self._too_late(busy, reached=bool(lost))
            time.sleep(PAUSE_S)

    def _ask(self, worker: PredictWorker, asked: Asked, version: Version, left_s: float) -> Answer:
        question = Question(
            tenant=asked.tenant,
            context=version.context,
            model=version.model,
            task=version.task,
            request_id=asked.request_id,
            deadline_s=left_s,
            quantiles=asked.quantiles,
            rows=asked.kind,
        )
        answer = Answer.decode(self._connections.predict(worker.address, question, asked.rows, left_s + 0.25))
        if answer.context != version.context:
            raise ContextGone("a predict worker answered from another context; the answer was thrown away")
        return replace(answer, worker=worker.name)

    @staticmethod
    def _too_late(busy: WorkerBusy | None, *, reached: bool) -> DeadlinePassed | NoPredictWorker | WorkerBusy:
        if busy is not None:
            return busy
        return DeadlinePassed(retry_after_s=1) if reached else NoPredictWorker(retry_after_s=2)
