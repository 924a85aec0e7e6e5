"""Predict from a thawed context: our own rules for the cells, blocks of 32 rows, then the library's members.

Upstream: tabpfn/inference.py (`InferenceEngineExplicitKVCache.iter_outputs`), classifier.py (`_predict_proba`),
regressor.py (`predict`). What the library does and this does not: read every column's kind again from the batch,
validate it three times, and prepare all rows of a batch at once (see `common.models.tabpfn.rows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from sklearn import config_context
from tabpfn.constants import PROBABILITY_EPSILON_ROUND_ZERO, SKLEARN_16_DECIMAL_PRECISION
from tabpfn.errors import TabPFNOutOfMemoryError
from tabpfn.inference import (
    InferenceEngineExplicitKVCache,
    MultiDeviceInferenceEngine,
    _member_output,
    _PerDeviceModelCache,
)
from tabpfn.regressor import _logits_to_output

from common.errors import FieldError, InvalidRequest
from common.models.protocol import Prediction, PredictOptions, spread
from common.models.tabpfn.backbone import PRECISION
from common.models.tabpfn.inputs import Floats, Inputs
from common.models.tabpfn.rows import blocks, forwards, padded
from common.models.tabpfn_specs import POINTS
from common.tables.features import Features
from common.tables.target import Target


class Engine(InferenceEngineExplicitKVCache):  # type: ignore[misc]  # tabpfn has no types
    """The library's engine over members and caches that were fitted elsewhere; holds no state between calls."""

    def __init__(
        self,
        module: Any,
        device: str,
        members: Sequence[Any],
        caches: Sequence[Any],
        groups: Sequence[Sequence[int]],
    ) -> None:
        # The library's own constructor would fit; this is the rest of it.
        MultiDeviceInferenceEngine.__init__(
            self,
            model_caches=[_PerDeviceModelCache(module)],
            save_peak_mem=False,
            dtype_byte_size=PRECISION.itemsize,
            force_inference_dtype=PRECISION,
        )
        self.enable_torch_compile = False
        self.keep_cache_on_device = True
        self.ensemble_members = list(members)
        self.kv_caches = list(caches)
        self.cache_groups = [list(group) for group in groups]
        self._device = torch.device(device)

    def iter_outputs(
        self, X: Floats, *, autocast: bool, task_type: str, only_return_standard_out: bool = True
    ) -> Iterator[tuple[Any, Any]]:
        """Each member's output for the rows, in member order, and the member's configuration."""
        outputs: list[Any] = [None] * len(self.ensemble_members)
        for index, group in enumerate(self.cache_groups):
            prepared = [_in_blocks(self.ensemble_members[i], X) for i in group]
            ((_, output),) = self._call_model(
                device=self._device,
                cache_index=index,
                X_tests=prepared,
                autocast=False,
                only_return_standard_out=only_return_standard_out,
                save_peak_mem=False,
                task_type=task_type,
            )
            for column, i in enumerate(group):
                outputs[i] = _member_output(output, column)
        for output, member in zip(outputs, self.ensemble_members, strict=True):
            yield output.squeeze(1), member.config


def _in_blocks(member: Any, matrix: Floats) -> Any:
    """A member's own view of the rows, prepared block by block."""
    parts = [member.transform_X_test(np.asfortranarray(matrix[block])) for block in blocks(len(matrix))]
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts)
    return np.concatenate(parts)


class TabPFNPredictor:
    """A thawed context; several threads may use it and its module at once."""

    def __init__(self, estimator: Any, inputs: Inputs, target: Target, nbytes: int) -> None:
        self.nbytes = nbytes
        self._estimator = estimator
        self._inputs = inputs
        self._target = target
        self._classification = target.task == "classification"

    def predict(self, features: Features, options: PredictOptions) -> Prediction:
        """Answers for the rows, none included.

        Raises InvalidRows (features of another schema, numbers beyond float32), InvalidRequest (quantiles of a
        classifier, levels outside 0 to 1, a point that TabPFN has not); torch.OutOfMemoryError.
        """
        self._check(options)
        if not features.rows:
            return self._empty(options)
        matrix = self._inputs(padded(features))
        try:
            with config_context(transform_output="default"), torch.inference_mode():
                parts = [self._answer(matrix[rows], options) for rows in forwards(len(matrix))]
        except TabPFNOutOfMemoryError as error:
            # As any other model's, so that callers need not know the library.
            raise torch.OutOfMemoryError(str(error.original_error)) from error
        return Prediction(
            **{name: np.concatenate([part[name] for part in parts])[: features.rows] for name in parts[0]}
        )

    def _answer(self, matrix: Floats, options: PredictOptions) -> dict[str, Any]:
        """The fields of a Prediction that are asked for, of one forward's rows."""
        if self._classification:
            return {"probabilities": self._probabilities(matrix)}
        estimator = self._estimator
        points = dict.fromkeys(("mean", options.point))
        if estimator.is_constant_target_:
            constant = np.full(len(matrix), float(estimator.constant_value_))
            answer = dict.fromkeys(points, constant)
            if options.quantiles:
                answer["quantiles"] = np.repeat(constant[:, np.newaxis], len(options.quantiles), axis=1)
            return answer
        logits = estimator._compute_aggregated_logits(matrix)
        told = {
            "logits": logits,
            "znorm_space_bardist": estimator.znorm_space_bardist_,
            "y_mean": estimator.y_train_mean_,
            "y_std": estimator.y_train_std_,
            "quantiles": list(options.quantiles),
        }
        answer = {point: _logits_to_output(output_type=point, **told) for point in points}
        if options.quantiles:
            answer["quantiles"] = np.column_stack(_logits_to_output(output_type="quantiles", **told))
        return answer

    def _probabilities(self, matrix: Floats) -> Floats:
        """As `TabPFNClassifier._predict_proba` ends."""
        estimator = self._estimator
        answer = estimator.forward(matrix, use_inference_mode=True).float().cpu().numpy()
        answer = estimator._maybe_reweight_probas(probas=answer)
        if estimator.inference_config_.USE_SKLEARN_16_DECIMAL_PRECISION:
            answer = np.around(answer, decimals=SKLEARN_16_DECIMAL_PRECISION)
            answer = np.where(answer < PROBABILITY_EPSILON_ROUND_ZERO, 0.0, answer)
        answer = answer / answer.sum(axis=1, keepdims=True)
        full: Floats = spread(answer, estimator.classes_, self._target)
        return full

    def _check(self, options: PredictOptions) -> None:
        if options.point not in POINTS:
            fault = FieldError("output", f"a TabPFN regression has {', '.join(POINTS)}, no {options.point}")
            raise InvalidRequest(f"{fault.message}.", errors=[fault])
        if not options.quantiles:
            return
        if self._classification:
            fault = FieldError(
                "output", "quantiles are answers of a regression; this dataset is a classification"
            )
            raise InvalidRequest(f"{fault.message}.", errors=[fault])
        if not all(0.0 < level < 1.0 for level in options.quantiles):
            fault = FieldError("quantiles", "every level must be between 0 and 1")
            raise InvalidRequest(f"Quantiles: {fault.message}.", errors=[fault])

    def _empty(self, options: PredictOptions) -> Prediction:
        if self._classification:
            return Prediction(probabilities=np.zeros((0, len(self._target.classes))))
        points = dict.fromkeys(("mean", options.point), np.zeros(0))
        levels = len(options.quantiles)
        return Prediction(**points, quantiles=np.zeros((0, levels)) if levels else None)
