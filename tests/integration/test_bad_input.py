"""What can't be used is refused by name, as a problem, and the stack goes on answering."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tabrelay.up.embedded import Stack
from tests.support import Service, as_csv, as_json, as_parquet, check_problem, mixed, numeric, wait_until

pytestmark = pytest.mark.integration

CASES = Path(__file__).resolve().parents[1] / "cases"
JSON = {"content-type": "application/json"}


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
    "target is no text": (inline(target=7), 422, "invalid_request", "target", ""),
    "column named twice": (inline(columns=["a", "a", "y"], rows=[[1, 2, "p"]]), 422, "invalid_table", "a", ""),
    "infinite cell": (inline(columns=["a", "y"], rows=[[1, "p"], [1e308 * 10, "q"]]), 400, "malformed_body", None, ""),
    "nested cell": (inline(rows=[[[1], "p"], [2, "q"]]), 422, "invalid_table", "a", ""),
    "rows are no list": (inline(rows="1,2"), 422, "invalid_table", None, "rows"),
    "text as regression": (inline(task="regression"), 422, "invalid_target", "y", "classification"),
    "option is no number": (inline(options={"n_estimators": "8"}), 422, "invalid_request", "options.n_estimators", ""),
    "option is a boolean": (inline(options={"n_estimators": True}), 422, "invalid_request", "options.n_estimators", ""),
    "ragged row": (inline(rows=[[1, "p"], [2]]), 422, "invalid_table", None, ""),
    "label missing": (inline(rows=[[1, "p"], [2, None]]), 422, "invalid_target", "y", "2"),
    "mixed column": (inline(rows=[[1, "p"], ["x", "q"]]), 422, "invalid_table", "a", ""),
    "unknown model": (inline(model="gpt"), 404, "model_not_found", None, "tabicl-mini"),
    "model without weights": (inline(model="tabicl-v2"), 503, "model_not_ready", None, "tabicl-classifier"),
    "unknown declaration": (inline(options={"schema": {"drop": ["a"]}}), 422, "invalid_request", "options.schema.drop", "ignore"),
    "declaration of no column": (inline(options={"schema": {"ignore": ["b"]}}), 422, "invalid_request", "options.schema.ignore", "'a'"),
    "declaration that does not fit": (
        inline(options={"schema": {"datetime": ["a"]}}), 422, "invalid_table", "a", "declared datetime",
    ),
    "nothing is left": (inline(options={"schema": {"ignore": ["a"]}}), 422, "invalid_table", None, "no feature"),
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
def test_an_unusable_fit_is_refused_by_name(fitted: Service, kind: str) -> None:
    body, status, code, field, says = FITS[kind]
    content = json.dumps(body)  # which writes infinity as JSON doesn't know it
    response = fitted.http.post("/v1/fits", content=content, headers=JSON)
    check_problem(response, status, code, field, says)
    assert fitted.http.get("/v1/datasets/refused").status_code == 404
    rows = mixed().drop_columns(["y", "z"]).slice(0, 1)
    assert fitted.predict("bad-input", rows)["version"] == 1


def test_an_infinite_cell_of_a_file_is_named_by_column_and_row(service: Service) -> None:
    table = pa.table({"a": [1.0, 2.0, np.inf], "b": [0.0, -np.inf, 1.0], "y": ["p", "q", "p"]})
    response = service.submit(table, "refused")
    check_problem(response, 422, "invalid_table", "a", "row 3")
    check_problem(response, 422, "invalid_table", "b", "row 2")


def test_a_request_id_of_the_client_s_own_is_kept_in_the_problem(service: Service) -> None:
    response = service.http.get("/v1/jobs/0123", headers={"X-Request-Id": "mine-1"})
    check_problem(response, 404, "job_not_found")
    assert response.json()["request_id"] == "mine-1"
    odd = service.http.get("/v1/jobs/0123", headers={"X-Request-Id": "a b<script>"})
    check_problem(odd, 404, "job_not_found")
    assert "script" not in odd.text


def test_bodies_that_are_not_what_they_say_are_malformed(fitted: Service) -> None:
    fits, predict = "/v1/fits", "/v1/datasets/bad-input/predict"
    http = fitted.http
    check_problem(http.post(fits, content=b'{"dataset":', headers=JSON), 400, "malformed_body")
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
    assert "POST" in fitted.http.put("/v1/fits").headers["allow"]
    check_problem(fitted.http.get("/v1/datasets/bad-input/predict"), 405, "method_not_allowed")


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
    ragged = {"columns": ["plan", "since"], "rows": [["a", None], ["a"]]}
    check_problem(fitted.ask("bad-input", ragged), 422, "invalid_table", says="2")
    deep = b'{"columns":["plan"],"rows":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    path = "/v1/datasets/bad-input/predict"
    check_problem(fitted.http.post(path, content=deep, headers=JSON), 400, "malformed_body")
    csv = {"content-type": "text/csv"}
    check_problem(
        fitted.http.post(path, content=b"plan,since\nx,2024-01-01\ny\n", headers=csv),
        422, "invalid_table", says="line 3",
    )  # fmt: skip
    assert fitted.http.post(path, content=b"", headers=csv).status_code == 422
    assert fitted.predict("bad-input", rows)["version"] == 1


def test_queries_out_of_range_are_refused_by_name(fitted: Service) -> None:
    rows = mixed().drop_columns(["y", "z"]).slice(0, 2)
    for dataset, query, field in [
        ("bad-input", {"version": "two"}, "version"),
        ("bad-input", {"output": "quantiles"}, "output"),
        ("bad-input", {"deadline_ms": 0}, "deadline_ms"),
        ("bad-input", {"deadline_ms": 10**12}, "deadline_ms"),
        ("bad-input", {"version": "0"}, "version"),
        ("bad-input", {"version": "-1"}, "version"),
        ("bad-input", {"version": "9" * 30}, "version"),
        ("bad-input", {"output": "everything"}, "output"),
        ("bad-input", {"quantiles": "0.5"}, "quantiles"),
        ("bad-input", {"deadline_ms": "soon"}, "deadline_ms"),
        ("bad-input", {"deadline_ms": "-5"}, "deadline_ms"),
        ("bad-input-reg", {"output": "proba"}, "output"),
        ("bad-input-reg", {"output": "mode"}, "output"),
        ("bad-input-reg", {"output": "variance"}, "output"),
        ("bad-input", {"output": "variance"}, "output"),
        ("bad-input-reg", {"threshold": "0.5"}, "threshold"),
        ("bad-input", {"threshold": "1.5"}, "threshold"),
        ("bad-input", {"threshold": "0.1,0.2"}, "threshold"),
        ("bad-input", {"threshold": "nan"}, "threshold"),
        ("bad-input-reg", {"quantiles": "nan"}, "quantiles"),
        ("bad-input-reg", {"quantiles": "0"}, "quantiles"),
        ("bad-input-reg", {"quantiles": "0.5,1.5"}, "quantiles"),
        ("bad-input-reg", {"quantiles": "half"}, "quantiles"),
    ]:
        check_problem(fitted.ask(dataset, rows, **query), 422, "invalid_request", field)
    told = fitted.ask("bad-input-reg", rows, output="variance")
    check_problem(told, 422, "invalid_request", "output", "as if it were a value")
    check_problem(fitted.http.get("/v1/jobs?state=odd"), 422, "invalid_request", "state")
    check_problem(fitted.http.get("/v1/jobs?limit=0"), 422, "invalid_request", "limit")


def test_a_failed_refit_of_a_large_file_has_the_same_code_and_leaves_the_old_version_serving(
    private_stack: Callable[..., Stack],
) -> None:
    limits = {
        "TABRELAY_MAX_INLINE_PARSE_BYTES": "1000",
        "TABRELAY_MAX_UPLOAD_BYTES": "200000",
        "TABRELAY_MAX_ROWS": "500",
        "TABRELAY_MAX_PREDICT_ROWS": "50",
        "TABRELAY_MAX_PREDICT_BYTES": "20000",
    }
    stack = private_stack(environ=limits)
    with Service(stack.url) as service:
        table = numeric(rows=300)
        kept = service.fit(table, "raw", options='{"schema": {"ignore": ["c5"], "categorical": ["c4"]}}')
        assert (kept["rows"], kept["columns"]) == (300, 5)
        assert {c["name"]: c["kind"] for c in kept["schema"]["columns"]}["c4"] == "text"
        rows = table.drop_columns(["y"]).slice(0, 5)
        before = service.predict("raw", rows)
        too_long = numeric(rows=600, columns=4)
        for content, name, code in [
            ((CASES / "08_eleven_classes.csv").read_bytes(), "t.csv", "invalid_target"),
            (as_csv(table) + b"1,2\n", "t.csv", "invalid_table"),
            (as_parquet(table)[:-100], "t.parquet", "malformed_body"),
            (as_csv(table), "t.csv", "invalid_request"),
            (as_parquet(too_long), "t.parquet", "too_large"),
        ]:
            options = '{"schema": {"ignore": ["nope"]}}' if code == "invalid_request" else "{}"
            response = service.submit(content, "raw", name=name, options=options)
            assert response.status_code == 202, (code, response.text)
            job = service.end_of(response.json()["id"])
            assert (job["state"], job["error"]["code"]) == ("failed", code), job
            assert service.predict("raw", rows)["probabilities"] == before["probabilities"]
        assert job["error"]["facts"]["limit"] == 500
        shown = service.http.get("/v1/datasets/raw").json()
        assert ([v["version"] for v in shown["versions"]], shown["pending_jobs"]) == ([1], 0)
        wait_until(lambda: not list((stack.data_dir / "uploads").iterdir()), "the failed uploads to go", 10)
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
