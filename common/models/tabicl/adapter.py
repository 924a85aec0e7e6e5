"""TabICL behind the model protocol."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from common.errors import ContextIncompatible
from common.models.protocol import CACHES, PRECISIONS, Frozen, Once, OneShot, Progress, TrainingTable, Weights
from common.models.tabicl import fit as fitting
from common.models.tabicl import once
from common.models.tabicl import state as states
from common.models.tabicl.backbone import TabICLBackbone, inspect_checkpoint, load_backbone
from common.models.tabicl.lean import Group, LeanPredictor, Power, Preprocessing, spans
from common.models.tabicl.precision import CHANNELS, POSITIONS, SCALE
from common.tables.target import Target

Tensors = Mapping[str, torch.Tensor]
#: Largest difference from the answers of the context as computed: of a probability, or of a mean in standard deviations.
TOLERANCES = {"native": 0.0, "fp16": 2e-3, "int8": 3e-2}


class TabICLAdapter:
    """The TabICL family."""

    family = "tabicl"
    state_version = states.STATE_VERSION

    def versions(self) -> Mapping[str, str]:
        """Versions of the libraries that a fit's numbers depend on."""
        return {name: version(name) for name in ("tabicl", "torch", "scikit-learn", "scipy", "numpy")}

    def tolerance(self, device: str, precision: str) -> float:
        """Bit for bit on CPU; a GPU's kernels depend on how many members one forward holds."""
        exact = 0.0 if torch.device(device).type == "cpu" else 1e-3
        return exact + TOLERANCES[precision]

    def inspect(self, path: Path, model: str) -> tuple[str, ...]:
        """The task of a checkpoint file; raises InvalidRequest in words when it is not a TabICL checkpoint."""
        return (inspect_checkpoint(path),)

    def load(self, weights: Weights, device: str) -> TabICLBackbone:
        """Load weights; raises ModelNotReady when the file is not what `weights` says."""
        return load_backbone(weights, device)

    def fit(
        self, table: TrainingTable, backbone: Any, options: Mapping[str, Any], progress: Progress
    ) -> fitting.TabICLFitted:
        """Encode the training table; see `common.models.tabicl.fit.fit`."""
        return fitting.fit(table, cast(TabICLBackbone, backbone), options, progress)

    def once(self, shots: Sequence[OneShot], backbone: Any) -> list[Once]:
        """Fit and answer small tables, those of one shape in one forward."""
        return once.once(shots, cast(TabICLBackbone, backbone))

    def freeze(self, state: Any) -> Frozen:
        """The fitted estimator as tensors and JSON."""
        return states.freeze(cast(fitting.TabICLFitted, state))

    def thaw(
        self, tensors: Tensors, state: Mapping[str, Any], backbone: Any, target: Target
    ) -> LeanPredictor:
        """A predictor over the tensors, which it views on CPU and moves elsewhere.

        Raises ContextIncompatible when tensors, state, backbone and target don't belong together.
        """
        shared = cast(TabICLBackbone, backbone)
        try:
            return _thaw(tensors, state, shared, target)
        except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
            raise ContextIncompatible(f"The context's state does not fit the model: {error}.") from error


def _thaw(
    tensors: Tensors, state: Mapping[str, Any], backbone: TabICLBackbone, target: Target
) -> LeanPredictor:
    groups = [(str(norm), int(members)) for norm, members in state["groups"]]
    classification = state["task"] == "classification"
    _require(state["task"] == target.task == backbone.weights.task, "the tasks differ")
    _require(state["precision"] in PRECISIONS and state["amp"] is False, "the precision is unknown")
    _require(state["cache"] in CACHES, "the kind of cache is unknown")
    _require(all(norm in states.NORMS and members > 0 for norm, members in groups), "a scaling is unknown")
    _check_shapes(tensors, state, backbone, [members for _, members in groups])
    if classification:
        codes = state["codes"]
        known = list(range(len(target.classes)))
        _require(0 < len(codes) <= backbone.max_classes and set(codes) <= set(known), "the classes differ")
    return LeanPredictor(
        backbone=backbone,
        target=target,
        state=state,
        preprocessing=_preprocessing(tensors, state, groups),
        spans=spans(
            {name: tensor for name, tensor in tensors.items() if not name.startswith("pre.")},
            [members for _, members in groups],
            _depths(backbone, state["cache"]),
            backbone.device,
        ),
        class_shuffles=tensors["pre.classes"].numpy() if classification else None,
        nbytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
    )


