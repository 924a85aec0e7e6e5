"""Jobs and datasets over HTTP: the same content, cancels, versions, pins, deletes."""

from __future__ import annotations

import pytest

from tabrelay.up.embedded import Stack
from tests.support import Service, numeric, wait_until

pytestmark = pytest.mark.integration

SLOW = '{"n_estimators": 32}'


def test_a_fit_reports_phases_and_ends_with_timings_bytes_and_a_file(service: Service, stack: Stack) -> None:
    response = service.submit(numeric(seed=50), "phases")
    assert response.status_code == 202
    assert response.headers["location"] == f"/v1/jobs/{response.json()['id']}"
    assert int(response.headers["retry-after"]) >= 1
    job = service.end_of(response.json()["id"])
    assert list(job["timings_ms"]) == [
        "loading",
        "preprocessing",
        "encoding",
        "writing",
        "verifying",
        "publishing",
    ]
    path = stack.data_dir / "contexts" / "default" / f"{job['context']}.safetensors"
    assert path.stat().st_size == job["context_bytes"]
    assert (job["rows"], job["columns"], job["fraction"], job["attempt"]) == (120, 6, 1.0, 1)


def test_the_first_predict_after_a_fit_finds_the_context_loaded(service: Service) -> None:
    job = service.fit(numeric(seed=51), "prefetched")

    def resident() -> bool:
        shown = service.http.get("/v1/datasets/prefetched").json()["versions"][0]
        return bool(shown["resident_on"])

    wait_until(resident, "residency after publish", 10)
    answer = service.predict("prefetched", numeric(seed=51).drop_columns(["y"]).slice(0, 4))
    assert answer["context"] == job["context"]
    workers = service.http.get("/v1/workers").json()
    (worker,) = workers["predict"]
    assert job["context"] in [held["context"] for held in worker["contexts"]]
    assert worker["used_bytes"] == sum(held["bytes"] for held in worker["contexts"])


def test_prefer_wait_answers_with_the_finished_job(service: Service) -> None:
    response = service.http.post(
        "/v1/fits",
        json={
            "dataset": "waited",
            "target": "y",
            "columns": ["a", "y"],
            "rows": [[i, f"k{i % 2}"] for i in range(40)],
        },
        headers={"Prefer": "wait=25"},
    )
    assert (response.status_code, response.json()["state"]) == (200, "succeeded")


def test_the_same_content_is_known_and_under_another_name_shares_the_file(service: Service) -> None:
    table = numeric(seed=52)
    first = service.fit(table, "same")
    again = service.submit(table, "same")
    assert (again.status_code, again.json()["id"]) == (200, first["id"])
    other = service.fit(table, "same-again")
    assert other["context"] == first["context"]
    assert "encoding" not in other["timings_ms"]
    assert service.fit(table, "same", options='{"n_estimators": 4}')["version"] == 2


def test_an_idempotency_key_makes_a_repeated_submit_safe(service: Service) -> None:
    table = numeric(seed=53)
    first = service.submit(table, "keyed", idempotency_key="once").json()
    assert service.submit(table, "keyed", idempotency_key="once").json()["id"] == first["id"]
    service.end_of(first["id"])
    refused = service.submit(numeric(seed=54), "keyed", idempotency_key="once")
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_request")


def test_waiting_and_running_jobs_are_cancelled_and_leave_nothing(service: Service, stack: Stack) -> None:
    running = service.submit(numeric(rows=3000, columns=30), "cancelled", options=SLOW).json()
    waiting = service.submit(numeric(seed=55), "cancelled-waiting").json()
    wait_until(lambda: service.job(running["id"])["phase"] == "encoding", "encoding")
    assert service.job(waiting["id"])["queue_position"] == 1
    assert service.http.delete(f"/v1/jobs/{waiting['id']}").json()["state"] == "cancelled"
    assert service.http.delete(f"/v1/jobs/{running['id']}").json()["cancel_requested"]
    assert service.end_of(running["id"], 20)["state"] == "cancelled"
    assert service.http.get("/v1/datasets/cancelled").status_code == 404
    assert list((stack.data_dir / "contexts").rglob(".tmp-*")) == []
    assert service.fit(numeric(seed=56), "after-cancel")["state"] == "succeeded"
    assert (
        service.http.delete(f"/v1/jobs/{service.fit(numeric(seed=56), 'after-cancel')['id']}").status_code
        == 409
    )


def test_a_failed_refit_leaves_the_old_version_serving(service: Service) -> None:
    table = numeric(seed=57)
    service.fit(table, "kept")
    rows = table.drop_columns(["y"]).slice(0, 4)
    before = service.predict("kept", rows)
    running = service.submit(numeric(rows=3000, columns=30), "kept", options=SLOW).json()
    wait_until(lambda: service.job(running["id"])["state"] == "running", "running")
    assert service.predict("kept", rows)["probabilities"] == before["probabilities"]
    service.http.delete(f"/v1/jobs/{running['id']}")
    service.end_of(running["id"], 20)
    assert service.predict("kept", rows)["version"] == 1


