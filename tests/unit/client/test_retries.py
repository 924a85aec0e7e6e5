from __future__ import annotations

import httpx
import pytest

from tabrelay.client import ConnectionFailed, DeadlinePassed, Invalid, NotFound, Overloaded, Unavailable

from .fakes import answer, job, problem, service

REFUSED = httpx.ConnectError("[Errno 111] Connection refused")
LOST = httpx.RemoteProtocolError("Server disconnected without sending a response.")
ROWS = [{"a": 1}]
DONE = answer(200, {"dataset": "d", "predictions": [1]})


def test_refused_connection_is_tried_again_until_it_answers():
    svc = service(REFUSED, REFUSED, answer(200, job()))
    assert svc.client().job("j1").id == "j1"
    assert svc.slept == [0.1, 0.2]


def test_service_that_never_answered_is_given_two_seconds_only():
    svc = service(REFUSED)
    with pytest.raises(ConnectionFailed, match=r"can't reach http://svc:8000: .*refused"):
        svc.client(timeout_s=60).job("j1")
    assert 2 < svc.now < 6


def test_restarting_service_that_has_answered_is_awaited_for_the_whole_timeout():
    svc = service(answer(200, job()), REFUSED)
    client = svc.client(timeout_s=40)
    client.job("j1")
    with pytest.raises(ConnectionFailed):
        client.job("j1")
    assert 30 < svc.now <= 40


def test_connection_lost_after_sending_is_tried_twice_more_only():
    svc = service(LOST)
    with pytest.raises(ConnectionFailed) as caught:
        svc.client().predict("d", ROWS)
    assert caught.value.code == "connection_lost"
    assert len(svc.requests) == 3


def test_retry_after_is_honoured_for_429_and_503():
    svc = service(
        problem(429, "worker_busy", retry_after=2), problem(503, "no_predict_worker", retry_after=1), DONE
    )
    assert svc.client().predict("d", ROWS).predictions == [1]
    assert svc.slept == [2.0, 1.0]


def test_retry_after_beyond_the_deadline_raises_at_once():
    svc = service(problem(429, "queue_full", retry_after=120))
    with pytest.raises(Overloaded) as caught:
        svc.client().predict("d", ROWS)
    assert caught.value.retry_after_s == 120
    assert svc.slept == []


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (problem(503, "device_out_of_memory"), Unavailable),
        (problem(503, "model_not_ready", retry_after=1), Unavailable),
        (problem(422, "invalid_rows", retry_after=1), Invalid),
        (problem(404, "job_not_found"), NotFound),
        (problem(504, "deadline_passed", retry_after=1), DeadlinePassed),
    ],
)
def test_error_that_will_not_pass_by_itself_is_raised_at_once(given, kind):
    svc = service(given)
    with pytest.raises(kind):
        svc.client().job("j1")
    assert len(svc.requests) == 1


def test_gateway_that_restarts_its_service_is_tried_again():
    svc = service(httpx.Response(502, html="<h1>Bad gateway</h1>"), answer(200, job()))
    assert svc.client().job("j1").id == "j1"


def test_attempts_are_bounded_even_if_the_service_always_says_now():
    svc = service(problem(429, "worker_busy", retry_after=0))
    with pytest.raises(Overloaded):
        svc.client(timeout_s=1e9).job("j1")
    assert len(svc.requests) == 30


def test_silent_service_is_reported_as_a_passed_deadline():
    svc = service(httpx.ReadTimeout("timed out"))
    with pytest.raises(DeadlinePassed, match="gave no answer in time"):
        svc.client().job("j1")
    assert len(svc.requests) == 1


def test_retried_predict_tells_the_time_that_is_left():
    svc = service(problem(503, "no_predict_worker", retry_after=2), DONE)
    svc.client().predict("d", ROWS, deadline_s=5)
    assert [request.url.params["deadline_ms"] for request in svc.requests] == ["5000", "3000"]
    assert svc.bodies[0] == svc.bodies[1] != b""


def test_retried_fit_sends_the_same_key_and_the_same_file(tmp_path):
    table = tmp_path / "t.csv"
    table.write_text("a,y\n1,0\n2,1\n")
    svc = service(REFUSED, LOST, problem(429, "queue_full", retry_after=1), answer(202, job()))
    svc.client().submit(table, "y", "churn")
    keys = {request.headers["Idempotency-Key"] for request in svc.requests}
    assert len(svc.requests) == 4
    assert len(keys) == 1
    assert all(b"a,y\n1,0\n2,1\n" in body for body in svc.bodies)


def test_two_fits_have_two_keys_and_a_given_key_is_kept():
    svc = service(answer(202, job()))
    client = svc.client()
    for key in (None, None, "mine"):
        client.submit([{"a": 1, "y": 0}], "y", "churn", idempotency_key=key)
    keys = [request.headers["Idempotency-Key"] for request in svc.requests]
    assert len(set(keys)) == 3
    assert keys[2] == "mine"
