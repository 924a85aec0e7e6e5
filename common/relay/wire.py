"""What the API and a predict worker say to each other, over HTTP.

Request: `POST /predict` with the headers below and the rows: an Arrow IPC stream, or a small JSON body as the client
sent it (docs/decisions/0004).
Answer 200: `Answer.encode`. Any other status: the JSON object of `TabrelayError.encode`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from common.models.protocol import Prediction

ARROW = "application/vnd.apache.arrow.stream"
JSON = "application/json"
#: What an answer looks like between worker and API.
NUMBERS = "application/x-tabrelay-numbers"
METADATA_KEY = b"tabrelay"
#: Point estimates of a regression that an answer may hold.
POINTS = ("mean", "median", "mode")
_NUMBERS = tuple(field.name for field in fields(Prediction))


@dataclass(frozen=True)
class Question:
    """A predict as the worker gets it."""

    tenant: str
    context: str  # digest; the answer comes from exactly this context
    model: str
    task: str
    request_id: str
    deadline_s: float  # seconds left when sent
    quantiles: tuple[float, ...] = ()
    point: str = "mean"
    rows: str = ARROW  # content type of the rows

    def headers(self) -> dict[str, str]:
        """As HTTP headers."""
        return {
            "content-type": self.rows,
            "x-tenant": self.tenant,
            "x-context": self.context,
            "x-model": self.model,
            "x-task": self.task,
            "x-request-id": self.request_id,
            "x-deadline-s": f"{self.deadline_s:.3f}",
            "x-quantiles": ",".join(repr(level) for level in self.quantiles),
            "x-point": self.point,
        }

    @classmethod
    def read(cls, headers: Mapping[str, str]) -> Question:
        """From HTTP headers; raises KeyError or ValueError when they are not ours."""
        levels = headers.get("x-quantiles", "")
        return cls(
            tenant=headers["x-tenant"],
            context=headers["x-context"],
            model=headers["x-model"],
            task=headers["x-task"],
            request_id=headers["x-request-id"],
            deadline_s=float(headers["x-deadline-s"]),
            quantiles=tuple(float(level) for level in levels.split(",") if level),
            point=headers.get("x-point", "mean"),
            rows=headers["content-type"],
        )


@dataclass(frozen=True)
class Answer:
    """A worker's answer: numbers and the facts beside them."""

    prediction: Prediction
    context: str
    worker: str
    target: Mapping[str, Any]  # Target.encode()
    quantiles: tuple[float, ...] = ()
    timings_ms: Mapping[str, float] = field(default_factory=dict)

    def encode(self) -> bytes:
        """A line of JSON with the facts and the arrays' shapes, then the arrays, float64, little-endian."""
        arrays = {
            name: np.ascontiguousarray(values, dtype="<f8")
            for name in _NUMBERS
            if (values := getattr(self.prediction, name)) is not None
        }
        facts = {
            "context": self.context,
            "worker": self.worker,
            "target": self.target,
            "quantiles": self.quantiles,
            "timings_ms": self.timings_ms,
            "arrays": {name: values.shape for name, values in arrays.items()},
        }
        return b"".join((orjson.dumps(facts), b"\n", *(values.tobytes() for values in arrays.values())))

    @classmethod
    def decode(cls, body: bytes) -> Answer:
        """What `encode` wrote; raises ValueError when it is not that."""
        at = body.index(b"\n")
        facts = orjson.loads(body[:at])
        at += 1
        arrays: dict[str, npt.NDArray[np.float64]] = {}
        for name, shape in facts["arrays"].items():
            count = math.prod(shape)
            arrays[name] = np.frombuffer(body, "<f8", count, at).reshape(shape)
            at += count * 8
        if at != len(body):
            raise ValueError(f"the answer has {len(body)} bytes, its arrays end at {at}")
        return cls(
            prediction=Prediction(**arrays),
            context=facts["context"],
            worker=facts["worker"],
            target=facts["target"],
            quantiles=tuple(facts["quantiles"]),
            timings_ms=facts["timings_ms"],
        )


def encode_rows(rows: pa.Table) -> bytes:
    """Rows as an Arrow IPC stream, one batch."""
    table = rows.combine_chunks()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def decode_rows(body: bytes | memoryview) -> pa.Table:
    """Rows of an Arrow IPC stream that this product wrote."""
    return pa.ipc.open_stream(body).read_all()
