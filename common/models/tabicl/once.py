"""A small table's fit and its predict in one forward, on a shared module; several tables of one shape together.

Upstream: tabicl/_model/tabicl.py (`forward_with_cache` with training and test rows), _sklearn/classifier.py and
regressor.py. The statistics are the library's own bit for bit (common.models.tabicl.statistics); the forward holds training and
test rows together, so that an answer differs from the library's fit and predict by rounding at most (1e-6 of probability).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.preprocessing import StandardScaler
from tabicl._model.kv_cache import KVCache

from common.models.protocol import Once, OneShot
from common.models.tabicl.backbone import TabICLBackbone
from common.models.tabicl.fit import check
from common.models.tabicl.lean import SKIPPED, LeanPredictor, Preprocessing, spans
from common.models.tabicl.sizes import FEW_GROUPS
from common.models.tabicl.statistics import learn
from common.tables.features import Features

#: TabICLClassifier's default.
SOFTMAX_TEMPERATURE = 0.9


@dataclass(frozen=True)
class Prepared:
    """One table before its forward: `inputs` float32 (E, n + m, H), `y` float32 (E, n)."""

    shot: OneShot
    preprocessing: Preprocessing
    class_shuffles: npt.NDArray[np.int64] | None
    inputs: npt.NDArray[np.float32]
    y: npt.NDArray[np.float32]
    state: Mapping[str, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Tables of one shape can share a forward, whatever their ensembles' sizes."""
        return (*self.inputs.shape[1:], self.y.shape[1], self.state["slots"])

    @property
    def members(self) -> int:
        """Members of the ensemble."""
        return len(self.inputs)


def once(shots: Sequence[OneShot], backbone: TabICLBackbone) -> list[Once]:
    """One forward for all tables of one shape; raises InvalidTable and InvalidTarget as a fit does."""
    prepared = [prepare(shot, backbone) for shot in shots]
    answers: dict[int, Once] = {}
    for shape in dict.fromkeys(one.shape for one in prepared):
        together = [one for one in prepared if one.shape == shape]
        answers |= zip(map(id, together), answer(together, backbone), strict=True)
    return [answers[id(one)] for one in prepared]


def prepare(shot: OneShot, backbone: TabICLBackbone) -> Prepared:
    """Learn the preprocessing of a table and apply it; raises InvalidTable and InvalidTarget as a fit does."""
    table = shot.table
    check(table, backbone)
    state: dict[str, Any] = {"rows": table.features.rows, "softmax_temperature": SOFTMAX_TEMPERATURE}
    codes = None
    if table.target.task == "classification":
        known, codes = np.unique(table.y, return_inverse=True)
        state["codes"] = known.tolist()
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # a power that overflows is clipped later
        preprocessing, shuffles = learn(table.features, codes, shot.options)
    members = sum(len(group.shuffles) for group in preprocessing.groups)
    if codes is None or shuffles is None:
        scaler = StandardScaler()
        scaled = scaler.fit_transform(np.asarray(table.y, dtype=np.float32).reshape(-1, 1)).ravel()
        state |= {"y_mean": float(scaler.mean_[0]), "y_scale": float(scaler.scale_[0])}
        y = np.tile(scaled, (members, 1))
    else:
        y = shuffles[:, codes]
    embedder = backbone.module.col_embedder
    width = len(preprocessing.columns)
    groups = -(-width // embedder.feature_group_size) if embedder.feature_group == "valid" else width
    state["slots"] = backbone.placeholders if groups < FEW_GROUPS else 0
    inputs = preprocessing(Features.concat([table.features, shot.rows]))
    return Prepared(shot, preprocessing, shuffles, inputs, y.astype(np.float32), state)


def answer(together: Sequence[Prepared], backbone: TabICLBackbone) -> list[Once]:
    """One forward for tables of one shape; each gets its answer and a context of its own."""
    with torch.inference_mode():
        inputs = torch.from_numpy(np.concatenate([one.inputs for one in together])).to(backbone.device)
        y = torch.from_numpy(np.concatenate([one.y for one in together])).to(backbone.device)
        outputs, tensors = _forward(inputs, y, together[0].state["slots"], backbone.module)
        answers, start = [], 0
        for one in together:
            stop = start + one.members
            # A view would keep its neighbours' contexts in memory.
            own = {
                name: tensor if one.members == len(inputs) else tensor[start:stop].clone()
                for name, tensor in tensors.items()
            }
            predictor = _predictor(one, own, backbone)
            answers.append(Once(predictor, predictor.told(outputs[start:stop], one.shot.wanted), one.members))
            start = stop
        return answers


def _forward(
    inputs: torch.Tensor, y: torch.Tensor, slots: int, module: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(E, n + m, H) and (E, n) -> (E, m, outputs) and the caches' tensors by their names in a context."""
    columns, rows, icl = module.col_embedder, module.row_interactor, module.icl_predictor
    train = y.shape[1]
    col_cache, icl_cache = KVCache(), KVCache()
    grouped = columns.feature_grouping(inputs)
    if slots:
        grouped = torch.nn.functional.pad(grouped, (0, 0, slots, 0), value=SKIPPED)
    features = grouped.transpose(1, 2)
    embedded = columns._compute_embeddings_with_cache(
        features,
        col_cache=col_cache,
        train_size=train,
        y_train=y.unsqueeze(1).expand(-1, features.shape[1], -1),
        use_cache=False,
        store_cache=True,
    ).transpose(1, 2)[:, :, slots:]
    tokens = rows.cls_tokens.expand(*embedded.shape[:2], -1, -1)
    represented = rows._aggregate_embeddings(torch.cat([tokens, embedded], dim=2))
    outputs = icl._icl_predictions_with_cache(
        represented, icl_cache=icl_cache, y_train=y, use_cache=False, store_cache=True
    )
    tensors = {
        f"{stage}.{block}.{half}": tensor
        for stage, cache in (("col", col_cache), ("icl", icl_cache))
        for block, entry in cache.kv.items()
        for half, tensor in (("k", entry.key), ("v", entry.value))
    }
    return outputs[:, train:], tensors


def _predictor(one: Prepared, tensors: Mapping[str, torch.Tensor], backbone: TabICLBackbone) -> LeanPredictor:
    depths = {stage: sum(name.startswith(f"{stage}.") for name in tensors) // 2 for stage in ("col", "icl")}
    return LeanPredictor(
        backbone=backbone,
        target=one.shot.table.target,
        state=one.state,
        preprocessing=one.preprocessing,
        spans=spans(
            tensors, [len(group.shuffles) for group in one.preprocessing.groups], depths, backbone.device
        ),
        class_shuffles=one.class_shuffles,
        nbytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
    )
