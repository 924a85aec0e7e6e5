"""Predictions, read from JSON or from an Arrow stream into the same dataclass."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tabrelay.client.tables import ARROW_STREAM

if TYPE_CHECKING:
    import httpx
    import pandas as pd

PROBABILITY = "probability:"
QUANTILE = "quantile:"
#: Point estimates of a regression.
POINTS = ("mean", "median", "mode")
#: Where an Arrow answer keeps its facts, as JSON text in the schema's metadata.
FACTS_KEY = b"tabrelay"


@dataclass(frozen=True)
class Prediction:
    """One answer: an entry a row, in the order of the rows."""

    dataset: str
    version: int | None = None
    context: str | None = None
    model: str | None = None
    task: str | None = None
    #: Labels in the order of the probabilities; empty for regression.
    classes: tuple[Any, ...] = ()
    #: The label, or the point estimate of a regression.
    predictions: Sequence[Any] = ()
    #: One list a row with a probability a class.
    probabilities: Sequence[Sequence[float]] | None = None
    mean: Sequence[float] | None = None
    median: Sequence[float] | None = None
    mode: Sequence[float] | None = None
    #: One list, an entry a row, for each asked level.
    quantiles: Mapping[float, Sequence[float]] = field(default_factory=dict)
    worker: str | None = None
    timings_ms: Mapping[str, float] = field(default_factory=dict)
    #: Of a one-shot: the ensemble's size, and whether its training table's context was there before.
    n_estimators: int | None = None
    reused: bool | None = None

    def __len__(self) -> int:
        return len(self.predictions)

    def columns(self) -> dict[str, list[Any]]:
        """The answer as named columns: `prediction`, `probability:<label>`, `mean`, `median`, `mode`, `quantile:<level>`."""
        named: dict[str, list[Any]] = {"prediction": list(self.predictions)}
        if self.probabilities is not None:
            for index, label in enumerate(self.classes):
                named[f"{PROBABILITY}{label_text(label)}"] = [row[index] for row in self.probabilities]
        for point in POINTS:
            if (values := getattr(self, point)) is not None:
                named[point] = list(values)
        for level, by_row in self.quantiles.items():
            named[f"{QUANTILE}{level!r}"] = list(by_row)
        return named

    def to_frame(self) -> pd.DataFrame:
        """`columns` as a DataFrame."""
        import pandas as pd

        return pd.DataFrame(self.columns())


def label_text(label: Any) -> str:
    """A label as text; booleans as JSON writes them."""
    return json.dumps(label) if isinstance(label, bool) else str(label)


def decode(response: httpx.Response, output: str | None = None) -> Prediction:
    """Read an answer of either content type; an Arrow answer may hold more than the asked output."""
    media_type = response.headers.get("Content-Type", "").partition(";")[0].strip()
    told = from_arrow(response.content) if media_type == ARROW_STREAM else from_json(response.json())
    return replace(told, probabilities=None) if output == "label" else told


def from_json(data: Mapping[str, Any]) -> Prediction:
    """Read a JSON answer; unknown members are ignored."""
    return _prediction(
        data,
        predictions=_first(data, "predictions", "mean"),
        probabilities=data.get("probabilities"),
        **{point: data.get(point) for point in POINTS},
        quantiles=_quantiles(data.get("quantiles"), data.get("levels")),
    )


def from_arrow(content: bytes) -> Prediction:
    """Read an Arrow stream; unknown columns are ignored."""
    import pyarrow as pa

    with pa.ipc.open_stream(content) as reader:
        table = reader.read_all()
    facts = json.loads((table.schema.metadata or {}).get(FACTS_KEY, b"{}"))
    names: list[str] = table.column_names
    columns = {name: table.column(name).to_pylist() for name in names}
    shares = [columns[name] for name in names if name.startswith(PROBABILITY)]
    return _prediction(
        facts,
        predictions=_first(columns, "prediction", "mean"),
        probabilities=[list(row) for row in zip(*shares, strict=True)] if shares else None,
        **{point: columns.get(point) for point in POINTS},
        quantiles=_quantiles({n.removeprefix(QUANTILE): columns[n] for n in names if n.startswith(QUANTILE)}),
    )


def _prediction(facts: Mapping[str, Any], **values: Any) -> Prediction:
    version = facts.get("version")
    return Prediction(
        dataset=str(facts.get("dataset") or ""),
        version=None if version is None else int(version),
        context=facts.get("context"),
        model=facts.get("model"),
        task=facts.get("task"),
        classes=tuple(facts.get("classes") or ()),
        worker=facts.get("worker"),
        timings_ms=dict(facts.get("timings_ms") or {}),
        n_estimators=facts.get("n_estimators"),
        reused=facts.get("reused"),
        **values,
    )


def _first(data: Mapping[str, Any], *names: str) -> Sequence[Any]:
    for name in names:
        values = data.get(name)
        if isinstance(values, list):
            return values
    return ()


def _quantiles(value: Any, levels: Any = None) -> dict[float, Sequence[float]]:
    """Values by level, from an object of lists, or from one list a row and the levels."""
    if isinstance(value, Mapping):
        return {float(level): values for level, values in value.items()}
    if isinstance(value, list) and isinstance(levels, list):
        return {float(level): [row[index] for row in value] for index, level in enumerate(levels)}
    return {}
