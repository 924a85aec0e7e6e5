"""Which models are served, where their weights are, and what a fit may ask of them.

This module is read by the API: it never imports an adapter, which would load torch, except in `load_adapter`.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import common
from common.errors import (
    FieldError,
    InternalError,
    InvalidRequest,
    InvalidTarget,
    LicenceNotAccepted,
    ModelNotFound,
    ModelNotReady,
    TooLarge,
)
from common.models.protocol import (
    AUTO,
    CACHES,
    PRECISIONS,
    TASKS,
    Adapter,
    Choice,
    ModelLimits,
    ModelSpec,
    Option,
    Weights,
    WholeNumber,
)
from common.models.tabicl.sizes import TabICLSizes
from common.models.tabpfn_specs import tabpfn_specs
from common.settings import Settings
from common.tables.canonical import file_digest
from common.tables.overrides import Overrides
from common.tables.target import Target

#: The option of every model that says what the columns are; `common.tables.overrides`.
SCHEMA = "schema"
PREFERRED = "tabicl-v2"
FALLBACK = "tabicl-mini"
#: Weights that come with the product, beside the packages.
CHECKPOINTS = Path(common.__file__).resolve().parent.parent / "checkpoints"
#: What tells a checkpoint's task from its file name.
_TASK_WORDS = {"classif": "classification", "regress": "regression"}

_ENSEMBLE: Mapping[str, Option] = {
    "n_estimators": WholeNumber(
        8,
        1,
        32,
        "Ensemble members: differently shuffled and scaled views of the table. More is slower and larger.",
    ),
    "seed": WholeNumber(42, 0, 2**31 - 1, "Seed of the shuffles."),
}
_OPTIONS: Mapping[str, Option] = {
    **_ENSEMBLE,
    "precision": Choice(
        AUTO,
        (AUTO, *PRECISIONS),
        "How the context is stored: as computed, or in half or a quarter of the bytes with slightly other answers; "
        "auto: as computed as long as there is room.",
    ),
    "cache": Choice(
        AUTO,
        (AUTO, *CACHES),
        "kv: keys and values of every layer; repr: one vector a training row, a smaller context whose predicts take "
        "nearly as long as the fit; auto: kv as long as there is room.",
    ),
}

#: The library scales a variance back as it does a value, so in a unit it has not; `tabicl/_sklearn/regressor.py`.
_TABICL_WITHHELD = {
    "variance": "the library's is not right: it maps a variance back to the target's unit as if it were a value; "
    "ask for quantiles"
}

SPECS: Mapping[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        ModelSpec(
            name="tabicl-v2",
            title="TabICL v2",
            adapter="common.models.tabicl.adapter:ADAPTER",
            licence="BSD-3-Clause",
            licence_url="https://github.com/soda-inria/tabicl/blob/main/LICENSE",
            files={
                "classification": "tabicl-classifier-v2-20260212.ckpt",
                "regression": "tabicl-regressor-v2-20260212.ckpt",
            },
            # Its authors claim 100,000 rows x 2,000 columns; a context can't be cached above 10 classes.
            limits=ModelLimits(max_rows=100_000, max_columns=2_000, max_classes=10),
            state_version=2,
            options=_OPTIONS,
            withheld=_TABICL_WITHHELD,
            sizes=TabICLSizes(width=128, column_blocks=3, points=128, blocks=12),
            hub=dict.fromkeys(TASKS, "jingang/TabICL"),
        ),
        ModelSpec(
            name="tabicl-mini",
            title="TabICL mini",
            adapter="common.models.tabicl.adapter:ADAPTER",
            licence="Apache-2.0",
            licence_url="https://www.apache.org/licenses/LICENSE-2.0",
            files={
                "classification": "tabicl-mini-classifier.ckpt",
                "regression": "tabicl-mini-regressor.ckpt",
            },
            limits=ModelLimits(max_rows=20_000, max_columns=200, max_classes=10),
            state_version=2,
            options=_OPTIONS,
            withheld=_TABICL_WITHHELD,
            sizes=TabICLSizes(width=32, column_blocks=1, points=16, blocks=4),
            bundled=True,
        ),
        *tabpfn_specs(_ENSEMBLE),
    )
}


def outputs(spec: ModelSpec, task: str) -> tuple[str, ...]:
    """What a predict of the task may ask for as `output`, the default first."""
    return ("proba", "label") if task == "classification" else (*spec.points, "quantiles")


def load_adapter(spec: ModelSpec) -> Adapter:
    """The model family's adapter; loads torch, so only worker processes call it."""
    module, _, attribute = spec.adapter.partition(":")
    adapter = cast(Adapter, getattr(importlib.import_module(module), attribute))
    if adapter.state_version != spec.state_version:
        raise InternalError(
            f"{spec.name} is listed with state version {spec.state_version}, its adapter has another"
        )
    return adapter


