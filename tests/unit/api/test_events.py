"""Event streams without a server: framing, resume, trimmed ids, positions, bounds, outages."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import fakeredis
import pytest
from flask import Flask

from api import events as api_events
from api import problems
from api.events import KEEP_ALIVE_S, LONGEST_S, OUTAGE_S, EventStreams, Peer, follow, frame
from common.catalogue import Catalogue
from common.catalogue.events import BEGINNING, KEPT
from common.catalogue.jobs import Claim
from common.catalogue.records import NewJob, Phase
from common.errors import CatalogueUnavailable, InvalidTable, JobNotFound, Overloaded
from common.names import new_id
from common.service.follow import Follower, Told
from common.settings import Settings

QUEUE = "fit.small"


@pytest.fixture
def client() -> Any:
    return fakeredis.FakeRedis(decode_responses=True)


@pytest.fixture
def catalogue(client: Any) -> Catalogue:
    return Catalogue(client, Settings())


def submit(catalogue: Catalogue, tenant: str = "default") -> str:
    new = NewJob(
        id=new_id(), tenant=tenant, dataset="d", model="m", task="classification", target="y", options={},
        queue=QUEUE, key=new_id(), estimate_s=10.0,
    )  # fmt: skip
    return catalogue.jobs.submit(new).job.id


def claim(catalogue: Catalogue) -> Claim:
    found = catalogue.jobs.claim(QUEUE, "w", 1, new_id())
    assert found is not None
    return found


def fail(catalogue: Catalogue, held: Claim) -> None:
    catalogue.jobs.fail(held, InvalidTable("no rows"), {"loading": 3.0})


def stages(told: list[Told]) -> list[tuple[str, str, float]]:
    return [(str(one.job.state), one.job.phase, one.job.fraction) for one in told]


class Clock:
    """Moves by what is slept, and by a second at each look at the client."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def here(self) -> bool:
        self.now += 1.0
        return False


def test_a_frame_is_one_event_whatever_the_data_holds() -> None:
    raw = frame("progress", {"detail": "two\nlines\r\u2028"}, "5-0")
    head, data = raw.decode().split("\ndata: ")
    assert head == "id: 5-0\nevent: progress"
    assert json.loads(data) == {"detail": "two\nlines\r\u2028"}
    assert data.endswith("\n\n")
    assert "\n" not in data[:-2]
    assert "\r" not in data
    assert frame("error", {}) == b"event: error\ndata: {}\n\n"


def test_a_reader_from_the_start_sees_every_change_in_order(catalogue: Catalogue) -> None:
    follower = Follower(catalogue, "default", submit(catalogue))
    (first,) = follower.begin()
    assert (str(first.job.state), first.outlook.position, first.id) == ("queued", 1, BEGINNING)
    held = claim(catalogue)
    catalogue.jobs.report(held, Phase.ENCODING, 0.5)
    told = follower.more(0.01)
    assert stages(told) == [("running", "loading", 0.0), ("running", "encoding", 0.5)]
    assert [one.outlook.position for one in told] == [None, None]
    fail(catalogue, held)
    (end,) = follower.more(0.01)
    assert str(end.job.state) == "failed"
    assert end.job.error is not None
    assert follower.over


def test_a_change_told_late_looks_as_it_looked_then(catalogue: Catalogue) -> None:
    follower = Follower(catalogue, "default", submit(catalogue))
    follower.begin()
    held = claim(catalogue)
    catalogue.jobs.report(held, Phase.ENCODING, 0.5)
    fail(catalogue, held)
    *before, end = follower.more(0.01)
    assert [(one.job.finished_ms, one.job.error, dict(one.job.timings)) for one in before] == [
        (None, None, {})
    ] * 2
    assert (end.job.timings, end.outlook.eta_s) == ({"loading": 3.0}, None)


def test_a_resume_misses_nothing_and_repeats_nothing(catalogue: Catalogue) -> None:
    job_id = submit(catalogue)
    early = Follower(catalogue, "default", job_id)
    early.begin()
    held = claim(catalogue)
    seen = early.more(0.01)[-1].id
    for phase in (Phase.PREPROCESSING, Phase.ENCODING):
        catalogue.jobs.report(held, phase, 0.0)
    resumed = Follower(catalogue, "default", job_id)
    assert [one.job.phase for one in resumed.begin(seen)] == ["preprocessing", "encoding"]
    fail(catalogue, held)
    assert stages(resumed.more(0.01)) == [("failed", "encoding", 0.0)]
    from_the_start = Follower(catalogue, "default", job_id)
    assert [one.job.phase for one in from_the_start.begin(BEGINNING)][:3] == [
        "loading",
        "preprocessing",
        "encoding",
    ]


