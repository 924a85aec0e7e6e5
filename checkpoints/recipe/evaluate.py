"""Scores a classifier and a regressor checkpoint on tables they never saw, beside three classical models.

    python checkpoints/recipe/evaluate.py --out checkpoints/scores.json

The tables are scikit-learn's built-in and generated ones; none is used for training. Each is split in half five
times; the model predicts as an unmodified tabicl does, with 8 estimators on the CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import accuracy_score, log_loss, r2_score, roc_auc_score
from sklearn.model_selection import ShuffleSplit, StratifiedShuffleSplit
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tabicl import TabICLClassifier, TabICLRegressor

HERE = Path(__file__).resolve().parent.parent
MINI = "mini"
DIGITS_ROWS = 900
INTERVAL = (0.1, 0.9)

Data = tuple[np.ndarray, np.ndarray]
Makers = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Score:
    """One model's means over the splits of one table; a metric of the other task is None."""

    table: str
    model: str
    fit_predict_s: float
    accuracy: float | None = None
    roc_auc: float | None = None
    log_loss: float | None = None
    r2: float | None = None
    interval_coverage: float | None = None  # share of targets between the 10 % and the 90 % quantile


def classification_tables() -> dict[str, Data]:
    digits = datasets.load_digits()
    return {
        "breast cancer": datasets.load_breast_cancer(return_X_y=True),
        "iris": datasets.load_iris(return_X_y=True),
        "wine": datasets.load_wine(return_X_y=True),
        "digits": (digits.data[:DIGITS_ROWS], digits.target[:DIGITS_ROWS]),
        "moons": datasets.make_moons(600, noise=0.25, random_state=0),
        "make_classification": datasets.make_classification(
            600, 20, n_informative=6, n_classes=3, random_state=0
        ),
    }


def regression_tables() -> dict[str, Data]:
    return {
        "diabetes": datasets.load_diabetes(return_X_y=True),
        "friedman1": datasets.make_friedman1(500, noise=1, random_state=0),
        "friedman2": datasets.make_friedman2(500, noise=50, random_state=0),
        "friedman3": datasets.make_friedman3(500, noise=0.1, random_state=0),
        "linear": datasets.make_regression(400, 8, noise=20, random_state=0),
    }


def tabicl_options(checkpoint: Path, estimators: int) -> dict[str, Any]:
    return {
        "n_estimators": estimators,
        "model_path": checkpoint,
        "allow_auto_download": False,
        "kv_cache": "kv",
        "device": "cpu",
    }


def classifiers(checkpoint: Path, estimators: int) -> Makers:
    return {
        MINI: partial(TabICLClassifier, **tabicl_options(checkpoint, estimators)),
        "logistic": lambda: make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000)),
        "5-NN": lambda: make_pipeline(StandardScaler(), KNeighborsClassifier(5)),
        "HistGradientBoosting": partial(HistGradientBoostingClassifier, random_state=0),
    }


def regressors(checkpoint: Path, estimators: int) -> Makers:
    return {
        MINI: partial(TabICLRegressor, **tabicl_options(checkpoint, estimators)),
        "ridge": lambda: make_pipeline(StandardScaler(), Ridge()),
        "5-NN": lambda: make_pipeline(StandardScaler(), KNeighborsRegressor(5)),
        "HistGradientBoosting": partial(HistGradientBoostingRegressor, random_state=0),
    }


def score_classifier(make: Callable[[], Any], train: Data, test: Data) -> dict[str, float]:
    probabilities = make().fit(*train).predict_proba(test[0])
    target = test[1]
    two = probabilities.shape[1] == 2
    return {
        "accuracy": float(accuracy_score(target, probabilities.argmax(1))),
        "roc_auc": float(
            roc_auc_score(target, probabilities[:, 1] if two else probabilities, multi_class="ovr")
        ),
        "log_loss": float(log_loss(target, probabilities.clip(1e-6, 1))),
    }


