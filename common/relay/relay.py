"""One predict from name to answer: resolve, place, send, and retry what may be retried."""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.catalogue.records import PredictWorker, Version
from common.errors import ContextGone
from common.placement import HoldersFirst, Placement
from common.relay.client import WorkerConnections
from common.relay.rounds import ask_in_turn
from common.relay.snapshot import RoutingSnapshot
from common.relay.wire import Answer, Question


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
    point: str = "mean"


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
        return ask_in_turn(
            lambda: self._placement.order(asked.tenant, version, self._snapshot.workers),
            lambda worker, left_s: self._ask(worker, asked, version, left_s),
            self._connections,
            asked.deadline,
            asked.request_id,
        )

    def _ask(self, worker: PredictWorker, asked: Asked, version: Version, left_s: float) -> Answer:
        question = Question(
            tenant=asked.tenant,
            context=version.context,
            model=version.model,
            task=version.task,
            request_id=asked.request_id,
            deadline_s=left_s,
            quantiles=asked.quantiles,
            point=asked.point,
            rows=asked.kind,
        )
        answer = Answer.decode(self._connections.predict(worker.address, question, asked.rows, left_s + 0.25))
        if answer.context != version.context:
            raise ContextGone("a predict worker answered from another context; the answer was thrown away")
        return replace(answer, worker=worker.name)