def test_a_resume_after_the_end_is_over_at_once(catalogue: Catalogue) -> None:
    job_id = submit(catalogue)
    fail(catalogue, claim(catalogue))
    follower = Follower(catalogue, "default", job_id)
    (end,) = follower.begin()
    again = Follower(catalogue, "default", job_id)
    assert again.begin(end.id) == []
    assert again.over


@pytest.mark.parametrize(
    "given", ["1-0", "nonsense", "9999999999999-0", "99999999999999999999999-1", "$", "+"]
)
def test_an_id_that_is_not_kept_gets_the_present_state(catalogue: Catalogue, given: str) -> None:
    job_id = submit(catalogue)
    catalogue.jobs.report(claim(catalogue), Phase.ENCODING, 0.25)
    follower = Follower(catalogue, "default", job_id)
    assert stages(follower.begin(given)) == [("running", "encoding", 0.25)]


def test_a_trimmed_beginning_gets_the_present_state(catalogue: Catalogue) -> None:
    job_id = submit(catalogue)
    held = claim(catalogue)
    for step in range(2 * KEPT):
        catalogue.jobs.report(held, Phase.ENCODING, step / 1000)
    follower = Follower(catalogue, "default", job_id)
    assert stages(follower.begin(BEGINNING)) == [("running", "encoding", (2 * KEPT - 1) / 1000)]


def test_a_waiting_job_s_new_place_is_told_without_an_id(catalogue: Catalogue) -> None:
    clock = Clock()
    first, second = submit(catalogue), submit(catalogue)
    follower = Follower(catalogue, "default", second, now=lambda: clock.now)
    assert follower.begin()[0].outlook.position == 2
    assert follower.more(0.001) == []
    catalogue.jobs.cancel("default", first)
    assert follower.more(0.001) == []
    clock.now += 2.0
    (moved,) = follower.more(0.001)
    assert (moved.outlook.position, moved.id, str(moved.job.state)) == (1, "", "queued")


def test_a_cancelled_waiting_job_ends_its_stream(catalogue: Catalogue) -> None:
    job_id = submit(catalogue)
    follower = Follower(catalogue, "default", job_id)
    follower.begin()
    catalogue.jobs.cancel("default", job_id)
    assert [str(one.job.state) for one in follower.more(0.01)] == ["cancelled"]
    assert follower.over


def test_an_end_whose_event_was_lost_is_told_all_the_same(catalogue: Catalogue, client: Any) -> None:
    job_id = submit(catalogue)
    held = claim(catalogue)
    follower = Follower(catalogue, "default", job_id)
    follower.begin()
    fail(catalogue, held)
    client.delete(f"tabrelay:events:{job_id}")
    assert [str(one.job.state) for one in follower.more(0.001)] == ["failed"]
    assert follower.over


def test_a_stranger_s_job_is_not_found(catalogue: Catalogue) -> None:
    for job_id in (submit(catalogue, tenant="other"), "unknown"):
        with pytest.raises(JobNotFound):
            Follower(catalogue, "default", job_id).begin()


class Silent(Follower):
    """Nothing changes, or the catalogue is away from the start of `down` to its end."""

    def __init__(self, catalogue: Catalogue, clock: Clock, down: tuple[float, float] = (0, 0)) -> None:
        super().__init__(catalogue, "default", "j")
        self._time, self._down = clock, down

    def more(self, wait_s: float) -> list[Told]:
        self._time.sleep(wait_s)
        if self._down[0] <= self._time.now < self._down[1]:
            raise CatalogueUnavailable
        return []


def stream(follower: Follower, clock: Clock, **given: Callable[[], bool]) -> Iterator[bytes]:
    stopping, gone = given.get("stopping", lambda: False), given.get("gone", lambda: False)
    return follow(follower, [], stopping, gone, "r-1", now=lambda: clock.now, sleep=clock.sleep)


def test_silence_is_kept_alive_and_no_stream_is_open_for_ever(catalogue: Catalogue) -> None:
    clock = Clock()
    frames = stream(Silent(catalogue, clock), clock)
    assert next(frames).startswith(b"retry: ")
    spoke = clock.now
    for said in frames:
        assert said == b": keep-alive\n\n"
        assert clock.now - spoke <= KEEP_ALIVE_S + 1
        spoke = clock.now
    assert LONGEST_S <= clock.now <= LONGEST_S + 2


