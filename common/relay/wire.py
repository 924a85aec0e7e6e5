"""What the API and a predict worker say to each other: HTTP, rows and answers as Arrow IPC.

Request: `POST /predict` with the headers below and the rows as an Arrow IPC stream.
Answer 200: an Arrow IPC stream; a column `probability:<i>` for class number i, or `mean`, the point asked for (`median`,
`mode`) and `quantile:<level>`, and the schema's metadata key `tabrelay` holds `Answer` facts as JSON. Any other status: the JSON object of
`TabrelayError.encode`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from common.models.protocol import Prediction

ARROW = "application/vnd.apache.arrow.stream"
METADATA_KEY = b"tabrelay"
#: Point estimates of a regression that an answer may hold.
POINTS = ("mean", "median", "mode")


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

    def headers(self) -> dict[str, str]:
        """As HTTP headers."""
        return {
            "content-type": ARROW,
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
        """As an Arrow IPC stream."""
        columns: dict[str, npt.NDArray[np.float64]] = {}
        if self.prediction.probabilities is not None:
            for i in range(self.prediction.probabilities.shape[1]):
                columns[f"probability:{i}"] = np.ascontiguousarray(self.prediction.probabilities[:, i])
        for point in POINTS:
            values = getattr(self.prediction, point)
            if values is not None:
                columns[point] = values
        if self.prediction.quantiles is not None:
            for i, level in enumerate(self.quantiles):
                columns[f"quantile:{level!r}"] = np.ascontiguousarray(self.prediction.quantiles[:, i])
        facts = {
            "context": self.context,
            "worker": self.worker,
            "target": self.target,
            "quantiles": self.quantiles,
            "timings_ms": self.timings_ms,
        }
        batch = pa.record_batch(
            {name: pa.array(values) for name, values in columns.items()},
        ).replace_schema_metadata({METADATA_KEY: orjson.dumps(facts)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return bytes(sink.getvalue())

    @classmethod
    def decode(cls, body: bytes) -> Answer:
        """From an Arrow IPC stream."""
        reader = pa.ipc.open_stream(body)
        batch = reader.read_next_batch()
        facts = orjson.loads(reader.schema.metadata[METADATA_KEY])

        def matrix(prefix: str) -> npt.NDArray[np.float64] | None:
            found = [
                batch.column(i).to_numpy() for i, n in enumerate(batch.schema.names) if n.startswith(prefix)
            ]
            return np.stack(found, axis=1) if found else None

        points = {point: batch.column(point).to_numpy() for point in POINTS if point in batch.schema.names}
        prediction = Prediction(probabilities=matrix("probability:"), quantiles=matrix("quantile:"), **points)
        return cls(
            prediction=prediction,
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
