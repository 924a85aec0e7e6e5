"""A fit by the unmodified library, on a shared module, with progress and cancel at the model's blocks.

Upstream: tabicl/_sklearn/classifier.py and regressor.py (`fit`, `_build_kv_cache`), _sklearn/preprocessing.py.

The library groups ensemble members by scaling method in the order of a Python set, which PYTHONHASHSEED decides
and which moves the last bits of the answers. The order that came is kept and stored, so that a context equals the
library's own estimator; fit workers run with PYTHONHASHSEED=0, so that equal fits make equal contexts.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tabicl import TabICLClassifier, TabICLRegressor

from common.errors import FieldError, InvalidRequest, InvalidTable, InvalidTarget, TabrelayError, TooLarge
from common.models.protocol import Prediction, PredictOptions, Progress, TrainingTable, spread
from common.models.tabicl.backbone import TabICLBackbone
from common.tables.features import Features
from common.tables.target import Target

#: Weight of the first row block's hook in the first forward.
_ROW_STAGE_BEGINS = 3.0
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_DEFAULTS = PredictOptions()
#: Point estimates of a regression. The library's `variance` is not right: it is scaled back like a value.
POINTS = ("mean", "median")


class TabICLFitted:
    """A fitted estimator of the library; it answers as the library does."""

    def __init__(
        self,
        estimator: Any,
        backbone: TabICLBackbone,
        target: Target,
        inputs: int,
        precision: str = "native",
        cache: str = "kv",
    ) -> None:
        self.estimator = estimator
        self.backbone = backbone
        self.target = target
        self.inputs = inputs  # features of the schema, in its order
        self.precision = precision  # in which it is to be stored; it answers as computed
        self.cache = cache

    def predict(self, features: Features, options: PredictOptions = _DEFAULTS) -> Prediction:
        """The library's answer for at least one row; not safe beside a fit on the same backbone."""
        frame = features.to_frame()
        try:
            with torch.no_grad(), _quiet():
                if self.target.task == "classification":
                    answer = self.estimator.predict_proba(frame)
                    return Prediction(probabilities=spread(answer, self.estimator.classes_, self.target))
                wanted = list(dict.fromkeys(["mean", options.point]))
                if options.quantiles:
                    wanted.append("quantiles")
                answers = self.estimator.predict(
                    frame, output_type=wanted, alphas=list(options.quantiles) or None
                )
                if len(wanted) == 1:
                    answers = {wanted[0]: answers}
                return Prediction(**{name: answers[name].astype(np.float64) for name in wanted})
        finally:
            self.backbone.module.clear_cache()


def fit(
    table: TrainingTable, backbone: TabICLBackbone, options: Mapping[str, Any], progress: Progress
) -> TabICLFitted:
    """Fit `n_estimators` members with `seed` on the table; the backbone holds no context afterwards.

    `precision` and `cache` are those of the context that it is to become, `native` and `kv` when not given.

    Raises InvalidTable, InvalidTarget, InvalidRequest (the backbone is of the other task), TooLarge (out of
    memory), and whatever `progress` raises.
    """
    classification = table.target.task == "classification"
    if classification != (backbone.max_classes > 0):
        raise InvalidRequest(f"The weights of {backbone.weights.model!r} are not for {table.target.task}.")
    check(table, backbone)
    progress(0.0)
    cache = str(options.get("cache", "kv"))
    estimator = (TabICLClassifier if classification else TabICLRegressor)(
        n_estimators=int(options["n_estimators"]),
        random_state=int(options["seed"]),
        kv_cache=cache,
        device=backbone.device,
        use_amp=False,
        use_fa3=False,
    )
    # The library would read its checkpoint again, for every fit.
    estimator._load_model = lambda: None
    estimator.model_ = backbone.module
    module = backbone.module
    try:
        with _quiet(), _watched(module, cache, lambda: _forwards(estimator), progress):
            estimator.fit(table.features.to_frame(), table.y)
    except TabrelayError:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise _too_large(table) from error
    except RuntimeError as error:
        if "can't allocate memory" in str(error):
            raise _too_large(table) from error
        raise
    except (ValueError, TypeError, ArithmeticError) as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InvalidTable(f"The model can't use this table: {said[:300]}") from error
    finally:
        module.clear_cache()
    precision = str(options.get("precision", "native"))
    return TabICLFitted(estimator, backbone, table.target, len(table.features.names), precision, cache)


