"""A fitted TabPFN estimator as tensors and JSON, and back.

Tensors, widest first so that each starts at a multiple of its width:

    t0, t1, ...     what the tree refers to: keys and values, quantiles, scales, permutations
    tree            U8 (b,)  JSON of `common.models.tabpfn.codec`: ensemble members, their caches and groups, the
                    rules of the cells, and what the estimator learnt; some 100 KB for 8 members

The state in the manifest stays small. It names the exact versions of the libraries whose objects the tree holds; a
context of others is refused, since their attributes may mean something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import torch

from common.errors import ContextIncompatible
from common.models.protocol import WIDTHS, Frozen, TensorSource
from common.models.tabpfn.backbone import TabPFNBackbone
from common.models.tabpfn.codec import Decoder, Encoder
from common.models.tabpfn.fit import TabPFNFitted, new_estimator
from common.models.tabpfn.inputs import Inputs, Rule
from common.models.tabpfn.predict import Engine, TabPFNPredictor
from common.tables.target import Target

STATE_VERSION = 1
#: Libraries whose objects a context holds: exactly these versions can read it.
HELD = ("tabpfn", "scikit-learn")
TREE = "tree"
#: What a fitted estimator answers from, beside its members and caches.
_LEARNT = (
    "n_estimators_",
    "n_train_samples_",
    "classes_",
    "n_classes_",
    "class_counts_",
    "y_train_mean_",
    "y_train_std_",
    "is_constant_target_",
    "constant_value_",
    "ensemble_softmax_temperature_",
    "tuned_classification_thresholds_",
    "downsample_correction_weights_",
    "downsample_correction_log_weights_",
)


def held_versions() -> dict[str, str]:
    """The versions of `HELD` that are installed."""
    return {name: version(name) for name in HELD}


def freeze(fitted: TabPFNFitted) -> Frozen:
    """Tensors and the state; nothing is copied from the device until a part is asked for.

    Raises InternalError when the estimator holds something that a context can't.
    """
    estimator = fitted.estimator
    engine = getattr(estimator, "executor_", None)  # a constant target needs none
    encode = Encoder()
    tree = encode(
        {
            "caches": [] if engine is None else engine.kv_caches,
            "groups": [] if engine is None else engine.cache_groups,
            "members": [] if engine is None else engine.ensemble_members,
            "learnt": {name: getattr(estimator, name) for name in _LEARNT if hasattr(estimator, name)},
            "rules": [_rule_tree(rule) for rule in fitted.inputs.rules],
        }
    )
    written = np.frombuffer(orjson.dumps(tree), dtype=np.uint8)

    def parts() -> Iterator[memoryview]:
        yield written.data

    tensors = [*encode.tensors, TensorSource(TREE, "U8", written.shape, parts)]
    tensors.sort(key=lambda tensor: -WIDTHS[tensor.dtype])
    state = {
        "task": fitted.target.task,
        "libraries": held_versions(),
        "n_estimators": int(estimator.n_estimators),
        "seed": int(estimator.random_state),
        "precision": "float32",
    }
    return Frozen(tensors=tensors, state=state, state_version=STATE_VERSION, precision="native")


def thaw(
    tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any], backbone: TabPFNBackbone, target: Target
) -> TabPFNPredictor:
    """A predictor over the tensors; raises ContextIncompatible when they don't belong to these libraries or weights."""
    _require(state["task"] == target.task == backbone.weights.task, "the tasks differ")
    _require(state["precision"] == "float32", "the precision is unknown")
    found, installed = state["libraries"], held_versions()
    for name, wanted in installed.items():
        _require(found.get(name) == wanted, f"it was made with {name} {found.get(name)}, here is {wanted}")
    tree = Decoder(tensors, backbone.device)(orjson.loads(tensors[TREE].numpy().tobytes()))
    estimator = new_estimator(backbone, state)
    estimator._initialize_model_variables()
    for name in _LEARNT:
        if name in tree["learnt"]:
            setattr(estimator, name, tree["learnt"][name])
    estimator.ordinal_encoder_ = None  # the cells come with their codes
    _check(tree, estimator, target)
    estimator.executor_ = Engine(
        backbone.loaded.module, backbone.device, tree["members"], tree["caches"], tree["groups"]
    )
    estimator.inferred_feature_schema_ = _NoCategories()
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return TabPFNPredictor(estimator, Inputs(tuple(map(_rule, tree["rules"]))), target, nbytes)


class _NoCategories:
    """Stands for the library's schema of the cells: none has to be encoded any more."""

    @staticmethod
    def indices_for(modality: Any) -> list[int]:
        return []


def _check(tree: Mapping[str, Any], estimator: Any, target: Target) -> None:
    members, groups = tree["members"], tree["groups"]
    if target.task == "regression" and estimator.is_constant_target_:
        _require(not members, "a constant needs no members")
        return
    _require(len(members) == estimator.n_estimators_ > 0, "members are missing")
    _require(sorted(i for group in groups for i in group) == list(range(len(members))), "groups are wrong")
    _require(len(groups) == len(tree["caches"]), "caches are missing")
    if target.task == "classification":
        codes = [int(code) for code in estimator.classes_]
        _require(set(codes) <= set(range(len(target.classes))), "the classes differ")
        _require(len(codes) == estimator.n_classes_, "the classes differ")


def _rule_tree(rule: Rule) -> dict[str, Any]:
    texts = None if rule.texts is None else rule.texts.to_pylist()
    return {**asdict(rule), "texts": texts}


def _rule(tree: Mapping[str, Any]) -> Rule:
    texts = tree["texts"]
    return Rule(**{**tree, "texts": None if texts is None else pa.array(texts, pa.string())})


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ContextIncompatible(f"The context's state does not fit the model: {otherwise}.")
