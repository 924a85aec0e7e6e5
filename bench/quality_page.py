"""`docs/models.md` from `bench/results/quality.json` and the list of models; nothing on it is written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from statistics import mean
from typing import Any

import orjson

from bench.report import RESULTS
from common.models.registry import SPECS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
METRICS = {"classification": ("roc_auc", "accuracy", "log_loss"), "regression": ("r2", "mae")}
TITLES = {
    "classification": "Classification: ROC AUC / accuracy / log loss",
    "regression": "Regression: R² / mean absolute error",
}
LINEAR = {"classification": "logistic regression", "regression": "ridge"}
#: Means over tables are told of these: the others have the table's own unit, or another for each number of classes.
COMPARABLE = {"classification": ("roc_auc", "accuracy"), "regression": ("r2",)}

INTRODUCTION = """# Models

Measured by `{command}` at commit {commit}, written by `python -m bench.quality --page`; not to be edited.

{folds}-fold cross-validation on tables that installed packages ship, at most {rows:,} seeded rows of each, one thread, through the
product's own schema. All models see the same folds and features; gradient boosting and the linear models are scikit-learn's with their
defaults, behind imputation, scaling and one-hot codes where they need them. None of the tables was used to train `tabicl-mini`.
One seed, so small differences say little. Versions: {libraries}.

`tabicl-mini` is small, so that tests and demos run without a download; it is not a stand-in for full weights.
"""


def write_page() -> None:
    """Write the page."""
    PAGE.write_text(page(orjson.loads((RESULTS / "quality.json").read_bytes())))


def page(measured: Mapping[str, Any]) -> str:
    """The page's text."""
    libraries = ", ".join(f"{name} {number}" for name, number in measured["libraries"].items())
    parts = [
        INTRODUCTION.format(**{**measured, "libraries": libraries}),
        "## Served models\n\n" + _models({name for table in measured["tables"] for name in table["scores"]}),
    ]
    for task, title in TITLES.items():
        tables = [table for table in measured["tables"] if table["task"] == task]
        parts.append(f"## {title}\n\n" + _scores(task, tables))
    return "\n".join(parts)


def _models(run: Set[str]) -> str:
    lines = [
        f"| `{name}` | {spec.licence} | {'below' if name in run else 'not measured: weights are not here'} |"
        for name, spec in SPECS.items()
    ]
    return "\n".join(["| model | licence | quality |", "|---|---|---|", *lines]) + "\n"


def _scores(task: str, tables: Sequence[Mapping[str, Any]]) -> str:
    models = list(tables[0]["scores"])
    titles = [LINEAR[task] if model == "linear" else model for model in models]
    lines = [
        "| table | package | rows x columns | " + " | ".join(titles) + " |",
        "|---" * (len(models) + 3) + "|",
    ]
    for table in tables:
        cells = [_cell(task, table["scores"][model]) for model in models]
        shape = f"{table['rows']:,} x {table['columns']}"
        lines.append(f"| {table['name']} | {table['package']} | {shape} | " + " | ".join(cells) + " |")
    means = [
        " / ".join(f"{mean(t['scores'][model][metric] for t in tables):.3f}" for metric in COMPARABLE[task])
        for model in models
    ]
    named = " / ".join(metric.replace("_", " ") for metric in COMPARABLE[task])
    lines.append(f"| mean ({named}) | | | " + " | ".join(means) + " |")
    return "\n".join(lines) + "\n"


def _cell(task: str, scores: Mapping[str, float]) -> str:
    return " / ".join(_number(scores[metric]) for metric in METRICS[task])


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"
