"""What can't be used is refused by name, as a problem, and the stack goes on answering."""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pyarrow as pa
import pytest

from tabrelay.up.embedded import Stack
from tests.support import Service, as_json, mixed, numeric

pytestmark = pytest.mark.integration

CASES = Path(__file__).resolve().parents[1] / "cases"
JSON = {"content-type": "application/json"}


def check_problem(
    response: httpx.Response, status: int, code: str, field: str | None = None, says: str = ""
) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert (problem["status"], problem["code"]) == (status, code), problem
    assert problem["request_id"] == response.headers["x-request-id"]
    assert "Traceback" not in response.text
    if field is not None:
        assert field in [fault["field"] for fault in problem["errors"]], problem
    assert says in response.text, problem


@pytest.fixture(scope="module")
def fitted(service: Service) -> Service:
    service.fit(mixed().drop_columns(["z"]), "bad-input")
    service.fit(mixed().drop_columns(["y"]), "bad-input-reg", "z")
    return service


def inline(**body: Any) -> dict[str, Any]:
    return {"dataset": "refused", "target": "y", "columns": ["a", "y"], "rows": [[1, "p"], [2, "q"]], **body}


FITS: dict[str, tuple[dict[str, Any], int, str, str | None, str]] = {
    "no target column": (inline(target="nope"), 422, "invalid_target", None, "nope"),
    "no target named": ({"dataset": "refused", "columns": ["a"], "rows": [[1]]}, 422, "invalid_request", "target", ""),
    "no dataset named": ({"target": "y", "columns": ["a", "y"], "rows": [[1, "p"]]}, 422, "invalid_request", "dataset", ""),
    "one column": (inline(columns=["y"], rows=[["p"], ["q"]]), 422, "invalid_table", None, ""),
    "empty table": (inline(rows=[]), 422, "invalid_table", None, ""),
    "ragged row": (inline(rows=[[1, "p"], [2]]), 422, "invalid_table", None, ""),
    "label missing": (inline(rows=[[1, "p"], [2, None]]), 422, "invalid_target", "y", "2"),
    "mixed column": (inline(rows=[[1, "p"], ["x", "q"]]), 422, "invalid_table", "a", ""),
    "unknown model": (inline(model="gpt"), 404, "model_not_found", None, "tabicl-mini"),
    "model without weights": (inline(model="tabicl-v2"), 503, "model_not_ready", None, "tabicl-classifier"),
    "unknown option": (inline(options={"depth": 3}), 422, "invalid_request", "options.depth", ""),
    "option out of range": (inline(options={"n_estimators": 99}), 422, "invalid_request", "options.n_estimators", "32"),
    "options no object": (inline(options=[1]), 422, "invalid_request", "options", ""),
    "unknown task": (inline(task="ranking"), 422, "invalid_request", "task", "regression"),
    "continuous as classes": (
        inline(rows=[[i, i + 0.5] for i in range(60)], task="classification"), 422, "invalid_target", "y", "regression",
    ),
    "eleven classes": (inline(rows=[[i, f"k{i % 11}"] for i in range(60)]), 422, "invalid_target", "y", "10"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FITS)
def test_an_unusable_fit_is_refused_by_name(service: Service, kind: str) -> None:
    body, status, code, field, says = FITS[kind]
    check_problem(service.http.post("/v1/fits", json=body), status, code, field, says)
    assert service.http.get("/livez").status_code == 200


def test_bodies_that_are_not_what_they_say_are_malformed(fitted: Service) -> None:
    fits, predict = "/v1/fits", "/v1/datasets/bad-input/predict"
    http = fitted.http
    check_problem(http.post(fits, content=b'{"dataset":', headers=JSON), 400, "malformed_body")
    check_problem(
        http.post(fits, content=(CASES / "12_nan_literal.json").read_bytes(), headers=JSON),
        400,
        "malformed_body",
        says="null",
    )
    check_problem(
        http.post(predict, content=b'{"columns":["plan"],"rows":[[NaN]]}', headers=JSON),
        400,
        "malformed_body",
        says="null",
    )
    check_problem(http.post(predict, content=b"[1]", headers=JSON), 422, "invalid_table")
    check_problem(fitted.submit(b"PAR1 and nothing more PAR1", "refused"), 400, "malformed_body")
    parquet = {"content-type": "application/vnd.apache.parquet"}
    check_problem(http.post(predict, content=b"PAR1", headers=parquet), 400, "malformed_body")
    check_problem(
        http.post(predict, content=b"x", headers={"content-type": "image/png"}),
        415,
        "unsupported_media_type",
        says="text/csv",
    )
    check_problem(
        http.post(fits, content=b"x", headers={"content-type": "text/plain"}), 415, "unsupported_media_type"
    )
    check_problem(fitted.submit(b"x", "refused", name="table.xlsx"), 415, "unsupported_media_type")


def test_unknown_names_are_404(fitted: Service) -> None:
    rows = {"columns": ["a"], "rows": [[1]]}
    check_problem(fitted.ask("never-fitted", rows), 404, "dataset_not_found", says="never-fitted")
    check_problem(fitted.ask("bad-input", rows, version=9), 404, "version_not_found", says="1")
    check_problem(fitted.http.get("/v1/jobs/0123"), 404, "job_not_found")
    check_problem(fitted.http.delete("/v1/jobs/0123"), 404, "job_not_found")
    check_problem(fitted.http.get("/v1/datasets/never-fitted"), 404, "dataset_not_found")
    check_problem(fitted.http.delete("/v1/datasets/never-fitted"), 404, "dataset_not_found")
    check_problem(fitted.http.get("/v1/nothing"), 404, "not_found")
    check_problem(fitted.http.put("/v1/fits"), 405, "method_not_allowed")


def test_rows_that_do_not_fit_the_schema_are_refused_by_column(fitted: Service) -> None:
    rows = mixed().drop_columns(["y", "z"]).slice(0, 3)
    check_problem(fitted.ask("bad-input", rows.drop_columns(["plan"])), 422, "invalid_rows", "plan")
    shown = as_json(rows.drop_columns(["since", "seen"]))
    check_problem(fitted.ask("bad-input", shown), 422, "invalid_rows", "since")
    infinite = rows.set_column(4, "amount", pa.array([1.0, np.inf, 2.0]))
    check_problem(fitted.ask("bad-input", infinite), 422, "invalid_rows", "amount", "2")
    text = rows.set_column(5, "count", pa.array(["1", "two", "3"]))
    check_problem(fitted.ask("bad-input", text), 422, "invalid_rows", "count", "2")
    check_problem(fitted.ask("bad-input", {"columns": ["plan"], "rows": []}), 422, "invalid_table")
    assert fitted.predict("bad-input", rows)["version"] == 1


def test_queries_out_of_range_are_refused_by_name(fitted: Service) -> None:
    rows = mixed().drop_columns(["y", "z"]).slice(0, 2)
    for dataset, query, field in [
        ("bad-input", {"version": "two"}, "version"),
        ("bad-input", {"output": "quantiles"}, "output"),
        ("bad-input", {"deadline_ms": 0}, "deadline_ms"),
        ("bad-input", {"deadline_ms": 10**12}, "deadline_ms"),
        ("bad-input-reg", {"output": "proba"}, "output"),
        ("bad-input-reg", {"quantiles": "0.5,1.5"}, "quantiles"),
        ("bad-input-reg", {"quantiles": "half"}, "quantiles"),
    ]:
        check_problem(fitted.ask(dataset, rows, **query), 422, "invalid_request", field)
    check_problem(fitted.http.get("/v1/jobs?state=odd"), 422, "invalid_request", "state")
    check_problem(fitted.http.get("/v1/jobs?limit=0"), 422, "invalid_request", "limit")


def test_dataset_names_are_accepted_or_refused_as_documented(service: Service) -> None:
    names = orjson.loads((CASES / "13_dataset_names.json").read_bytes())
    for name in names["refuse"]:
        check_problem(
            service.http.post("/v1/fits", json=inline(dataset=name)), 422, "invalid_request", "dataset"
        )
    for name in names["accept"]:
        response = service.http.post("/v1/fits", json=inline(dataset=name))
        assert response.status_code in (200, 202), (name, response.text)
        service.end_of(response.json()["id"])


def case(service: Service, name: str, target: str, **fields: Any) -> httpx.Response:
    return service.submit(
        (CASES / name).read_bytes(), "case-" + name[:3].strip("_"), target, name=name, **fields
    )


def test_table_cases_are_refused_as_documented(service: Service) -> None:
    check_problem(case(service, "05_ragged_line_12.csv", "y"), 422, "invalid_table", says="12")
    check_problem(case(service, "06_duplicate_unnamed_empty_columns.csv", "y"), 422, "invalid_table")
    check_problem(case(service, "08_eleven_classes.csv", "y"), 422, "invalid_target", "y", "10")
    check_problem(
        case(service, "09_continuous_target.csv", "y", task="classification"),
        422,
        "invalid_target",
        "y",
        "regression",
    )
    check_problem(case(service, "10a_infinite_cell.csv", "y"), 422, "invalid_table", says="row")
    check_problem(case(service, "10b_label_missing.csv", "y"), 422, "invalid_target", "y")
    check_problem(case(service, "17_latin1.csv", "y"), 422, "invalid_table", says="latin-1")


def test_16_kilobytes_that_become_4_million_rows_are_refused_in_two_seconds(service: Service) -> None:
    began = time.monotonic()
    response = case(service, "14_four_million_rows.csv.gz", "y")
    assert time.monotonic() - began < 2
    check_problem(response, 413, "too_large")
    assert response.json()["limit"] < 4_000_000


def test_table_cases_are_fitted_as_documented(service: Service) -> None:
    for name, target, labels in [
        ("03a_labels_int.csv", "y", int),
        ("03b_labels_float.csv", "y", float),
        ("03c_labels_bool.csv", "y", bool),
        ("03d_labels_text_numbers.csv", "y", str),
        ("11a_single_class.csv", "y", None),
        ("11b_class_seen_once.csv", "y", None),
    ]:
        response = case(service, name, target)
        assert response.status_code in (200, 202), (name, response.text)
        job = service.end_of(response.json()["id"])
        assert job["state"] == "succeeded", (name, job["error"])
        table = (CASES / name).read_bytes()
        rows = b"\n".join(table.splitlines()[:6]) + b"\n"
        path = f"/v1/datasets/{job['dataset']}/predict"
        answer = service.http.post(path, content=rows, headers={"content-type": "text/csv"}).json()
        assert len(answer["predictions"]) == 5, answer
        assert set(answer["predictions"]) <= set(answer["classes"])
        if labels is not None:
            assert {type(label) for label in answer["classes"]} == {labels}


def test_the_same_faults_in_a_large_file_end_the_job_with_the_same_code(
    private_stack: Callable[..., Stack],
) -> None:
    limits = {
        "TABRELAY_MAX_INLINE_PARSE_BYTES": "1000",
        "TABRELAY_MAX_UPLOAD_BYTES": "200000",
        "TABRELAY_MAX_ROWS": "500",
        "TABRELAY_MAX_PREDICT_ROWS": "50",
        "TABRELAY_MAX_PREDICT_BYTES": "20000",
    }
    with Service(private_stack(environ=limits).url) as service:
        for name, code in [("08_eleven_classes.csv", "invalid_target"), ("05_ragged_line_12.csv", "queued")]:
            response = case(service, name, "y")
            if code == "queued":  # small enough to be parsed before the answer
                check_problem(response, 422, "invalid_table")
                continue
            assert response.status_code == 202
            job = service.end_of(response.json()["id"])
            assert (job["state"], job["error"]["code"]) == ("failed", code)
        assert service.fit(numeric(rows=300), "raw")["rows"] == 300
        job = service.end_of(service.submit(numeric(rows=600, columns=4), "too-long").json()["id"])
        assert (job["state"], job["error"]["code"], job["error"]["facts"]["limit"]) == (
            "failed",
            "too_large",
            500,
        )
        big = service.submit(b"a,y\n" + b"1.5,p\n" * 200_000, "refused", name="big.csv")
        check_problem(big, 413, "too_large")
        assert big.json()["size"] > 1_000_000
        rows = numeric(rows=60).drop_columns(["y"])
        too_many = service.ask("raw", rows)
        check_problem(too_many, 413, "too_large")
        assert (too_many.json()["limit"], too_many.json()["size"]) == (50, 60)
        check_problem(service.ask("raw", numeric(rows=600, columns=60).drop_columns(["y"])), 413, "too_large")
        zipped = service.submit(gzip.compress(b"a,y\n" + b"1.5,p\n" * 100_000), "refused", name="t.csv.gz")
        check_problem(zipped, 413, "too_large")
