"""The manifest: everything about a context that is not a tensor, as one JSON object in the file's header."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from common.errors import ContextDamaged, ContextIncompatible
from common.models.protocol import Prediction
from common.tables.features import Features

FORMAT = 1


@dataclass(frozen=True)
class Probes:
    """A few rows of the training table and what the fitted estimator answered for them."""

    names: tuple[str, ...]
    columns: tuple[tuple[float | str | None, ...], ...]  # one a feature; null is missing
    text: tuple[bool, ...]
    answers: tuple[tuple[float, ...], ...]  # one a row: probabilities, or the mean

    @classmethod
    def of(cls, features: Features, prediction: Prediction) -> Probes:
        """From the rows and their answer."""
        text = tuple(features.is_text(i) for i in range(len(features.names)))
        columns = tuple(
            tuple(v.as_py() for v in values)
            if is_text
            else tuple(None if math.isnan(v) else v for v in values.tolist())
            for values, is_text in zip(features.values, text, strict=True)
        )
        return cls(features.names, columns, text, tuple(map(tuple, numbers(prediction).tolist())))

    def features(self) -> Features:
        """The rows again."""
        values = tuple(
            pa.array(column, pa.string())
            if is_text
            else np.array([math.nan if v is None else v for v in column], dtype=np.float64)
            for column, is_text in zip(self.columns, self.text, strict=True)
        )
        return Features(self.names, values, len(self.answers))


def numbers(prediction: Prediction) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A prediction as float64 (n, k) or (n, 1)."""
    if prediction.probabilities is not None:
        return prediction.probabilities
    if prediction.mean is None:
        raise ValueError("a prediction holds probabilities or means")
    return prediction.mean.reshape(-1, 1)


@dataclass(frozen=True)
class Manifest:
    """What a context is and what it needs."""

    model: str
    task: str
    family: str
    state_version: int
    weights_digest: str
    precision: str
    libraries: Mapping[str, str]
    key: str  # context key
    table: str  # digest of the canonical table
    rows: int
    columns: int  # features, before the model's own filter
    target: Mapping[str, Any]  # Target.encode()
    schema: Mapping[str, Any]  # TableSchema.encode()
    options: Mapping[str, Any]
    state: Mapping[str, Any]  # the adapter's
    tensor_bytes: int
    timings_ms: Mapping[str, float]
    probes: Probes
    created_at: str  # ISO 8601 UTC
    cache: str = "kv"  # one of CACHES
    format: int = FORMAT

    def encode(self) -> str:
        """As JSON text."""
        return orjson.dumps(asdict(self)).decode()

    @classmethod
    def decode(cls, text: str) -> Manifest:
        """From JSON text; raises ContextIncompatible for another format, ContextDamaged for anything not a manifest."""
        try:
            stored = orjson.loads(text)
            if stored["format"] != FORMAT:
                raise ContextIncompatible(
                    f"the context has format {stored['format']!r}, this release reads {FORMAT}"
                )
            probes = stored.pop("probes")
            manifest = cls(
                **stored,
                probes=Probes(
                    names=tuple(probes["names"]),
                    columns=tuple(map(tuple, probes["columns"])),
                    text=tuple(probes["text"]),
                    answers=tuple(map(tuple, probes["answers"])),
                ),
            )
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ContextDamaged(f"the context's manifest can't be read: {error}") from error
        manifest._check()
        return manifest

    def _check(self) -> None:
        """Every field has the type that it is declared with."""
        for name, kinds in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise ContextDamaged(f"the context's manifest has a wrong {name}")


_TEXTS = ("model", "task", "family", "weights_digest", "precision", "cache", "key", "table", "created_at")
_COUNTS = ("state_version", "rows", "columns", "tensor_bytes")
_OBJECTS = ("libraries", "target", "schema", "options", "state", "timings_ms")
_KINDS: Mapping[str, type] = (
    dict.fromkeys(_TEXTS, str) | dict.fromkeys(_COUNTS, int) | dict.fromkeys(_OBJECTS, dict)
)
