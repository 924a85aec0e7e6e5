"""`POST /v1/datasets/{name}/predict`."""

from __future__ import annotations

import time
from collections.abc import Mapping

import orjson
import pyarrow as pa
from flask import Blueprint, Response, g, request

from api import schemas, views
from api.openapi import documented
from api.requests import answer, body_bytes, query_int, query_number, query_numbers, tenant
from api.services import services
from common.catalogue.records import Version
from common.errors import FieldError, InvalidRequest, TooLarge
from common.relay.wire import ARROW, JSON, METADATA_KEY, POINTS, Answer, encode_rows
from common.service.predicts import PredictRequest
from common.tables.json_reader import loads_json, table_from_json
from common.tables.parse import detect_format
from common.tables.shape import predict_limits
from common.tables.target import Target

blueprint = Blueprint("predict", __name__, url_prefix="/v1")

#: JSON bodies up to this size go to the predict worker as they are (docs/decisions/0004).
JSON_WHOLE_BYTES = 32 * 1024
#: Larger ones up to this size are read here; the largest, and all files, by the parser child.
JSON_INLINE_BYTES = 1024**2


@blueprint.post("/datasets/<name>/predict")
@documented(
    "predict",
    {"200": schemas.Prediction},
    ("400", "404", "410", "413", "415", "422", "429", "503", "504"),
    query=schemas.PredictQuery,
    json=schemas.Rows,
)
def predict(name: str) -> Response:
    """Answer for the rows from the dataset's current version, or from `?version=`."""
    arrived: float = g.arrived
    version = query_int("version", None, 1, 2**53)
    resolved = services().predicts.resolve(tenant(), name, version)
    deadline_ms = query_int("deadline_ms", None, 1, 2**53)
    threshold = query_number("threshold")
    rows, kind = _rows(resolved)
    read = time.monotonic()
    found, answered, output = services().predicts.predict(
        PredictRequest(
            tenant=tenant(),
            dataset=name,
            rows=rows,
            kind=kind,
            request_id=g.request_id,
            arrived=arrived,
            version=version,
            output=request.args.get("output") or None,
            quantiles=query_numbers("quantiles"),
            threshold=threshold,
            deadline_s=None if deadline_ms is None else deadline_ms / 1000,
        ),
        resolved,
    )
    relayed = time.monotonic()
    timings = _timings(answered, read - arrived, relayed - read)
    as_arrow = request.accept_mimetypes.best_match(["application/json", ARROW]) == ARROW
    if as_arrow:
        response = Response(_arrow(name, found, answered, output, threshold, timings), content_type=ARROW)
    else:
        response = answer(views.prediction(name, found, answered, output, threshold, timings))
    encoded = (time.monotonic() - relayed) * 1000
    shown = {**timings, "encode": encoded}
    response.headers["Server-Timing"] = ", ".join(f"{part};dur={ms:.3f}" for part, ms in shown.items())
    return response


def _timings(answered: Answer, parse_s: float, relay_s: float) -> dict[str, float]:
    """Milliseconds by part; `relay` is what the way to the worker and back took beyond the worker's own parts."""
    parts = dict(answered.timings_ms)
    worker_ms = sum(parts.values())
    parts["parse"] = parts.get("parse", 0.0) + parse_s * 1000
    parts["relay"] = max(relay_s * 1000 - worker_ms, 0.0)
    parts["total"] = (parse_s + relay_s) * 1000
    return {part: round(ms, 3) for part, ms in parts.items()}


def _rows(version: Version) -> tuple[bytes, str]:
    """The body's rows as a predict worker reads them, and their content type.

    Of a CSV, the dataset's spellings of a missing cell become gaps.
    """
    settings = services().settings
    format = detect_format(None, request.content_type)
    body = body_bytes(settings.max_predict_bytes)
    if format == "json" and len(body) <= JSON_WHOLE_BYTES:
        return body, JSON
    limits = predict_limits(settings)
    if format == "json" and len(body) <= JSON_INLINE_BYTES:
        return encode_rows(table_from_json(loads_json(body), limits)), ARROW
    if not body:
        raise InvalidRequest("the body is empty", errors=[FieldError("body", "at least one row is needed")])
    rows: bytes = services().parser.parse_rows(
        body,
        format,
        limits,
        encoding=request.args.get("encoding") or None,
        missing=version.schema.get("missing"),
    )
    most = settings.max_predict_bytes * 4
    if len(rows) > most:
        raise TooLarge(f"the rows take {len(rows)} bytes, the most is {most}", limit=most, size=len(rows))
    return rows, ARROW


def _arrow(
    name: str,
    version: Version,
    answered: Answer,
    output: str,
    threshold: float | None,
    timings: Mapping[str, float],
) -> bytes:
    """The answer as an Arrow IPC stream: `prediction`, then one column a class, a point estimate or a level."""
    numbers = answered.prediction
    facts = views.prediction(name, version, answered, output, threshold, timings)
    facts.pop("probabilities", None)
    predictions = facts.pop("predictions")
    if numbers.probabilities is None:
        columns = {"prediction": pa.array(predictions, pa.float64())}
    else:
        columns = {"prediction": Target.decode(answered.target).array(predictions)}
    if numbers.probabilities is not None:
        for i, label in enumerate(facts["classes"]):
            text = ("true" if label else "false") if isinstance(label, bool) else str(label)
            columns[f"probability:{text}"] = pa.array(numbers.probabilities[:, i])
    facts.pop("quantiles", None)
    for point in POINTS:
        if facts.pop(point, None) is not None:
            columns[point] = pa.array(getattr(numbers, point))
    if numbers.quantiles is not None:
        for i, level in enumerate(answered.quantiles):
            columns[f"quantile:{level!r}"] = pa.array(numbers.quantiles[:, i])
    table = pa.table(columns).replace_schema_metadata({METADATA_KEY: orjson.dumps(facts)})
    return encode_rows(table)
