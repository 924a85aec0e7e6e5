"""`POST /v1/predict` on the real stack: answers, limits, errors and repeated tables."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tabrelay import Client
from tabrelay.up.embedded import Stack
from tests.integration.oracle import Oracle
from tests.support import Service, as_json, check_problem, mixed, numeric, wait_until

pytestmark = pytest.mark.integration


def body(table: pa.Table, target: str = "y", rows: slice = slice(0, 20), **more: Any) -> dict[str, Any]:
    features = as_json(table.drop_columns([target]))
    for row in features["rows"]:
        row[:] = [cell.isoformat() if hasattr(cell, "isoformat") else cell for cell in row]
    return {
        "train_features": features,
        "train_labels": table.column(target).to_pylist(),
        "eval_features": {**features, "rows": features["rows"][rows]},
        **more,
    }


def ask(service: Service, sent: dict[str, Any], **query: Any) -> dict[str, Any]:
    response = service.http.post("/v1/predict", json=sent, params=query)
    assert response.status_code == 200, response.text
    return dict(response.json())


def one_shot_files(stack: Stack) -> list[Path]:
    return [*stack.data_dir.glob("uploads/.one-shot-*"), *stack.data_dir.glob("contexts/*/.tmp-*")]


@pytest.mark.parametrize("kind", ["numeric", "mixed"])
def test_answers_equal_the_library_s_fit_and_predict(service: Service, oracle: Oracle, kind: str) -> None:
    table = numeric(seed=41) if kind == "numeric" else mixed(seed=42).drop_columns(["z"])
    expected = oracle.ask(table, "y", "classification", [slice(0, 20)], members=1)[0]["probabilities"]
    told = ask(service, body(table))
    assert np.abs(np.subtract(told["probabilities"], expected)).max() <= 1e-6
    assert told["classes"] == sorted(set(table.column("y").to_pylist()))
    assert (told["n_estimators"], told["reused"], told["model"]) == (1, False, "tabicl-mini")
    again = ask(service, body(table))
    assert (again["reused"], again["context"]) == (True, told["context"])
    assert np.abs(np.subtract(again["probabilities"], expected)).max() <= 1e-6
    fewer = ask(service, body(table, rows=slice(4, 9)))
    assert fewer["reused"]
    assert np.abs(np.subtract(fewer["probabilities"], expected[4:9])).max() <= 1e-6


def test_means_and_quantiles(service: Service) -> None:
    table = mixed(seed=43).drop_columns(["y"])
    told = ask(service, body(table, "z"))
    assert (told["task"], len(told["mean"])) == ("regression", 20)
    spread = ask(service, body(table, "z", quantiles=[0.1, 0.9]))
    assert spread["levels"] == [0.1, 0.9]
    assert all(low < high for low, high in spread["quantiles"])


@pytest.mark.parametrize("labels", [[3, 7], [False, True], [0.5, 1.5], ["007", "7"]])
def test_labels_come_back_as_they_went_in(service: Service, labels: list[Any]) -> None:
    sent = body(numeric(rows=40, seed=44))
    sent["train_labels"] = [labels[label == "k1"] for label in sent["train_labels"]]
    told = ask(service, sent | {"task": "classification", "output": "label"})
    assert told["classes"] == labels
    assert {type(label) for label in told["predictions"]} == {type(labels[0])}
    assert "probabilities" not in told


def test_what_can_t_be_answered_names_its_field(service: Service) -> None:
    good = body(numeric(rows=40, seed=45))

    def post(**changes: Any) -> Any:
        return service.http.post("/v1/predict", json=good | changes)

    check_problem(post(train_labels=[1]), 422, "invalid_request", "train_labels")
    check_problem(post(eval_features=[{"c0": 1}]), 422, "invalid_rows", "eval_features")
    check_problem(post(train_features={"c0": list(range(1100))}), 422, "invalid_request", "train_features")
    wide = {f"c{i}": [0.5] * 1000 for i in range(90)}
    check_problem(
        post(train_features=wide, train_labels=[0, 1] * 500, eval_features=[{"c0": 1}]), 413, "too_large"
    )
    check_problem(post(options={"n_estimators": 0}), 422, "invalid_request", "options.n_estimators")
    check_problem(post(quantiles=[0.5]), 422, "invalid_request", "quantiles")
    check_problem(post(model="none"), 404, "model_not_found")
    many = [f"k{i % 11}" for i in range(40)]
    check_problem(post(train_labels=many), 422, "invalid_target", "train_labels")
    text = service.http.post("/v1/predict", content=b"a,b", headers={"content-type": "text/csv"})
    check_problem(text, 415, "unsupported_media_type")


def test_the_client_asks_once(service: Service, tmp_path: Path) -> None:
    table = mixed(seed=46).drop_columns(["z"])
    features = table.drop_columns(["y"])
    labels = table.column("y").to_pylist()
    with Client(service.url) as client:
        told = client.predict_once(features, labels, features.slice(0, 5))
        frame = client.predict_once(features.to_pandas(), labels, features.slice(0, 5).to_pandas())
    assert told.probabilities == frame.probabilities
    assert (told.n_estimators, len(told), frame.reused) == (1, 5, True)


def test_a_heavy_one_is_fitted_by_a_fit_worker_and_its_repeat_is_not(
    service: Service, stack: Stack, oracle: Oracle
) -> None:
    table = numeric(rows=400, columns=12, seed=51)
    expected = oracle.ask(table, "y", "classification", [slice(0, 20)], members=4)[0]["probabilities"]
    told = ask(service, body(table, options={"n_estimators": 4}))
    assert "fit" in told["timings_ms"]
    assert (told["n_estimators"], told["reused"]) == (4, False)
    assert np.array_equal(told["probabilities"], expected)
    again = ask(service, body(table, options={"n_estimators": 4}))
    assert again["reused"]
    assert "fit" not in again["timings_ms"]
    assert np.array_equal(again["probabilities"], expected)
    assert not one_shot_files(stack)


def test_a_heavy_one_behind_a_long_fit_is_refused_at_once_with_when_to_come_back(
    service: Service, stack: Stack
) -> None:
    long = service.submit(numeric(rows=3000, columns=20, seed=53), "long", options='{"n_estimators": 32}')
    job = long.json()["id"]
    wait_until(lambda: service.job(job)["phase"] == "encoding", "the long fit encodes")
    wait_until(lambda: any(w["busy"] for w in service.http.get("/v1/workers").json()["fit"]), "it is known")
    heavy = body(numeric(rows=400, columns=12, seed=54), options={"n_estimators": 4})
    began = time.monotonic()
    busy = service.http.post("/v1/predict", json=heavy, params={"deadline_ms": 2000})
    assert time.monotonic() - began < 1.5
    check_problem(busy, 429, "overloaded")
    assert int(busy.headers["retry-after"]) >= 1
    # What a predict worker does alone goes on meanwhile.
    assert ask(service, body(numeric(rows=40, seed=55)))["reused"] is False
    service.http.delete(f"/v1/jobs/{job}")
    service.end_of(job)
    assert "fit" in ask(service, heavy)["timings_ms"]
    assert not one_shot_files(stack)
