from __future__ import annotations

import json

import httpx
import pytest

import tabrelay
from tabrelay.client import (
    Client,
    Conflict,
    Invalid,
    JobCancelled,
    JobFailed,
    ServerError,
    TabrelayHTTPError,
    TooLarge,
)

from .fakes import answer, job, problem, service


def test_key_is_sent_and_never_shown():
    svc = service(answer(200, job()))
    client = svc.client(api_key="tr_secret")
    client.job("j1")
    assert svc.requests[0].headers["Authorization"] == "Bearer tr_secret"
    assert "tr_secret" not in repr(client) + str(vars(client))


def test_credentials_in_the_url_are_not_shown():
    assert repr(Client("http://me:pw@svc:8000/tables")) == "Client('http://svc:8000/tables')"


def test_url_and_key_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("TABRELAY_URL", "svc:9000")
    monkeypatch.setenv("TABRELAY_API_KEY", "k")
    assert tabrelay.Client().url == "http://svc:9000"


def test_unusable_url_or_key_is_a_value_error():
    with pytest.raises(ValueError, match="not a usable url"):
        Client("http://[::1")
    with pytest.raises(ValueError, match="not a usable url or API key"):
        Client("http://svc", api_key="schlüssel")


def test_fields_and_states_of_a_newer_service_are_no_error():
    svc = service(answer(200, job("paused", phase="polishing", colour="blue", eta_s=None, created_at="soon")))
    seen = svc.client().job("j1")
    assert (seen.state, seen.phase, seen.ended, seen.created_at) == ("paused", "polishing", False, None)
    assert seen.raw["colour"] == "blue"


def test_unknown_state_with_an_end_is_an_end():
    ended = job("expired", finished_at="2026-01-01T00:00:00Z")
    with pytest.raises(JobFailed):
        service(answer(200, ended)).client().wait("j1")


def test_fit_waits_and_reports_progress():
    svc = service(
        answer(202, job()),
        answer(200, job("running", phase="encoding", fraction=0.5), Retry_After="2"),
        answer(200, job("running", phase="encoding", fraction=0.5), Retry_After="2"),
        answer(200, job("succeeded", version=3)),
    )
    seen = []
    ended = svc.client().fit([{"a": 1, "y": 0}], "y", "churn", on_progress=seen.append)
    assert ended.version == 3
    assert [s.state for s in seen] == ["queued", "running", "succeeded"]
    assert svc.slept == [2.0, 2.0]
    assert all(request.headers["Prefer"] == "wait=1" for request in svc.requests[1:])


def test_fit_of_known_content_returns_at_once():
    svc = service(answer(200, job("succeeded", version=1)))
    assert svc.client().fit([{"a": 1, "y": 0}], "y", "churn").version == 1
    assert len(svc.requests) == 1


def test_fit_without_wait_returns_the_queued_job():
    svc = service(answer(202, job()))
    assert svc.client().fit([{"a": 1, "y": 0}], "y", "churn", wait=False).state == "queued"


def test_failed_and_cancelled_fits_raise_with_their_reason():
    error = {"code": "invalid_target", "status": 422, "detail": "one class only", "errors": []}
    svc = service(answer(202, job()), answer(200, job("failed", error=error)))
    with pytest.raises(JobFailed, match="one class only") as caught:
        svc.client().fit([{"a": 1, "y": 0}], "y", "churn")
    assert (caught.value.code, caught.value.job.id) == ("invalid_target", "j1")
    with pytest.raises(JobCancelled):
        service(answer(200, job("cancelled"))).client().wait("j1")


def test_long_retry_after_does_not_hide_a_job_for_minutes():
    svc = service(answer(200, job("running"), Retry_After="600"), answer(200, job("succeeded")))
    assert [s.state for s in svc.client().watch("j1")] == ["running", "succeeded"]
    assert svc.slept == [10.0]


def test_inline_fit_sends_columns_and_rows():
    svc = service(answer(202, job()))
    svc.client().submit([{"a": 1, "y": "no"}, {"b": 2.5, "y": "yes"}], "y", "churn", options={"ensemble": 4})
    assert json.loads(svc.bodies[0]) == {
        "dataset": "churn",
        "target": "y",
        "options": {"ensemble": 4},
        "columns": ["a", "y", "b"],
        "rows": [[1, "no", None], [None, "yes", 2.5]],
    }


def test_file_fit_is_multipart_with_text_fields(tmp_path):
    table = tmp_path / "t.csv"
    table.write_text("a,y\n1,0\n")
    svc = service(answer(202, job()))
    svc.client().submit(table, "y", "churn", model="tabicl-mini", options={"ensemble": 4})
    body = svc.bodies[0].decode()
    assert svc.requests[0].headers["Content-Type"].startswith("multipart/form-data")
    assert 'name="options"\r\n\r\n{"ensemble": 4}' in body
    assert 'name="file"; filename="t.csv"\r\nContent-Type: text/csv' in body


def test_error_is_one_line_that_names_the_fields():
    svc = service(
        problem(
            422,
            "invalid_rows",
            "2 columns are missing.\n",
            errors=[{"field": "age", "message": "is missing"}],
        )
    )
    with pytest.raises(Invalid) as caught:
        svc.client().predict("d", [{"a": 1}])
    assert str(caught.value) == "2 columns are missing: age: is missing [invalid_rows]"
    assert caught.value.errors[0].field == "age"