def score_regressor(make: Callable[[], Any], train: Data, test: Data) -> dict[str, float]:
    model = make().fit(*train)
    scores = {"r2": float(r2_score(test[1], model.predict(test[0])))}
    if isinstance(model, TabICLRegressor):
        bounds = model.predict(test[0], output_type="quantiles", alphas=list(INTERVAL))
        inside = (test[1] >= bounds[:, 0]) & (test[1] <= bounds[:, 1])
        scores["interval_coverage"] = float(inside.mean())
    return scores


def splits(target: np.ndarray, stratified: bool, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    splitter = (StratifiedShuffleSplit if stratified else ShuffleSplit)(count, test_size=0.5, random_state=1)
    return list(splitter.split(np.zeros((len(target), 1)), target))


def score_tables(
    tables: dict[str, Data],
    makers: Makers,
    score: Callable[[Callable[[], Any], Data, Data], dict[str, float]],
    count: int,
) -> Iterator[Score]:
    """Every model on every table, each metric averaged over the same `count` splits."""
    for table, (x, y) in tables.items():
        halves = splits(y, score is score_classifier, count)
        for model, make in makers.items():
            start = time.monotonic()
            rounds = [score(make, (x[a], y[a]), (x[b], y[b])) for a, b in halves]
            means = {metric: round(mean(each[metric] for each in rounds), 4) for metric in rounds[0]}
            yield Score(table, model, round((time.monotonic() - start) / count, 3), **means)


def table_of(scores: list[Score], cell: Callable[[Score], str], means: Callable[[list[Score]], str]) -> str:
    """A Markdown table, a row a data set and a column a model, with the means in the last row."""
    models = list(dict.fromkeys(score.model for score in scores))
    tables = list(dict.fromkeys(score.table for score in scores))
    by_place = {(score.table, score.model): score for score in scores}
    lines = ["| table | " + " | ".join(models) + " |", "|---" * (len(models) + 1) + "|"]
    for table in tables:
        lines.append(f"| {table} | " + " | ".join(cell(by_place[table, model]) for model in models) + " |")
    columns = [[by_place[table, model] for table in tables] for model in models]
    lines.append("| mean | " + " | ".join(means(column) for column in columns) + " |")
    return "\n".join(lines)


def mean_of(scores: list[Score], metric: str) -> float:
    return mean(float(getattr(score, metric)) for score in scores)


def classification_markdown(scores: list[Score]) -> str:
    return "Accuracy / ROC AUC / log loss\n\n" + table_of(
        scores,
        lambda s: f"{s.accuracy:.3f} / {s.roc_auc:.3f} / {s.log_loss:.3f}",
        lambda c: " / ".join(f"{mean_of(c, metric):.3f}" for metric in ("accuracy", "roc_auc", "log_loss")),
    )


def regression_markdown(scores: list[Score]) -> str:
    def cell(score: Score) -> str:
        covered = score.interval_coverage
        return f"{score.r2:.3f}" + (f" ({100 * covered:.0f} %)" if covered is not None else "")

    return "R² (coverage of the 80 % interval)\n\n" + table_of(
        scores, cell, lambda column: f"{mean_of(column, 'r2'):.3f}"
    )


def describe(path: Path) -> dict[str, str]:
    return {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--classifier", type=Path, default=HERE / "tabicl-mini-classifier.ckpt")
    parser.add_argument("--regressor", type=Path, default=HERE / "tabicl-mini-regressor.ckpt")
    parser.add_argument("--estimators", type=int, default=8)
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "scores.json")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    classes = classifiers(given.classifier, given.estimators)
    numbers = regressors(given.regressor, given.estimators)
    classified = list(score_tables(classification_tables(), classes, score_classifier, given.splits))
    print(classification_markdown(classified), end="\n\n", flush=True)
    regressed = list(score_tables(regression_tables(), numbers, score_regressor, given.splits))
    print(regression_markdown(regressed))
    report = {
        "estimators": given.estimators,
        "splits": given.splits,
        "classifier": describe(given.classifier),
        "regressor": describe(given.regressor),
        "classification": [asdict(score) for score in classified],
        "regression": [asdict(score) for score in regressed],
    }
    given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
