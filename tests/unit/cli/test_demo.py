from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from sklearn.compose import make_column_transformer
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

from tabrelay.client import Job
from tabrelay.demo import report, run
from tabrelay.demo.tables import _split, churn, demo_tables

TABLES = {table.name: table for table in demo_tables()}


@pytest.mark.parametrize("name", ["breast-cancer", "wine", "diabetes"])
def test_number_tables_can_be_learned(name):
    table = TABLES[name]
    model = (
        RandomForestRegressor(50, random_state=0)
        if table.is_regression
        else RandomForestClassifier(50, random_state=0)
    )
    model.fit(table.train.drop(columns=table.target), table.train[table.target])
    assert table.score(list(model.predict(table.features))) > table.baseline() + 0.2


def churn_score(frame, columns):
    """Held-out accuracy of a plain logistic regression on some columns."""
    table = _split("churn", "churned", frame)

    def ready(rows):
        rows = rows[columns].fillna({"last_complaint": "", "city": ""})
        if "signed_up" in columns:
            days = (pd.Timestamp("2026-01-01") - pd.to_datetime(rows["signed_up"])).dt.days
            rows = rows.assign(signed_up=days / 365)
        return rows.fillna(0)

    text = [name for name in columns if name in ("plan", "last_complaint", "city")]
    encoder = make_column_transformer((OneHotEncoder(), text), remainder="passthrough")
    model = make_pipeline(encoder, LogisticRegression(max_iter=2000))
    model.fit(ready(table.train), table.train["churned"])
    return table.score(list(model.predict(ready(table.features)))), table.baseline()


def test_churn_can_be_learned():
    score, baseline = churn_score(churn(), [name for name in churn().columns if name != "churned"])
    assert score > baseline + 0.2


@pytest.mark.parametrize(
    "columns", [["plan", "last_complaint"], ["autopay"], ["signed_up"], ["support_calls", "monthly_spend"]]
)
def test_each_kind_of_churn_column_says_a_part_of_the_answer(columns):
    score, baseline = churn_score(churn(4000), columns)
    assert score > baseline + 0.03


def test_churn_is_seeded_and_has_gaps_text_dates_and_bools():
    frame = churn()
    assert frame.equals(churn())
    assert len(frame) == 400
    assert frame[["city", "signed_up", "support_calls", "monthly_spend"]].isna().any().all()
    assert frame["autopay"].dtype == bool
    assert frame["plan"].nunique() == 4
    assert set(frame["churned"]) == {"yes", "no"}


class FakeClient:
    """Answers every fit at once and predicts what it was told to."""

    def __init__(self, answers, state="succeeded"):
        self.answers = answers
        self.state = state

    def submit(self, path, target, dataset):
        return Job(id=dataset, state="queued", dataset=dataset)

    def job(self, job_id):
        return Job(id=job_id, state=self.state, dataset=job_id, model="tabicl-mini", context_bytes=1_000_000)

    def predict(self, dataset, rows):
        class Told:
            predictions = self.answers if not isinstance(rows, list) else [None]

        return Told()


@pytest.fixture
def judged(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "POLL_S", 0)

    def judge(table, client):
        (outcome,) = run.tour(client, [table], tmp_path, quiet=True)
        return outcome

    return judge


def test_right_answers_are_good(judged, capsys):
    table = TABLES["wine"]
    outcome = judged(table, FakeClient(table.test["target"].tolist()))
    assert (outcome.score, outcome.reason) == (1.0, None)
    report.print_outcomes([outcome])
    assert "124 x 13" in capsys.readouterr().out


def test_answers_no_better_than_the_baseline_are_told(judged):
    table = TABLES["churn"]
    outcome = judged(table, FakeClient(["no"] * len(table.test)))
    assert "does not beat the baseline" in outcome.reason


def test_breast_cancer_below_its_least_is_told(judged):
    table = TABLES["breast-cancer"]
    truth = table.test["target"].tolist()
    outcome = judged(table, FakeClient(["benign"] * 25 + truth[25:]))
    assert "is below 0.93" in outcome.reason


def test_failed_fit_and_wrong_count_are_told(judged):
    assert judged(TABLES["wine"], FakeClient([], state="failed")).reason
    assert "1 predictions for 54 rows" in judged(TABLES["wine"], FakeClient([1])).reason


def test_curl_lines_name_the_running_service():
    lines = report.curl_lines("http://127.0.0.1:1234", Path("/tmp/d"))
    assert "http://127.0.0.1:1234/v1/fits -F file=@/tmp/d/churn.csv" in lines
    assert "/v1/jobs/JOB_ID" in lines
    assert "/v1/datasets/churn/predict" in lines