def task_of_word(word: str) -> str | None:
    """The task that `classification`, `classifier`, `regression`, `regressor` or a file so called stands for."""
    found = {task for part, task in _TASK_WORDS.items() if part in word.lower()}
    return found.pop() if len(found) == 1 else None


def split_key(key: str) -> tuple[str, str | None]:
    """`NAME` or `NAME:TASK` as name and task; raises InvalidRequest for a task that is neither."""
    name, colon, word = key.partition(":")
    task = task_of_word(word)
    if colon and task is None:
        fault = FieldError("model_paths", f"{key!r}: the task must be {' or '.join(TASKS)}")
        raise InvalidRequest(f"Unknown task {word[:40]!r} of model {name!r}.", errors=[fault])
    return name, task


class Registry:
    """The models of this installation; safe to use from several threads."""

    def __init__(self, settings: Settings) -> None:
        """Raises ModelNotFound or InvalidRequest for a `model_paths` entry of no known model or task."""
        self._settings = settings
        self._digests: dict[tuple[str, int, int], str] = {}
        self._lock = threading.Lock()
        self._paths: dict[tuple[str, str | None], Path] = {}
        for key, path in settings.model_paths.items():
            name, task = split_key(key)
            self._paths[self.spec(name).name, task] = Path(path).expanduser().absolute()

    def specs(self) -> list[ModelSpec]:
        """Every model, the preferred one first."""
        return list(SPECS.values())

    def spec(self, name: str) -> ModelSpec:
        """One model; raises ModelNotFound that lists the names."""
        try:
            return SPECS[name]
        except KeyError:
            raise ModelNotFound(
                f"There is no model {name[:80]!r}; there are {', '.join(SPECS)}.", models=list(SPECS)
            ) from None

    def folder(self, spec: ModelSpec) -> Path:
        """Where the model's files are looked for unless `model_paths` says otherwise."""
        return CHECKPOINTS if spec.bundled else self._settings.data / "models" / spec.name

    def require_licence(self, spec: ModelSpec) -> None:
        """Raise LicenceNotAccepted when the model needs an acceptance that was not given."""
        if spec.gated and spec.name not in self._settings.accepted_licences:
            raise LicenceNotAccepted(
                f"{spec.title} is under the licence {spec.licence!r} ({spec.licence_url}). {spec.notice} "
                f"Whoever runs this service accepts it with TABRELAY_ACCEPT_LICENSE={spec.name}.",
                model=spec.name,
                licence=spec.licence,
                licence_url=spec.licence_url,
            )

    def unready(self) -> dict[str, str]:
        """What is configured (the default model, `model_paths`) and can't be used: why, by model."""
        default = self.default_model()
        wanted = [(default, task) for task in self.spec(default).files]
        for name, only in self._paths:
            wanted += [(name, task) for task in ((only,) if only else self.spec(name).files)]
        reasons: dict[str, list[str]] = {}
        for name, task in dict.fromkeys(wanted):
            try:
                self.weights(name, task)
            except (ModelNotReady, LicenceNotAccepted) as error:
                reasons.setdefault(name, []).append(error.detail)
        return {name: " ".join(dict.fromkeys(said)) for name, said in reasons.items()}

    def path(self, name: str, task: str) -> Path:
        """Where this model's weights for the task should be, whether or not they are there.

        Raises ModelNotFound; ModelNotReady when `model_paths` gives a file of the other or of no told task.
        """
        spec = self.spec(name)
        if task not in spec.files:
            raise ModelNotReady(f"Model {name!r} has no weights for the task {task!r}.")
        own = self._paths.get((name, task))
        if own is not None:
            return own / spec.files[task] if own.is_dir() else own
        both = self._paths.get((name, None))
        if both is None or both.is_dir():
            return (both or self.folder(spec)) / spec.files[task]
        told = task_of_word(both.name)
        if told is None and len(set(spec.files.values())) == 1:
            return both  # one file for both tasks
        if told is None:
            raise ModelNotReady(
                f"{both} was given as {name!r} without its task; write {name}:classification={both} or "
                f"{name}:regression={both}."
            )
        if told == task:
            return both
        if (name, told) in self._paths:
            raise ModelNotReady(
                f"{both} was given as {name!r}, but its name says {told}, which has its own file."
            )
        return self.folder(spec) / spec.files[task]

    def weights(self, name: str, task: str) -> Weights:
        """The model's weights for the task.

        Raises ModelNotFound, LicenceNotAccepted, or ModelNotReady that says how to get them. The digest is kept in memory until the file's size or time changes.
        """
        self.require_licence(self.spec(name))
        path = self.path(name, task)
        try:
            stat = path.stat()
            if not path.is_file():
                raise FileNotFoundError(path)
            key = str(path), stat.st_size, stat.st_mtime_ns
            with self._lock:
                digest = self._digests.get(key)
                if digest is None:
                    digest = self._digests[key] = file_digest(path)
        except OSError as error:
            raise self._missing(self.spec(name), task, path, error) from error
        return Weights(model=name, task=task, path=path, digest=digest)

    def _missing(self, spec: ModelSpec, task: str, path: Path, error: OSError) -> ModelNotReady:
        told = spec.name if (spec.name, task) not in self._paths else f"{spec.name}:{task}"
        ways = [f"start with `tabrelay up --model {told}=PATH` to use a file or folder of yours"]
        repository = spec.hub.get(task)
        if spec.gated:
            ways.append(
                f"get {spec.files[task]} from https://huggingface.co/{repository}, with an account that has "
                f"accepted the licence there, and put it into {self.folder(spec)}"
            )
        elif repository is not None:
            ways.append(f"with `tabrelay up --model {spec.name}` to download it from {repository}")
        why = (
            "is missing"
            if isinstance(error, FileNotFoundError)
            else f"can't be read ({os.strerror(error.errno or 0)})"
        )
        return ModelNotReady(
            f"The weights of {spec.name!r} for {task} are not ready: {path} {why}; {', or '.join(ways)}.",
            model=spec.name,
            task=task,
        )

    def ready(self, name: str, task: str) -> bool:
        """Whether the weights are there, without reading them."""
        try:
            self.require_licence(self.spec(name))
            return os.access(self.path(name, task), os.R_OK) and self.path(name, task).is_file()
        except (ModelNotReady, LicenceNotAccepted):
            return False

    def default_model(self) -> str:
        """The model of a fit that names none; raises ModelNotFound for a name that is not served."""
        chosen = self._settings.default_model
        if chosen != AUTO:
            return self.spec(chosen).name
        return PREFERRED if self.ready(PREFERRED, "classification") else FALLBACK

    def describe(self) -> list[dict[str, Any]]:
        """Every model as a JSON object: readiness per task and why not, limits, licence, weights, options."""
        return [self._describe(spec) for spec in self.specs()]

    def _describe(self, spec: ModelSpec) -> dict[str, Any]:
        digests: dict[str, str] = {}
        reasons: dict[str, str] = {}
        for task in spec.files:
            try:
                digests[task] = self.weights(spec.name, task).digest
            except (ModelNotReady, LicenceNotAccepted) as error:
                reasons[task] = error.detail
        return {
            "name": spec.name,
            "title": spec.title,
            "default": spec.name == self.default_model(),
            "ready": {task: task in digests for task in spec.files},
            "reasons": reasons,
            "limits": {
                "max_rows": spec.limits.max_rows,
                "max_columns": spec.limits.max_columns,
                "max_classes": spec.limits.max_classes,
            },
            "licence": spec.licence,
            "licence_url": spec.licence_url,
            "licence_accepted": not spec.gated or spec.name in self._settings.accepted_licences,
            "notice": spec.notice,
            "weights": digests,
            "outputs": {task: list(outputs(spec, task)) for task in spec.files},
            "options": {name: _shown(option) for name, option in spec.options.items()},
        }


