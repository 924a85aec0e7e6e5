"""The demo's four tables, each split 70/30: three that scikit-learn ships and one made here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

SEED = 7
CHURN_ROWS = 400
TEST_SHARE = 0.3
#: Share of the cells of some columns that are left empty.
GAPS = 0.08


@dataclass(frozen=True)
class DemoTable:
    """A table in two parts; `least` is the score that the demo asks for besides beating the baseline."""

    name: str
    target: str
    train: pd.DataFrame
    test: pd.DataFrame
    is_regression: bool = False
    least: float | None = None

    @property
    def features(self) -> pd.DataFrame:
        """The held-out rows without their answers."""
        return self.test.drop(columns=self.target)

    @property
    def score_name(self) -> str:
        """What `score` measures."""
        return "R2" if self.is_regression else "accuracy"

    def score(self, predictions: list[Any]) -> float:
        """R2 or accuracy on the held-out rows."""
        truth = self.test[self.target].tolist()
        if len(predictions) != len(truth):
            raise ValueError(f"{len(predictions)} predictions for {len(truth)} rows")
        if not self.is_regression:
            return sum(bool(told == true) for told, true in zip(predictions, truth, strict=True)) / len(truth)
        mean = sum(truth) / len(truth)
        missed = sum((told - true) ** 2 for told, true in zip(predictions, truth, strict=True))
        return float(1 - missed / sum((true - mean) ** 2 for true in truth))

    def baseline(self) -> float:
        """The score of always answering the training part's mean or most frequent label."""
        known = self.train[self.target]
        constant = known.mean() if self.is_regression else known.mode()[0]
        return self.score([constant] * len(self.test))


def demo_tables() -> list[DemoTable]:
    """All four, always the same."""
    from sklearn import datasets

    cancer = datasets.load_breast_cancer(as_frame=True).frame
    cancer["target"] = cancer["target"].map({0: "malignant", 1: "benign"})
    wine = datasets.load_wine(as_frame=True).frame
    diabetes = datasets.load_diabetes(as_frame=True, scaled=False).frame
    return [
        _split("breast-cancer", "target", cancer, least=0.93),
        _split("wine", "target", wine),
        _split("churn", "churned", churn()),
        _split("diabetes", "target", diabetes, is_regression=True),
    ]


def churn(rows: int = CHURN_ROWS, seed: int = SEED) -> pd.DataFrame:
    """Customers of a made-up firm, with text, yes/no, date and number columns that all say a part of the answer."""
    import numpy as np
    import pandas as pd

    rng = np.random.default_rng(seed)
    plan = rng.choice(["basic", "plus", "family", "business"], rows, p=[0.4, 0.3, 0.2, 0.1])
    city = rng.choice(["Utrecht", "Łódź", "Malmö", "São Paulo", "Kyoto"], rows)
    days_ago = rng.integers(10, 2000, rows)
    autopay = rng.random(rows) < 0.6
    calls = rng.poisson(2.0, rows)
    spend = np.round(rng.gamma(4.0, 12.0, rows), 2)
    complaint = rng.choice(
        ["", "slow connection", "wrong bill", "rude on the phone"], rows, p=[0.55, 0.2, 0.15, 0.1]
    )
    worry = (
        pd.Series(plan).map({"basic": 1.2, "plus": 0.0, "family": -1.0, "business": -1.8}).to_numpy()
        + pd.Series(complaint).map(
            {"": -0.9, "slow connection": 0.8, "wrong bill": 1.6, "rude on the phone": 2.2}
        )
        + np.where(autopay, -1.0, 1.2)
        + 1.8 * (days_ago < 500)
        + 0.6 * (calls - 2)
        - 0.012 * (spend - 48)
    ).to_numpy()
    churned = worry + rng.logistic(0.0, 0.6, rows) > 0.4
    frame = pd.DataFrame(
        {
            "plan": plan,
            "city": city,
            "signed_up": pd.Timestamp("2026-01-01") - pd.to_timedelta(days_ago, unit="D"),
            "autopay": autopay,
            "support_calls": calls.astype(float),
            "monthly_spend": spend,
            "last_complaint": [text or None for text in complaint],
            "churned": np.where(churned, "yes", "no"),
        }
    )
    frame["signed_up"] = frame["signed_up"].dt.strftime("%Y-%m-%d")
    for column in ("city", "signed_up", "support_calls", "monthly_spend"):
        frame.loc[_some(rng, rows), column] = None
    return frame


def _some(rng: np.random.Generator, rows: int) -> Any:
    return rng.random(rows) < GAPS


def _split(
    name: str, target: str, frame: pd.DataFrame, *, is_regression: bool = False, least: float | None = None
) -> DemoTable:
    from sklearn.model_selection import train_test_split

    train, test = train_test_split(
        frame, test_size=TEST_SHARE, random_state=SEED, stratify=None if is_regression else frame[target]
    )
    return DemoTable(
        name, target, train.reset_index(drop=True), test.reset_index(drop=True), is_regression, least
    )