def contexts(stack: Stack) -> set[str]:
    return {path.stem for path in (stack.data_dir / "contexts" / "default").glob("*.safetensors")}


def test_two_versions_are_kept_unless_pinned_and_delete_takes_every_file(
    service: Service, stack: Stack
) -> None:
    jobs = [service.fit(numeric(seed=60 + i), "versions") for i in range(3)]
    shown = service.http.get("/v1/datasets/versions").json()
    assert [v["version"] for v in shown["versions"]] == [2, 3]
    wait_until(lambda: jobs[0]["context"] not in contexts(stack), "the first version's file to go")
    rows = numeric(seed=60).drop_columns(["y"]).slice(0, 4)
    assert service.predict("versions", rows)["version"] == 3
    assert service.predict("versions", rows, version=2)["context"] == jobs[1]["context"]
    assert service.ask("versions", rows, version=1).status_code == 404
    pinned = service.http.put("/v1/datasets/versions/pin", json={"pinned": True}).json()
    assert pinned["pinned"] is True
    service.fit(numeric(seed=63), "versions")
    assert len(service.http.get("/v1/datasets/versions").json()["versions"]) == 3
    held = {v["context"] for v in service.http.get("/v1/datasets/versions").json()["versions"]}
    tables = len(list((stack.data_dir / "tables" / "default").iterdir()))
    assert service.http.delete("/v1/datasets/versions").status_code == 204
    assert held & contexts(stack) == set()
    assert len(list((stack.data_dir / "tables" / "default").iterdir())) == tables - 3
    assert service.ask("versions", rows).status_code == 404
    assert service.http.delete("/v1/datasets/versions").status_code == 404
    records = (stack.data_dir / "records.jsonl").read_text().splitlines()
    assert '"op":"delete"' in records[-1]

    def unloaded() -> bool:
        (worker,) = service.http.get("/v1/workers").json()["predict"]
        return not held & {c["context"] for c in worker["contexts"]}

    wait_until(unloaded, "the predict worker to drop deleted contexts", 10)


def test_lists_page_through_everything(service: Service) -> None:
    for i in range(3):
        service.fit(numeric(rows=40, seed=70 + i), f"page-{i}")
    for path, key in (("/v1/datasets", "name"), ("/v1/jobs", "id")):
        what = path.rsplit("/", 1)[1]
        whole = [entry[key] for entry in service.http.get(path, params={"limit": 500}).json()[what]]
        seen, cursor = [], None
        while True:
            page = service.http.get(
                path, params={"limit": 2, **({"cursor": cursor} if cursor else {})}
            ).json()
            seen += [entry[key] for entry in page[what]]
            cursor = page["next"]
            if cursor is None:
                break
        assert seen == whole
        assert len(seen) >= 3


def test_models_limits_health_and_the_api_s_own_description(service: Service) -> None:
    models = service.http.get("/v1/models").json()
    assert models["default"] == "tabicl-mini"
    assert service.http.get("/v1/limits").json()["models"]["tabicl-mini"]["max_classes"] == 10
    assert service.http.get("/livez").json() == {"live": True}
    assert service.http.get("/readyz").json()["ready"] is True
    described = service.http.get("/openapi.json").json()
    assert {"/v1/fits", "/v1/jobs/{job_id}", "/v1/datasets/{name}/predict"} <= set(described["paths"])
    page = service.http.get("/docs").text
    assert "/openapi.json" in page
    assert 'src="http' not in page
    assert 'href="http' not in page


def test_an_answer_explains_its_time(service: Service) -> None:
    service.fit(numeric(seed=80), "timed")
    response = service.ask("timed", numeric(seed=80).drop_columns(["y"]).slice(0, 2))
    timings = response.json()["timings_ms"]
    parts = sum(ms for name, ms in timings.items() if name != "total")
    assert parts == pytest.approx(timings["total"], rel=0.05, abs=0.5)
    assert "forward;dur=" in response.headers["server-timing"]


def test_a_repeated_request_for_a_job_whose_dataset_is_gone_leaves_no_table_behind(
    service: Service, stack: Stack
) -> None:
    table = numeric(seed=58)
    first = service.submit(table, "repeated", idempotency_key="repeated-1").json()
    service.end_of(first["id"])
    tables = stack.data_dir / "tables" / "default"
    before = set(tables.iterdir())
    assert service.http.delete("/v1/datasets/repeated").status_code == 204
    gone = before - set(tables.iterdir())
    assert len(gone) == 1
    assert service.submit(table, "repeated", idempotency_key="repeated-1").json()["id"] == first["id"]
    assert gone.isdisjoint(tables.iterdir())
