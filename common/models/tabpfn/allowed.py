"""Everything of the libraries that a TabPFN context may be made of.

Tables of tests/models/test_tabpfn_codec.py walk through every preset of tabpfn 9.2.0; a class that a fit needs and
that is missing here fails the fit, never a predict.
"""

from __future__ import annotations

_PREPROCESSING = "tabpfn.preprocessing"
_STEPS = f"{_PREPROCESSING}.steps"
_TORCH = f"{_PREPROCESSING}.torch"
_SKLEARN = "sklearn.preprocessing"

CLASSES = frozenset(
    {
        # A member's context
        "tabpfn.architectures.kv_cache.KVCacheEntry",
        "tabpfn.architectures.kv_cache.QuantizedKVCacheEntry",
        "tabpfn.architectures.tabpfn_v2.TabPFNV2Cache",
        "tabpfn.architectures.tabpfn_v2_5.TabPFNV2p5Cache",
        "tabpfn.architectures.tabpfn_v2_6.TabPFNV2p6Cache",
        "tabpfn.architectures.tabpfn_v3.TabPFNV3Cache",
        "tabpfn.architectures.tabpfn_v3_5.TabPFNV3p5Cache",
        # A member and its steps
        f"{_PREPROCESSING}.ensemble.TabPFNEnsembleMember",
        f"{_PREPROCESSING}.configs.ClassifierEnsembleConfig",
        f"{_PREPROCESSING}.configs.RegressorEnsembleConfig",
        f"{_PREPROCESSING}.configs.PreprocessorConfig",
        f"{_PREPROCESSING}.datamodel.Feature",
        f"{_PREPROCESSING}.datamodel.FeatureSchema",
        f"{_PREPROCESSING}.pipeline_interface.PreprocessingPipeline",
        f"{_STEPS}.adaptive_quantile_transformer.AdaptiveQuantileTransformer",
        f"{_STEPS}.add_fingerprint_features_step.AddFingerprintFeaturesStep",
        f"{_STEPS}.add_svd_features_step.AddSVDFeaturesStep",
        f"{_STEPS}.encode_categorical_features_step.EncodeCategoricalFeaturesStep",
        f"{_STEPS}.kdi_transformer.KDITransformerWithNaN",
        f"{_STEPS}.nan_handling_polynomial_features_step.NanHandlingPolynomialFeaturesStep",
        f"{_STEPS}.preprocessing_helpers.EfficientColumnTransformer",
        f"{_STEPS}.preprocessing_helpers.OrderPreservingColumnTransformer",
        f"{_STEPS}.remove_constant_features_step.RemoveConstantFeaturesStep",
        f"{_STEPS}.reshape_feature_distribution_step.ReshapeFeatureDistributionsStep",
        f"{_STEPS}.safe_power_transformer.SafePowerTransformer",
        f"{_STEPS}.shuffle_features_step.ShuffleFeaturesStep",
        f"{_STEPS}.squashing_scaler_transformer.SquashingScaler",
        f"{_STEPS}.utils._NoInverseImputer",
        f"{_TORCH}.pipeline_interface.TorchPreprocessingPipeline",
        f"{_TORCH}.steps.TorchAddFingerprintFeaturesStep",
        f"{_TORCH}.steps.TorchAddSVDFeaturesStep",
        f"{_TORCH}.steps.TorchSelectiveQuantileTransformerStep",
        f"{_TORCH}.steps.TorchSelectiveSquashingScalerStep",
        f"{_TORCH}.steps.TorchShuffleFeaturesStep",
        f"{_TORCH}.steps.TorchSoftClipOutliersStep",
        f"{_TORCH}.torch_quantile_transformer.TorchQuantileTransformer",
        f"{_TORCH}.torch_soft_clip_outliers.TorchSoftClipOutliers",
        f"{_TORCH}.torch_squashing_scaler.TorchSquashingScaler",
        f"{_TORCH}.torch_standard_scaler.TorchStandardScaler",
        f"{_TORCH}.torch_svd.TorchSafeStandardScaler",
        f"{_TORCH}.torch_svd.TorchTruncatedSVD",
        # scikit-learn's parts of those steps
        "sklearn.compose._column_transformer.ColumnTransformer",
        "sklearn.compose._column_transformer.make_column_selector",
        "sklearn.decomposition._truncated_svd.TruncatedSVD",
        "sklearn.impute._base.SimpleImputer",
        "sklearn.pipeline.FeatureUnion",
        "sklearn.pipeline.Pipeline",
        f"{_SKLEARN}._data.MinMaxScaler",
        f"{_SKLEARN}._data.PowerTransformer",
        f"{_SKLEARN}._data.QuantileTransformer",
        f"{_SKLEARN}._data.RobustScaler",
        f"{_SKLEARN}._data.StandardScaler",
        f"{_SKLEARN}._encoders.OneHotEncoder",
        f"{_SKLEARN}._encoders.OrdinalEncoder",
        f"{_SKLEARN}._function_transformer.FunctionTransformer",
        "sklearn.utils._bunch.Bunch",
    }
)

FUNCTIONS = frozenset(
    {
        f"{_STEPS}.utils._exp_minus_1",
        f"{_STEPS}.utils._identity",
        f"{_STEPS}.utils._inf_to_nan_func",
        f"{_STEPS}.utils._replace_inf_with_nan",
        "builtins.bool",
        "builtins.float",
        "builtins.int",
        "builtins.str",
        "numpy.float32",
        "numpy.float64",
    }
)

ENUMS = frozenset(
    {
        f"{_PREPROCESSING}.configs.FeatureSubsamplingMethod",
        f"{_PREPROCESSING}.configs.SampleSubsamplingMethod",
        f"{_PREPROCESSING}.datamodel.FeatureModality",
        f"{_PREPROCESSING}.datamodel.GPUTransformType",
    }
)
