"""The TabPFN models that are served, and under which terms. Read by the API: imports no library.

Weights of v2 are permissive and need attribution. Those of v2.5 and later are not for commercial use, their answers
included, and nobody gets them without accepting that licence at their origin; here each needs its name in
`TABRELAY_ACCEPT_LICENSE`. Files and limits: tabpfn 9.2.0, `model_loading.py` and `inference_config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.models.protocol import ModelLimits, ModelSpec, Option

_ADAPTER = "common.models.tabpfn.adapter:ADAPTER"
_STATE_VERSION = 1
#: Point estimates of a regression, all from the library's own distribution.
POINTS = ("mean", "median", "mode")
#: Their objects are part of a context: another version can't read it.
_LIBRARIES = ("tabpfn", "scikit-learn")
_ATTRIBUTION = "Attribution is required where the weights are used; the licence says how."
_TERMS = "https://docs.priorlabs.ai/models#tabpfn-model-license"
_NON_COMMERCIAL = "Non-commercial: neither the weights nor their answers may be used commercially."


def _gated(
    version: str,
    repository: str,
    licence_url: str,
    files: Mapping[str, str],
    limits: ModelLimits,
    options: Mapping[str, Option],
) -> ModelSpec:
    return ModelSpec(
        name=f"tabpfn-v{version}",
        title=f"TabPFN v{version}",
        adapter=_ADAPTER,
        licence=f"TabPFN-{version} non-commercial",
        licence_url=licence_url,
        files=files,
        limits=limits,
        state_version=_STATE_VERSION,
        options=options,
        hub=dict.fromkeys(files, repository),
        points=POINTS,
        libraries=_LIBRARIES,
        gated=True,
        notice=_NON_COMMERCIAL,
    )


def tabpfn_specs(options: Mapping[str, Option]) -> tuple[ModelSpec, ...]:
    """The specs; the first is the default TabPFN."""
    both = "tabpfn-v3.5-20260909.safetensors"
    return (
        ModelSpec(
            name="tabpfn-v2",
            title="TabPFN v2",
            adapter=_ADAPTER,
            licence="Prior Labs License (Apache-2.0 with attribution)",
            licence_url="https://huggingface.co/Prior-Labs/TabPFN-v2-clf/blob/main/LICENSE.txt",
            files={
                "classification": "tabpfn-v2-classifier-finetuned-zk73skhh.ckpt",
                "regression": "tabpfn-v2-regressor.ckpt",
            },
            limits=ModelLimits(max_rows=10_000, max_columns=500, max_classes=10),
            state_version=_STATE_VERSION,
            options=options,
            hub={"classification": "Prior-Labs/TabPFN-v2-clf", "regression": "Prior-Labs/TabPFN-v2-reg"},
            points=POINTS,
            libraries=_LIBRARIES,
            notice=_ATTRIBUTION,
        ),
        _gated(
            "2.5",
            "Prior-Labs/tabpfn_2_5",
            _TERMS,
            {
                "classification": "tabpfn-v2.5-classifier-v2.5_default.ckpt",
                "regression": "tabpfn-v2.5-regressor-v2.5_default.ckpt",
            },
            ModelLimits(max_rows=50_000, max_columns=2_000, max_classes=10),
            options,
        ),
        _gated(
            "2.6",
            "Prior-Labs/tabpfn_2_6",
            _TERMS,
            {
                "classification": "tabpfn-v2.6-classifier-v2.6_default.ckpt",
                "regression": "tabpfn-v2.6-regressor-v2.6_default.ckpt",
            },
            ModelLimits(max_rows=50_000, max_columns=2_000, max_classes=10),
            options,
        ),
        _gated(
            "3",
            "Prior-Labs/tabpfn_3",
            "https://huggingface.co/Prior-Labs/tabpfn_3/blob/main/LICENSE",
            {
                "classification": "tabpfn-v3-classifier-v3_default.ckpt",
                "regression": "tabpfn-v3-regressor-v3_default.ckpt",
            },
            # What the weights say of themselves counts as well; rows as the library documents them.
            ModelLimits(max_rows=1_000_000, max_columns=2_000, max_classes=10),
            options,
        ),
        _gated(
            "3.5",
            "Prior-Labs/tabpfn_3_5",
            "https://huggingface.co/Prior-Labs/tabpfn_3_5/blob/main/LICENSE",
            {"classification": both, "regression": both},
            ModelLimits(max_rows=1_000_000, max_columns=2_000, max_classes=10),
            options,
        ),
    )