def test_error_says_nothing_twice_and_not_too_much():
    errors = [{"field": f"c{i}", "message": "is missing"} for i in range(9)]
    for detail, line in {
        "Columns are missing: " + ", ".join(f"'c{i}'" for i in range(9)): None,
        "The rows are wrong": "The rows are wrong: "
        + "; ".join(f"c{i}: is missing" for i in range(5))
        + "; and 4 more",
    }.items():
        with pytest.raises(Invalid) as caught:
            service(problem(422, "invalid_rows", detail, errors=errors)).client().limits()
        assert str(caught.value) == f"{line or detail} [invalid_rows]"
        assert len(caught.value.errors) == 9


def test_error_carries_request_id_and_facts():
    svc = service(problem(413, "too_large", "too many rows", limit=10, size=20, request_id="r-9"))
    with pytest.raises(TooLarge) as caught:
        svc.client().predict("d", [{"a": 1}])
    error = caught.value
    assert (error.status, error.code, error.request_id, error.facts) == (
        413,
        "too_large",
        "r-9",
        {"limit": 10, "size": 20},
    )
    assert str(error) == "too many rows [too_large r-9]"


def test_page_of_a_gateway_is_still_one_clear_line():
    svc = service(httpx.Response(500, html="<html>long page</html>"))
    with pytest.raises(ServerError, match=r"the service answered 500 Internal Server Error \[http_500\]"):
        svc.client().jobs()


def test_status_without_a_class_of_its_own_is_the_base():
    with pytest.raises(TabrelayHTTPError):
        service(problem(418, "teapot")).client().limits()
    with pytest.raises(Conflict):
        service(problem(409, "conflict")).client().limits()


def test_answer_that_is_not_from_tabrelay_is_a_clear_error():
    for given in (httpx.Response(200, html="<html>hello"), answer(200, [1])):
        with pytest.raises(ServerError, match="answered what is no Tabrelay answer"):
            service(given).client().job("j1")


def test_lists_follow_cursors_up_to_the_limit():
    pages = [
        answer(200, {"jobs": [job(), job()], "next": "c1"}),
        answer(200, {"jobs": [job(), job()], "next": None}),
    ]
    svc = service(*pages)
    assert len(svc.client().jobs(state="queued", limit=3)) == 3
    assert svc.requests[1].url.params["cursor"] == "c1"
    assert svc.requests[0].url.params["state"] == "queued"
    assert "dataset" not in svc.requests[0].url.params


def test_datasets_and_versions_are_read():
    listed = {"name": "churn", "version": 2, "rows": 10, "versions": 2, "updated_at": "2026-01-01T00:00:00Z"}
    (found,) = service(answer(200, {"datasets": [listed], "next": None})).client().datasets()
    assert (found.version_count, found.versions, found.updated_at.year) == (2, (), 2026)
    one = {
        "name": "churn",
        "version": 2,
        "versions": [{"version": 2, "bytes": 5, "tiers": ["disk"]}, {"version": 1}],
    }
    found = service(answer(200, one)).client().dataset("churn")
    assert [v.version for v in found.versions] == [2, 1]
    assert found.versions[0].raw["tiers"] == ["disk"]


def test_names_are_quoted_in_paths():
    svc = service(httpx.Response(204))
    client = svc.client()
    client.delete("a/b c")
    client.pin("a/b c", False)
    assert [r.url.raw_path for r in svc.requests] == [
        b"/v1/datasets/a%2Fb%20c",
        b"/v1/datasets/a%2Fb%20c/pin",
    ]
    assert json.loads(svc.bodies[1]) == {"pinned": False}
    with pytest.raises(ValueError, match="no name"):
        client.delete("..")


def test_models_mark_the_default_and_what_is_ready():
    mini = {"name": "tabicl-mini", "ready": {"classification": True, "regression": False}}
    data = {"models": [mini, "other"], "default": "other"}
    models = service(answer(200, data)).client().models()
    assert [(m.name, m.default, m.ready) for m in models] == [
        ("tabicl-mini", False, True),
        ("other", True, False),
    ]
    assert models[0].tasks == ("classification", "regression")
    assert models[0].ready_tasks == ("classification",)


def test_workers_of_all_kinds_are_listed():
    data = {
        "predict": [{"name": "p0", "kind": "predict"}],
        "fit": [{"name": "f0", "kind": "fit"}],
        "later": 3,
    }
    assert [w["name"] for w in service(answer(200, data)).client().workers()] == ["p0", "f0"]


def test_ready_says_why_not():
    assert service(answer(200, {})).client().ready()
    missing = {"ready": False, "missing": {"fit_workers": "no fit worker is registered"}}
    state = service(answer(503, missing, Retry_After="1")).client().ready()
    assert not state
    assert state.reasons == ("fit_workers: no fit worker is registered",)
    assert service(problem(503, "unavailable", "soon")).client().ready().reasons == ("soon",)


def test_cancel_returns_the_job():
    svc = service(answer(200, job("cancelled")))
    assert svc.client().cancel("j1").state == "cancelled"
    assert svc.requests[0].method == "DELETE"
