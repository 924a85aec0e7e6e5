"""A fit by the unmodified library on a shared module, with progress and cancel at the model's blocks.

Upstream: tabpfn/classifier.py and regressor.py (`fit`), inference.py (`InferenceEngineExplicitKVCache`).

What a fit is given is fixed: the device, float32 on every device, the keys and values of every block kept, and
`random_state`. The library's own limits of 1,000 to 5,000 rows on a CPU are lifted, the product's stand instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import ArpackError
from tabpfn import TabPFNClassifier, TabPFNRegressor

from common.errors import FieldError, InvalidRequest, InvalidTable, InvalidTarget, TabrelayError, TooLarge
from common.models.protocol import Prediction, PredictOptions, Progress, TrainingTable, spread
from common.models.tabpfn.backbone import PRECISION, TabPFNBackbone
from common.models.tabpfn.inputs import LARGEST, Inputs, huge
from common.models.tabpfn.rows import padded
from common.tables.features import Features
from common.tables.target import Target

_DEFAULTS = PredictOptions()
#: Columns that a message names, at most.
_NAMED = 20


class TabPFNFitted:
    """A fitted estimator of the library; it answers as the library does, asked about padded rows."""

    def __init__(self, estimator: Any, backbone: TabPFNBackbone, target: Target, features: Features) -> None:
        self.estimator = estimator
        self.backbone = backbone
        self.target = target
        with _quiet():
            self.inputs = Inputs.learn(estimator, features)

    def predict(self, features: Features, options: PredictOptions = _DEFAULTS) -> Prediction:
        """The library's answer for at least one row; see `common.models.tabpfn.rows` for the padding."""
        frame = padded(features).to_frame()
        rows = features.rows
        with _quiet():
            if self.target.task == "classification":
                answer = self.estimator.predict_proba(frame)[:rows]
                return Prediction(probabilities=spread(answer, self.estimator.classes_, self.target))
            answer = {
                point: self.estimator.predict(frame, output_type=point)[:rows].astype(np.float64)
                for point in dict.fromkeys(("mean", options.point))
            }
            if options.quantiles:
                levels = self.estimator.predict(
                    frame, output_type="quantiles", quantiles=list(options.quantiles)
                )
                answer["quantiles"] = np.column_stack(levels)[:rows].astype(np.float64)
            return Prediction(**answer)


def new_estimator(backbone: TabPFNBackbone, options: Mapping[str, Any]) -> Any:
    """An estimator of the backbone's task that will keep keys and values; nothing is left to the surroundings."""
    cls = TabPFNClassifier if backbone.weights.task == "classification" else TabPFNRegressor
    return cls(
        n_estimators=int(options["n_estimators"]),
        random_state=int(options["seed"]),
        model_path=backbone.specs,
        device=backbone.device,
        inference_precision=PRECISION,
        fit_mode="fit_with_cache",
        n_preprocessing_jobs=1,
    )


def fit(
    table: TrainingTable, backbone: TabPFNBackbone, options: Mapping[str, Any], progress: Progress
) -> TabPFNFitted:
    """Fit `n_estimators` members with `seed` on the table.

    Raises InvalidTable, InvalidTarget, InvalidRequest (the backbone is of the other task), TooLarge (the checkpoint's
    limits, or out of memory), and whatever `progress` raises.
    """
    if table.target.task != backbone.weights.task:
        raise InvalidRequest(f"The weights of {backbone.weights.model!r} are not for {table.target.task}.")
    check(table, backbone)
    progress(0.0)
    estimator = new_estimator(backbone, options)
    try:
        with _quiet(), _watched(backbone.loaded.module, int(options["n_estimators"]), progress):
            estimator.fit(table.features.to_frame(), table.y)
    except TabrelayError:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise _too_large(table) from error
    except ArpackError as error:
        raise _unusable(table, "its numbers are too far apart for a singular value decomposition") from error
    except RuntimeError as error:
        if "can't allocate memory" in str(error):
            raise _too_large(table) from error
        raise
    except (ValueError, TypeError, AssertionError, ArithmeticError) as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise _unusable(table, said[:300]) from error
    return TabPFNFitted(estimator, backbone, table.target, table.features)