def _depths(backbone: TabICLBackbone, cache: str) -> dict[str, int]:
    """Blocks whose keys and values are stored, a stage."""
    module = backbone.module
    icl = len(module.icl_predictor.tf_icl.blocks) if cache == "kv" else 0
    return {"col": len(module.col_embedder.tf_col.blocks), "icl": icl}


def _check_shapes(
    tensors: Tensors, state: Mapping[str, Any], backbone: TabICLBackbone, members: list[int]
) -> None:
    """Every tensor that the state speaks of, in the one shape it can have, and no other."""
    module, count, features = backbone.module, sum(members), len(tensors["pre.columns"])
    slots, rows, inputs = int(state["slots"]), int(state["rows"]), int(state["inputs"])
    text = int(state["text"])
    embedder, icl = module.col_embedder, module.icl_predictor
    size = embedder.feature_group_size
    groups = math.ceil(features / size) if embedder.feature_group == "valid" else features
    head = int(embedder.tf_col.blocks[0].multihead_attn2.attn.num_heads)
    points = int(embedder.tf_col.blocks[0].num_inds)
    icl_head = int(icl.tf_icl.blocks[0].attn.num_heads)
    icl_width = int(icl.tf_icl.blocks[0].attn.embed_dim)
    _require(
        slots in (0, backbone.placeholders) and rows > 0 and 0 <= text <= features, "a count is impossible"
    )
    shapes: dict[str, tuple[int, ...]] = {}
    for stage, depth in _depths(backbone, state["cache"]).items():
        for block in range(depth):
            col = (count, slots + groups, head, points, embedder.embed_dim // head)
            shape = col if stage == "col" else (count, icl_head, rows, icl_width // icl_head)
            shapes |= {f"{stage}.{block}.k": shape, f"{stage}.{block}.v": shape}
    if state["cache"] == "repr":
        shapes["icl.rows"] = (count, rows, icl_width)
    dtype = {"native": torch.float32, "fp16": torch.float16, "int8": torch.int8}[state["precision"]]
    _require(all(name not in tensors or tensors[name].dtype == dtype for name in shapes), "a type differs")
    if state["precision"] == "int8":
        for name, whole in list(shapes.items()):
            axis = len(whole) + (CHANNELS if name == "icl.rows" else POSITIONS)
            shapes[name + SCALE] = (*whole[:axis], 1, *whole[axis + 1 :])
    shapes |= {"pre.columns": (features,), "pre.means": (features,), "pre.features": (count, features)}
    if state["task"] == "classification":
        shapes["pre.classes"] = (count, len(state["codes"]))
    for norm, _ in state["groups"]:
        names = states.STATISTICS + (states.POWER_STATISTICS if norm == "power" else ())
        shapes |= {f"pre.{norm}.{name}": (features,) for name in names}
    free = {f"pre.text.{i}.{part}" for i in range(text) for part in ("ends", "bytes")}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name not in free}
    wrong = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
    _require(not wrong, f"tensor {wrong[0] if wrong else ''} has another shape, is missing or unknown")
    _require(free <= tensors.keys(), "categories are missing")
    _within("pre.columns", tensors["pre.columns"], inputs)
    _within("pre.features", tensors["pre.features"], features)
    if state["task"] == "classification":
        _within("pre.classes", tensors["pre.classes"], len(state["codes"]))


def _preprocessing(
    tensors: Tensors, state: Mapping[str, Any], groups: list[tuple[str, int]]
) -> Preprocessing:
    def column(name: str) -> Any:
        return tensors[name].numpy()[:, np.newaxis]

    shuffles = tensors["pre.features"].numpy()
    made, start = [], 0
    for norm, members in groups:
        power = (
            Power(*(column(f"pre.power.{name}") for name in states.POWER_STATISTICS))
            if norm == "power"
            else None
        )
        mean, scale, low, high = (column(f"pre.{norm}.{name}") for name in states.STATISTICS)
        made.append(Group(mean, scale, low, high, shuffles[start : start + members], power))
        start += members
    return Preprocessing(
        inputs=int(state["inputs"]),
        columns=tuple(tensors["pre.columns"].tolist()),
        text=tuple(states.categories(tensors, i) for i in range(int(state["text"]))),
        means=column("pre.means"),
        groups=tuple(made),
    )


def _within(name: str, positions: torch.Tensor, bound: int) -> None:
    _require(bool(((positions >= 0) & (positions < bound)).all()), f"{name} points outside")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ContextIncompatible(f"The context's state does not fit the model: {otherwise}.")


ADAPTER = TabICLAdapter()
