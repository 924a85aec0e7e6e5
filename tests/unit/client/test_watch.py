from __future__ import annotations

import httpx
import pytest

from tabrelay.client import ConnectionFailed, JobCancelled, NotAuthorized, NotFound
from tabrelay.client.sse import ServerEvent, lines, parse

from .fakes import answer, event, job, problem, service, stream

LOST = httpx.RemoteProtocolError("peer closed connection without sending complete message body")
SILENT = httpx.ReadTimeout("timed out")


def running(phase: str, fraction: float = 0.0) -> dict:
    return job("running", phase=phase, fraction=fraction)


def test_events_are_read_as_the_standard_says():
    text = (
        ": hello\r\nretry: 5\n\nid: 1\revent: a\rdata: x\rdata:  y\r\r\n\n"
        "data\n\nid\nid: n\0ul\nevent: b\ncolour: red\ndata: z\u2028z\n\nevent: c\n\ndata: cut off\n"
    )
    expected = [
        ServerEvent("a", "x\n y", "1"),
        ServerEvent("message", ""),
        ServerEvent("b", "z\u2028z", ""),
    ]
    for size in (1, 2, 3, 7, 1000):
        chunks = [text[i : i + size] for i in range(0, len(text), size)]
        assert list(parse(lines(chunks))) == expected


def test_watch_reads_the_stream_and_closes_it():
    svc = service(answer(202, job()))
    body = stream(
        b"retry: 1000\n\n" + event("progress", job(queue_position=1), "0-0"),
        b": keep-alive\n\n",
        event("progress", running("encoding", 0.5), "5-0")[:40],
        event("progress", running("encoding", 0.5), "5-0")[40:],
        event("later", {"something": "new"}, "6-0") + event("end", job("succeeded", version=3), "7-0"),
    )
    svc.streams = [body]
    seen = []
    ended = svc.client().fit([{"a": 1, "y": 0}], "y", "churn", on_progress=seen.append)
    assert ended.version == 3
    assert [(s.state, s.phase, s.queue_position) for s in seen] == [
        ("queued", None, None),
        ("queued", None, 1),
        ("running", "encoding", None),
        ("succeeded", None, None),
    ]
    assert svc.opened[0].url.path == "/v1/jobs/j1/events"
    assert svc.opened[0].headers["Accept"] == "text/event-stream"
    assert "Last-Event-ID" not in svc.opened[0].headers
    assert len(svc.requests) == 1
    assert svc.slept == []
    assert body.is_closed


def test_a_cut_stream_is_resumed_where_it_was():
    svc = service(answer(500))
    svc.streams = [
        stream(
            event("progress", running("loading"), "1-0"), event("progress", running("x"), "2-0")[:30], LOST
        ),
        stream(event("progress", running("encoding"), "2-0"), event("error", {"code": "x"})),
        stream(event("end", job("succeeded"), "3-0")),
    ]
    assert [s.phase for s in svc.client().watch("j1")] == ["loading", "encoding", None]
    assert [r.headers.get("Last-Event-ID") for r in svc.opened] == [None, "1-0", "2-0"]
    assert svc.slept == [0.1, 0.1]


def test_a_refused_or_restarting_service_is_awaited_with_growing_pauses():
    svc = service(answer(500))
    svc.streams = [
        stream(event("progress", running("loading"), "1-0"), LOST),
        httpx.ConnectError("refused"),
        problem(503, "catalogue_unavailable", retry_after=2),
        stream(event("end", job("succeeded"), "3-0")),
    ]
    assert [s.state for s in svc.client().watch("j1")] == ["running", "succeeded"]
    assert svc.opened[-1].headers["Last-Event-ID"] == "1-0"
    assert svc.slept == [0.1, 0.1, 2.0]


def test_a_service_that_stays_away_is_an_error_in_bounded_time():
    svc = service(httpx.ConnectError("refused"))
    svc.streams = [stream(event("progress", running("loading"), "1-0"), LOST)]
    svc.streams += [httpx.ConnectError("refused")] * 40
    with pytest.raises(ConnectionFailed):
        list(svc.client(timeout_s=20).watch("j1"))
    assert svc.now < 25


@pytest.mark.parametrize(
    "given",
    [
        httpx.Response(404, text="not here"),
        problem(404, "not_found"),
        problem(405, "method_not_allowed"),
        problem(429, "overloaded", retry_after=5),
        answer(200, job("running")),
        httpx.Response(204),
    ],
)
def test_without_a_stream_the_job_is_asked_for(given):
    svc = service(answer(200, job("running")), answer(200, job("succeeded")))
    svc.streams = [given]
    assert [s.state for s in svc.client().watch("j1")] == ["running", "succeeded"]
    assert len(svc.opened) == 1
    assert all(request.headers["Prefer"] == "wait=1" for request in svc.requests)


def test_streams_that_are_held_back_on_the_way_are_given_up():
    svc = service(answer(200, job("succeeded")))
    svc.streams = [stream(SILENT), stream(b": keep-alive\n\n", LOST), stream(LOST)]
    assert [s.state for s in svc.client().watch("j1")] == ["succeeded"]
    assert len(svc.opened) == 2


def test_an_unknown_job_and_a_wrong_key_are_errors_at_once():
    for given, kind in ((problem(404, "job_not_found"), NotFound), (problem(401, "x"), NotAuthorized)):
        svc = service(answer(200, job()))
        svc.streams = [given]
        with pytest.raises(kind):
            list(svc.client().watch("j1"))
        assert svc.requests == []


def test_an_unreadable_event_is_passed_over():
    svc = service(answer(500))
    svc.streams = [
        stream(
            b"event: progress\ndata: {nonsense\n\n",
            b"event: progress\ndata: [1]\n\n",
            b'event: progress\ndata: {"no": "id"}\n\n',
            event("end", job("cancelled"), "3-0"),
        )
    ]
    with pytest.raises(JobCancelled):
        svc.client().wait("j1")


def test_a_watch_that_is_given_up_closes_its_stream():
    svc = service(answer(500))
    body = stream(event("progress", running("loading"), "1-0"), event("progress", running("encoding"), "2-0"))
    svc.streams = [body]
    states = svc.client().watch("j1")
    next(states)
    states.close()
    assert body.is_closed
