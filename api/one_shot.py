"""`POST /v1/predict`: a training table and the rows to answer from it, in one body."""

from __future__ import annotations

import time
from collections.abc import Mapping

from flask import Blueprint, Response, g, request

from api import schemas, views
from api.events import Peer
from api.openapi import documented
from api.requests import answer, body_bytes, query_int, tenant
from api.services import services
from common.errors import InvalidRequest, UnsupportedMediaType
from common.relay.wire import Answer
from common.service.one_shots import OneShotRequest
from common.tables.json_reader import loads_json

blueprint = Blueprint("one_shot", __name__, url_prefix="/v1")

#: Bytes of JSON that a cell may take on average.
BYTES_PER_CELL = 64
LEAST_BODY_BYTES = 1024**2


@blueprint.post("/predict")
@documented(
    "predict",
    {"200": schemas.OneShotPrediction},
    ("400", "404", "413", "415", "422", "429", "503", "504"),
    query=schemas.OneShotQuery,
    json=schemas.OneShot,
)
def predict_once() -> Response:
    """Answer `eval_features` from a small training table that comes with them; nothing is stored."""
    arrived: float = g.arrived
    services().one_shots.admit()
    if request.mimetype not in ("application/json", ""):
        raise UnsupportedMediaType("a one-shot is application/json; fit a dataset for files")
    deadline_ms = query_int("deadline_ms", None, 1, 2**53)
    most = max(BYTES_PER_CELL * services().settings.one_shot_max_cells, LEAST_BODY_BYTES)
    body = loads_json(body_bytes(most))
    if not isinstance(body, Mapping):
        raise InvalidRequest("the body must be an object with train_features, train_labels and eval_features")
    peer = Peer(request.environ.get("gunicorn.socket"))
    try:
        found = services().one_shots.predict(
            OneShotRequest(
                tenant=tenant(),
                body=body,
                request_id=g.request_id,
                arrived=arrived,
                deadline_s=None if deadline_ms is None else deadline_ms / 1000,
                gone=peer.gone,
            )
        )
    finally:
        peer.forget()
    timings = _timings(found.told.answer, time.monotonic() - arrived)
    response = answer(views.one_shot(found, timings))
    response.headers["Server-Timing"] = ", ".join(f"{part};dur={ms:.3f}" for part, ms in timings.items())
    return response


def _timings(answered: Answer, total_s: float) -> dict[str, float]:
    """Milliseconds by part; `api` is what reading the body and the way to the worker and back took."""
    parts = dict(answered.timings_ms)
    parts["api"] = max(total_s * 1000 - sum(parts.values()), 0.0)
    parts["total"] = total_s * 1000
    return {part: round(ms, 3) for part, ms in parts.items()}