def _shown(option: Option) -> dict[str, Any]:
    bounds: dict[str, Any] = (
        {"choices": list(option.choices)}
        if isinstance(option, Choice)
        else {"minimum": option.least, "maximum": option.most}
    )
    return {"default": option.default, **bounds, "meaning": option.meaning}


def _fault(option: Option, value: Any) -> str:
    """What is wrong with an option's value, "" when nothing is."""
    if isinstance(option, Choice):
        right = isinstance(value, str) and value in option.choices
        return "" if right else f"must be one of {', '.join(option.choices)}"
    whole = isinstance(value, int) and not isinstance(value, bool)
    right = whole and option.least <= value <= option.most
    return "" if right else f"must be a whole number, {option.least} to {option.most}"


def validate_options(spec: ModelSpec, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fit's options with defaults filled in, in a fixed order; `schema` only when it overrides something.

    Raises InvalidRequest that names every field at fault and what would be right.
    """
    given = dict(options or {})
    overrides = Overrides.decode(given.pop(SCHEMA, None)).encode()
    faults = [
        FieldError(
            f"options.{name}",
            f"is not an option of {spec.name}; known are {', '.join((*spec.options, SCHEMA))}",
        )
        for name in map(str, given)
        if name not in spec.options
    ]
    chosen: dict[str, Any] = {}
    for name, option in spec.options.items():
        chosen[name] = given.get(name, option.default)
        fault = _fault(option, chosen[name])
        if fault:
            faults.append(FieldError(f"options.{name}", fault))
    if faults:
        raise InvalidRequest(f"{faults[0].field} {faults[0].message}.", errors=faults)
    if overrides:
        chosen[SCHEMA] = overrides
    return chosen


def check_table(spec: ModelSpec, rows: int, columns: int, target: Target) -> None:
    """Refuse a training table that the model can't take; `columns` counts features, not the target.

    Raises TooLarge (rows, columns) with limit and size, InvalidTarget (classes).
    """
    limits = spec.limits
    for what, size, limit in (("rows", rows, limits.max_rows), ("columns", columns, limits.max_columns)):
        if size > limit:
            raise TooLarge(
                f"The table has {size:,} {what}; {limit:,} is the most that {spec.name} takes.",
                what=what,
                limit=limit,
                size=size,
            )
    count = len(target.classes)
    if target.task == "classification" and count > limits.max_classes:
        more = sorted(s.name for s in SPECS.values() if s.limits.max_classes >= count)
        other = f"use {' or '.join(more)}" if more else "no served model takes more"
        message = f"has {count:,} classes; {limits.max_classes} is the most that {spec.name} takes"
        advice = f'{other}; merge rare classes, or use task "regression" if the labels are quantities'
        raise InvalidTarget(
            f"Target {target.name!r} {message}: {advice}.",
            errors=[FieldError(target.name, message)],
            limit=limits.max_classes,
            size=count,
            models=more,
        )