@pytest.mark.parametrize("why", ["stopping", "gone"])
def test_a_stopping_server_and_a_client_that_left_end_the_stream(catalogue: Catalogue, why: str) -> None:
    clock = Clock()
    assert len(list(stream(Silent(catalogue, clock), clock, **{why: lambda: clock.now >= 3}))) == 1
    assert clock.now <= 4


def test_a_short_outage_is_not_noticed_and_a_long_one_is_told_as_a_problem(catalogue: Catalogue) -> None:
    clock = Clock()
    frames = stream(Silent(catalogue, clock, down=(5, 5 + OUTAGE_S / 2)), clock, gone=lambda: clock.now > 40)
    assert not any(b"error" in said for said in frames)
    clock = Clock()
    *_, last = stream(Silent(catalogue, clock, down=(5, 1e9)), clock)
    assert clock.now <= 5 + OUTAGE_S + 3
    event, data = last.decode().rstrip().split("\ndata: ")
    assert event == "event: error"
    assert (json.loads(data)["code"], json.loads(data)["request_id"]) == ("catalogue_unavailable", "r-1")


def test_a_job_that_disappears_ends_its_stream_with_a_problem(catalogue: Catalogue, client: Any) -> None:
    follower = Follower(catalogue, "default", submit(catalogue))
    first = follower.begin()
    client.flushall()
    *_, last = follow(follower, first, lambda: False, lambda: False, "")
    assert b"job_not_found" in last


def test_streams_are_bounded_and_a_place_is_given_back_once(catalogue: Catalogue) -> None:
    streams = EventStreams(catalogue, 2)
    first, _ = streams.take(), streams.take()
    with pytest.raises(Overloaded) as refused:
        streams.take()
    assert (refused.value.code, refused.value.retry_after_s) == ("overloaded", 5.0)
    first()
    first()
    assert streams.open == 1
    streams.take()
    with pytest.raises(Overloaded):
        streams.take()


@pytest.fixture
def app(catalogue: Catalogue) -> Flask:
    app = Flask(__name__)
    app.extensions["event_streams"] = EventStreams(catalogue, 1)
    app.register_blueprint(api_events.blueprint)
    problems.install(app)
    return app


def test_the_route_answers_a_stream_and_problems_before_it(app: Flask, catalogue: Catalogue) -> None:
    job_id = submit(catalogue)
    http = app.test_client()
    missing = http.get("/v1/jobs/unknown/events")
    assert (missing.status_code, missing.get_json()["code"]) == (404, "job_not_found")
    opened = http.get(f"/v1/jobs/{job_id}/events")
    assert opened.headers["Content-Type"] == "text/event-stream"
    assert (opened.headers["Cache-Control"], opened.headers["X-Accel-Buffering"]) == ("no-store", "no")
    refused = http.get(f"/v1/jobs/{job_id}/events")
    assert (refused.status_code, refused.get_json()["code"]) == (429, "overloaded")
    assert refused.headers["Retry-After"] == "5"
    opened.close()
    for _ in range(2):
        with http.head(f"/v1/jobs/{job_id}/events") as head:
            assert head.status_code == 200
    fail(catalogue, claim(catalogue))
    with http.get(f"/v1/jobs/{job_id}/events") as ended:
        whole = ended.get_data(as_text=True)
    assert whole.count("event: end\n") == 1
    last_id = whole.partition("id: ")[2].partition("\n")[0]
    done = http.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": last_id})
    assert (done.status_code, done.data) == (204, b"")
    assert app.extensions["event_streams"].open == 0


def test_a_peer_that_closed_is_noticed_without_writing_to_it() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer = Peer(ours)
        assert not peer.gone()
        theirs.sendall(b"GET /next")
        assert not peer.gone()
        assert ours.recv(99) == b"GET /next"
        theirs.close()
        assert peer.gone()
    assert peer.gone()
    assert not Peer(None).gone()


def test_places_are_counted_right_between_threads(catalogue: Catalogue) -> None:
    streams = EventStreams(catalogue, 10**6)

    def come_and_go() -> None:
        for _ in range(500):
            streams.take()()

    threads = [threading.Thread(target=come_and_go) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert streams.open == 0


def test_more_streams_than_threads_refuse_to_start() -> None:
    with pytest.raises(ValueError, match="less than api_threads"):
        Settings(max_event_streams=32, api_threads=32)
    assert Settings(max_event_streams=31, api_threads=32).event_streams == 31
    assert Settings(api_threads=4).event_streams == 3
