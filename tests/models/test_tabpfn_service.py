"""TabPFN over HTTP on a real stack: fits, answers, licences, and a model without weights beside those that have them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from common.models.tabpfn.adapter import ADAPTER
from tabrelay.up.embedded import Stack
from tabrelay.up.stack import StackOptions
from tests.models import fitting
from tests.support import Service, check_problem, mixed, numeric

pytestmark = pytest.mark.integration

#: Accepted, but nobody has put its weights there.
ABSENT = "tabpfn-v2.5"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def service(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    data = tmp_path_factory.mktemp("stack") / "data"
    given = {f"tabpfn-v2:{task}": str(fitting.weights(folder, "v2", task).path) for task in fitting.TASKS}
    environ = {"TABRELAY_ACCEPT_LICENSE": ABSENT, "TABRELAY_MODEL_PATHS": json.dumps(given)}
    options = StackOptions(port=0, data_dir=data, models=("tabicl-mini", ABSENT), threads=1)
    with Stack(options, quiet=True, environ=environ) as stack, Service(stack.url) as shared:
        yield shared


@pytest.mark.parametrize("task", fitting.TASKS)
def test_a_fit_over_http_answers_as_the_library_does(service: Service, folder: Path, task: str) -> None:
    target, other = ("y", "z") if task == "classification" else ("z", "y")
    table = mixed().drop_columns([other])
    job = service.fit(
        table, f"pfn-{task}", target, model="tabpfn-v2", task=task, options='{"n_estimators": 2}'
    )
    assert job["licence"] == "Prior Labs License (Apache-2.0 with attribution)"
    rows = mixed(rows=20, seed=3).drop_columns(["y", "z"])
    query = {"quantiles": "0.05,0.5,0.95"} if task == "regression" else {}
    answer = service.predict(f"pfn-{task}", rows, **query)
    assert (answer["model"], answer["licence"]) == ("tabpfn-v2", job["licence"])

    trained = fitting.table(task, "mixed")
    backbone = ADAPTER.load(fitting.weights(folder, "v2", task), "cpu")
    here = ADAPTER.fit(trained, backbone, {"n_estimators": 2, "seed": 42}, lambda fraction: None)
    expected = here.predict(trained.schema.features(rows), fitting.asked(task))
    if task == "classification":
        assert answer["classes"] == ["leave", "stay"]
        np.testing.assert_array_equal(answer["probabilities"], expected.probabilities)
    else:
        np.testing.assert_array_equal(answer["predictions"], expected.mean)


def test_a_model_without_weights_is_told_at_once_and_the_others_serve(service: Service) -> None:
    began = time.monotonic()
    response = service.http.get("/readyz")
    assert time.monotonic() - began < 2
    assert response.status_code == 200
    told = response.json()["models_unready"]
    assert list(told) == [ABSENT]
    assert "tabpfn-v2.5-classifier-v2.5_default.ckpt" in told[ABSENT]
    assert "huggingface.co/Prior-Labs/tabpfn_2_5" in told[ABSENT]
    refused = service.submit(numeric(), "absent", model=ABSENT)
    check_problem(refused, 503, "model_not_ready", says="put it into")
    service.fit(numeric(rows=40), "mini")
    rows = numeric(rows=3).drop_columns(["y"])
    assert service.predict("mini", rows)["model"] == "tabicl-mini"


def test_a_licence_that_was_not_accepted_is_a_403_that_names_the_setting(service: Service) -> None:
    refused = service.submit(numeric(), "unlicensed", model="tabpfn-v3.5")
    check_problem(refused, 403, "licence_not_accepted", says="TABRELAY_ACCEPT_LICENSE=tabpfn-v3.5")
    shown = {model["name"]: model for model in service.http.get("/v1/models").json()["models"]}
    assert (shown["tabpfn-v3.5"]["licence_accepted"], shown["tabpfn-v2"]["licence_accepted"]) == (False, True)
    assert "Attribution" in shown["tabpfn-v2"]["notice"]


def test_a_table_that_the_model_can_not_take_names_the_column(service: Service) -> None:
    huge = numeric(rows=40).set_column(2, "c2", [[1e300] * 39 + [1.0]])
    job = service.submit(huge, "huge", model="tabpfn-v2").json()
    error = service.end_of(job["id"])["error"]
    assert error["code"] == "invalid_table"
    assert [fault["field"] for fault in error["errors"]] == ["c2"]
    service.fit(numeric(rows=40), "fine", model="tabpfn-v2", options='{"n_estimators": 1}')
    row = numeric(rows=1).drop_columns(["y"]).set_column(1, "c1", [[-1e300]])
    check_problem(service.ask("fine", row), 422, "invalid_rows", "c1", "rescale")