def check(table: TrainingTable, backbone: TabPFNBackbone) -> None:
    """Refuse what the library would stumble over, in words that name the column."""
    features, target, limits = table.features, table.target, backbone.limits
    model = backbone.weights.model
    if features.rows < 2 or not features.names:
        raise InvalidTable(
            f"The table has {features.rows} rows and {len(features.names)} features; {model} needs two rows and "
            "one feature."
        )
    if len(table.y) != features.rows:
        raise InvalidTarget(f"Target {target.name!r} has {len(table.y)} labels for {features.rows} rows.")
    sizes = (
        ("rows", features.rows, limits.MAX_NUMBER_OF_SAMPLES),
        ("features", len(features.names), limits.MAX_NUMBER_OF_FEATURES),
    )
    for what, size, limit in sizes:
        if size > limit:
            raise TooLarge(
                f"The table has {size:,} {what}; {limit:,} is the most that these weights of {model} take.",
                what=what,
                limit=limit,
                size=size,
            )
    faults = [
        FieldError(name, "holds infinity")
        for name, values in zip(features.names, features.values, strict=True)
        if isinstance(values, np.ndarray) and np.isinf(values).any()
    ] or huge(features)
    if faults:
        raise InvalidTable(f"Column {faults[0].field!r} {faults[0].message}.", errors=faults)
    _check_varies(features)
    _check_target(table, int(limits.MAX_NUMBER_OF_CLASSES), model)


def _check_varies(features: Features) -> None:
    if not all(_constant(values) for values in features.values):
        return
    shown = ", ".join(repr(name) for name in features.names[:_NAMED])
    raise InvalidTable(
        f"Every column has one value in all rows, so there is nothing to learn from: {shown}.",
        errors=[FieldError(name, "has one value in all rows") for name in features.names[:_NAMED]],
    )


def _constant(values: Any) -> bool:
    """Whether all cells are equal, or all are missing."""
    if not isinstance(values, np.ndarray):
        return len(values.unique()) <= 1
    missing = np.isnan(values)
    return bool(missing.all() or (not missing.any() and (values == values[0]).all()))


def _check_target(table: TrainingTable, most: int, model: str) -> None:
    target = table.target
    if target.task == "regression":
        values = np.asarray(table.y, dtype=np.float64)
        if not np.isfinite(values).all():
            raise InvalidTarget(
                f"Target {target.name!r} has missing or infinite values; leave such rows out.",
                errors=[FieldError(target.name, "has missing or infinite values")],
            )
        if np.abs(values).max() > LARGEST:
            raise InvalidTarget(
                f"Target {target.name!r} has values beyond {LARGEST:.2g}; rescale it.",
                errors=[FieldError(target.name, f"has values beyond {LARGEST:.2g}")],
            )
        return
    present = len(np.unique(table.y))
    if present > most:
        raise InvalidTarget(
            f"Target {target.name!r} has {present} classes; {most} is the most that these weights of {model} "
            "take. Merge rare classes.",
            errors=[FieldError(target.name, f"has {present} classes; {most} is the most")],
            limit=most,
            size=present,
        )


def _too_large(table: TrainingTable) -> TooLarge:
    rows, columns = table.features.rows, len(table.features.names)
    return TooLarge(
        f"The fit of {rows:,} rows x {columns:,} features needs more memory than this worker has; use fewer rows, "
        "columns or estimators.",
        rows=rows,
        columns=columns,
    )


def _unusable(table: TrainingTable, why: str) -> InvalidTable:
    """The library's own refusal; the columns of the largest numbers are named, since it does not say."""
    largest = [
        (float(np.nanmax(np.abs(values), initial=0.0)), name)
        for name, values in zip(table.features.names, table.features.values, strict=True)
        if isinstance(values, np.ndarray)
    ]
    suspects = [name for size, name in sorted(largest, reverse=True) if size > 1e15][:_NAMED]
    errors = [FieldError(name, "holds numbers beyond 1e15; rescale it") for name in suspects]
    return InvalidTable(f"The model can't use this table: {why}", errors=errors)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's warnings: slow CPUs and free text are not the user's faults."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _watched(module: Any, members: int, progress: Progress) -> Iterator[None]:
    """Call `progress` after every block of the module's last stage; what it raises leaves the forward.

    A forward encodes as many members as its input's second axis is long.
    """
    blocks = list(getattr(module, "icl_blocks", None) or module.blocks)
    done, now, passed = 0, 0, 0

    def started(_: Any, given: tuple[Any, ...]) -> None:
        nonlocal done, now, passed
        done, passed = done + now, 0
        inputs = given[0]["main"] if isinstance(given[0], dict) else given[0]
        now = int(inputs.shape[1])
        progress(min(done / members, 1.0))

    def block_done(*_: Any) -> None:
        nonlocal passed
        passed = min(passed + 1, len(blocks))
        progress(min((done + now * passed / len(blocks)) / members, 1.0))

    handles = [module.register_forward_pre_hook(started)]
    handles += [block.register_forward_hook(block_done) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
