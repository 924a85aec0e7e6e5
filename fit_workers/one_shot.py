"""One-shots in a fit worker: their tables are fitted between two jobs, and the contexts handed to whoever asked."""

from __future__ import annotations

import time

from billiard.exceptions import SoftTimeLimitExceeded

from common import logs
from common.contexts.build import build_context
from common.errors import Cancelled, InternalError, TabrelayError
from common.lane import Made, OneShotLane
from common.relay.one_shot import OneShotQuestion
from fit_workers.worker import Worker

log = logs.get("fit")

#: One-shots that go before a waiting job; then that job's turn comes.
MOST_IN_A_ROW = 8


def serve_lane(worker: Worker) -> None:
    """Fit what waits in the lane; returns at once when nothing does. Raises CatalogueUnavailable."""
    lane = OneShotLane(worker.catalogue, worker.settings)
    for _ in range(MOST_IN_A_ROW):
        taken = lane.take()
        if taken is None:
            return
        id, body = taken
        try:
            _fit(worker, lane, id, body)
        except Cancelled:
            log.info("a one-shot was given up by who asked", one_shot=id)
        except SoftTimeLimitExceeded:
            lane.failed(id, InternalError("the one-shot was stopped by its worker's time limit"))
            raise
        except TabrelayError as error:
            lane.failed(id, error)
        except Exception:
            log.exception("one-shot failed", one_shot=id)
            lane.failed(id, InternalError("the one-shot failed; the fit worker's log has the cause"))


def _fit(worker: Worker, lane: OneShotLane, id: str, body: bytes) -> None:
    """Write and verify the context of one table, as a job does, under its temporary name."""
    began = time.monotonic()
    question, train, _ = OneShotQuestion.decode(body)
    training = question.training(train)
    adapter, backbone = worker.backbone(question.model, question.task)
    fitted = adapter.fit(training, backbone, question.options, lambda fraction: lane.wanted(id))
    built = build_context(
        worker.store,
        question.tenant,
        id,
        adapter,
        backbone,
        fitted,
        training,
        table_digest="",
        key=question.key,
        options=question.options,
        timings_ms={},
        on_verify=lambda: lane.wanted(id),
    )
    lane.made(question.tenant, Made(id, built.digest, round((time.monotonic() - began) * 1000, 1)))
    log.info("one-shot fitted", one_shot=id, rows=training.features.rows, context=built.digest[:12])
