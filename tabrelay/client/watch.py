"""Following a job: by the service's stream of events, by asking again and again where there is none."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from contextlib import closing

import httpx

from tabrelay.client.errors import TabrelayHTTPError, parse_retry_after
from tabrelay.client.sse import ServerEvent, lines, parse
from tabrelay.client.types import Job
from tabrelay.client.wire import Call, Pace, Wire, read_object

EVENT_STREAM = "text/event-stream"
#: Longest time between two looks at a job, whatever the service says.
MAX_POLL_S = 10.0
POLL_S = 0.5
#: Streams in a row that were cut without a word about the job; a proxy that holds them back does that.
MAX_MUTE = 2
#: Answers that say there is no stream to be had here: an older service, or all its streams taken.
NO_STREAM = frozenset({404, 405, 406, 429, 501})


class Watch:
    """One job's states, each as it is told."""

    def __init__(self, wire: Wire, pace: Pace, path: str, timeout_s: float) -> None:
        """`path` is the job's; `timeout_s` bounds each call with its retries, not the watch."""
        self._wire = wire
        self._pace = pace
        self._path = path
        self._timeout_s = timeout_s
        self._last_id = ""

    def states(self) -> Generator[Job]:
        """States up to the end, repeated ones too."""
        mute = cuts = 0
        while mute < MAX_MUTE:
            response = self._open()
            if response is None:
                break
            told = False
            with closing(response):
                for now in self._read(response):
                    told = True
                    yield now
                    if now.ended:
                        return
            mute, cuts = (0, 0) if told else (mute + 1, cuts + 1)
            self._pace.sleep(self._wire.backoff(cuts))
        yield from self._polled()

    def _open(self) -> httpx.Response | None:
        headers = {"Accept": EVENT_STREAM, "Cache-Control": "no-store"}
        if self._last_id:
            headers["Last-Event-ID"] = self._last_id
        call = Call("GET", f"{self._path}/events", headers=headers, streams=True)
        try:
            response = self._wire.send(call, self._timeout_s)
        except TabrelayHTTPError as error:
            if error.status in NO_STREAM and error.code != "job_not_found":
                return None
            raise
        if response.headers.get("Content-Type", "").partition(";")[0].strip() == EVENT_STREAM:
            return response
        response.close()  # 204: the end was told before; else no stream of ours
        return None

    def _read(self, response: httpx.Response) -> Iterator[Job]:
        """What a stream tells until it ends, is cut, or says that it can't go on."""
        try:
            for event in parse(lines(response.iter_text())):
                if event.name == "error":
                    return
                now = _job(event)
                if event.id is not None:
                    self._last_id = event.id
                if now is not None:
                    yield now
        except httpx.RequestError:
            return

    def _polled(self) -> Iterator[Job]:
        """Asks the service to hold each answer for a second and keeps the pace that its `Retry-After` names."""
        call = Call("GET", self._path, headers={"Prefer": "wait=1"}, held_s=1)
        while True:
            asked = self._pace.now()
            response = self._wire.send(call, self._timeout_s)
            now = Job.decode(read_object(response))
            yield now
            if now.ended:
                return
            told_s = parse_retry_after(response.headers.get("Retry-After"))
            pause_s = min(MAX_POLL_S, POLL_S if told_s is None else told_s) - (self._pace.now() - asked)
            self._pace.sleep(max(0.0, pause_s))


def _job(event: ServerEvent) -> Job | None:
    """The job that an event holds; None for what a newer service may tell besides."""
    if event.name not in ("progress", "end"):
        return None
    try:
        data = json.loads(event.data)
        return Job.decode(data) if isinstance(data, dict) else None
    except (ValueError, TypeError):
        return None