def check(table: TrainingTable, backbone: TabICLBackbone) -> None:
    """Raise InvalidTable or InvalidTarget for what the backbone can't be fitted on."""
    features, y, target = table.features, table.y, table.target
    if features.rows < 1 or not features.names:
        raise InvalidTable(
            f"The table has {features.rows} rows and {len(features.names)} features; it needs one of each."
        )
    if len(y) != features.rows:
        raise InvalidTarget(f"Target {target.name!r} has {len(y)} labels for {features.rows} rows.")
    infinite = [
        name
        for name, values in zip(features.names, features.values, strict=True)
        if isinstance(values, np.ndarray) and np.isinf(values).any()
    ]
    if infinite:
        raise InvalidTable(
            f"Column {infinite[0]!r} holds infinity, which is not a number a model can use.",
            errors=[FieldError(name, "holds infinity") for name in infinite],
        )
    if target.task == "regression":
        values = np.asarray(y, dtype=np.float64)
        if not np.isfinite(values).all():
            raise _refused(target, "has missing or infinite values; leave such rows out")
        if np.abs(values).max() > _FLOAT32_MAX:
            raise _refused(target, f"has values beyond {_FLOAT32_MAX:.2g}; rescale it")
        return
    present = len(np.unique(y))
    if present > backbone.max_classes:
        raise _refused(
            target,
            f"has {present} classes; {backbone.max_classes} is the most that {backbone.weights.model} takes; merge "
            "rare classes",
            limit=backbone.max_classes,
            size=present,
        )


def _refused(target: Target, message: str, **facts: Any) -> InvalidTarget:
    return InvalidTarget(
        f"Target {target.name!r} {message}.", errors=[FieldError(target.name, message)], **facts
    )


def _too_large(table: TrainingTable) -> TooLarge:
    rows, columns = table.features.rows, len(table.features.names)
    return TooLarge(
        f"The fit of {rows:,} rows x {columns:,} features needs more memory than this worker has; use fewer rows, "
        "columns or estimators.",
        rows=rows,
        columns=columns,
    )


def _forwards(estimator: Any) -> int:
    """How many forwards the fit makes; known once its ensemble is drawn."""
    groups = estimator.ensemble_generator_.ensemble_configs_.values()
    return sum(math.ceil(len(group) / (estimator.batch_size or len(group))) for group in groups)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's warnings: high cardinality and feature names are not the user's faults."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _watched(module: Any, cache: str, forwards: Callable[[], int], progress: Progress) -> Iterator[None]:
    """Call `progress` after every block of the module's forwards; what it raises leaves the forward."""
    # The column stage calls the two halves of its blocks, never the blocks themselves.
    columns = [
        half for b in module.col_embedder.tf_col.blocks for half in (b.multihead_attn1, b.multihead_attn2)
    ]
    rows = list(module.row_interactor.tf_row.blocks)
    # A fit that keeps the rows' representations ends with them.
    last = list(module.icl_predictor.tf_icl.blocks) if cache == "kv" else rows
    blocks = [*columns, *rows, *last] if cache == "kv" else [*columns, *rows]
    pace = _Pace(len(blocks), len(columns))
    previous, best = -1, 0.0

    def started(*_: Any) -> None:
        nonlocal previous
        if previous >= len(blocks) - len(last):
            pace.next_forward()
            previous = -1
        pace.resume()

    def finished(position: int) -> None:
        nonlocal previous, best
        previous = position
        # Short of memory, the library runs a stage in pieces, so positions repeat: never report less than before.
        best = max(best, min(1.0, pace.done(position) / forwards()))
        progress(best)

    def hook(position: int) -> Callable[..., None]:
        return lambda *_: finished(position)

    handles = [block.register_forward_hook(hook(position)) for position, block in enumerate(blocks)]
    handles.append(columns[0].register_forward_pre_hook(started))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Pace:
    """How much of a fit's forwards is done; each takes as long as the first, and so do its blocks."""

    def __init__(self, blocks: int, columns: int) -> None:
        self._weights = [1.0] * blocks
        # The end of the column stage comes before this block's hook: 2.5 to 4 times the time of others.
        self._weights[columns] = _ROW_STAGE_BEGINS
        self._spent = [0.0] * blocks
        self._forwards = 0
        self._since = time.monotonic()

    def resume(self) -> None:
        """A block begins before which other work was done."""
        self._since = time.monotonic()

    def next_forward(self) -> None:
        """All blocks have run; the next forward begins."""
        if self._forwards == 0 and min(self._spent) > 0:
            self._weights = self._spent
        self._forwards += 1

    def done(self, position: int) -> float:
        """Forwards that are done, the present one's part included, once the block at `position` has run."""
        now = time.monotonic()
        if self._forwards == 0:
            self._spent[position] += now - self._since
        self._since = now
        return self._forwards + sum(self._weights[: position + 1]) / sum(self._weights)
