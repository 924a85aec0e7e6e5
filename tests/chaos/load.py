"""Clients that submit, repeat, resubmit, cancel, delete and predict, and write down all that they were told."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import pyarrow as pa

from tests.chaos.expected import ASKED_ROWS, Content, Matrix, asked
from tests.chaos.world import now_ms
from tests.support import ARROW, as_arrow, as_parquet

#: What a client may be told while things break; each as problem+json.
DOCUMENTED = frozenset({404, 409, 410, 429, 503, 504, 507})
#: How long the API may refuse or reset connections.
RESET_MOST_S = 10.0
#: Longest wait for any answer; a predict's own deadline is shorter.
ANSWER_MOST_S = 60.0
PREDICT_DEADLINE_MS = 15_000
#: Jobs that a client leaves open before it asks for more.
OPEN_MOST = 3
ENDED = ("succeeded", "failed", "cancelled")


@dataclass(frozen=True)
class Accepted:
    """A job that was answered with 202."""

    job: str
    dataset: str
    content: Content
    at_ms: int


@dataclass(frozen=True)
class Answered:
    """A predict that was answered with 200."""

    dataset: str
    version: int
    context: str
    start: int
    probabilities: Matrix
    at_ms: int


@dataclass
class History:
    """What all clients were told; one lock, many writers."""

    began: float = field(default_factory=time.monotonic)
    accepted: dict[str, Accepted] = field(default_factory=dict)
    answered: list[Answered] = field(default_factory=list)
    contents: list[Content] = field(default_factory=list)
    by_key: dict[str, tuple[str, str, Content]] = field(default_factory=dict)  # job, dataset, content
    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fault(self, what: str) -> None:
        """Something that no client may ever see."""
        line = f"[{time.monotonic() - self.began:7.2f}] {what}"
        print("FAULT", line, flush=True)
        with self.lock:
            self.faults.append(line)

    def count(self, what: str) -> None:
        """One more of these."""
        with self.lock:
            self.statuses[what] += 1


class Caller:
    """HTTP with the rules of what may come back."""

    def __init__(self, url: str, history: History) -> None:
        self._http = httpx.Client(base_url=url, timeout=ANSWER_MOST_S)
        self._history = history

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def call(self, what: str, method: str, path: str, **request: Any) -> httpx.Response | None:
        """The answer; None when there was none, which is a fault unless the connection works again soon."""
        began = time.monotonic()
        while True:
            try:
                response = self._http.request(method, path, **request)
            except httpx.TimeoutException:
                self._history.fault(f"{what}: no answer to {method} {path} within {ANSWER_MOST_S:g} s")
                return None
            except httpx.TransportError as error:
                self._history.count(f"{what} reset")
                if time.monotonic() - began > RESET_MOST_S:
                    self._history.fault(f"{what}: {method} {path} fails since {RESET_MOST_S:g} s: {error!r}")
                    return None
                time.sleep(0.2)
                continue
            self._history.count(f"{what} {response.status_code}{self._code(response)}")
            self._check(what, response)
            return response

    @staticmethod
    def _code(response: httpx.Response) -> str:
        if response.status_code < 400:
            return ""
        try:
            return f" {response.json()['code']}"
        except (ValueError, KeyError):
            return " without a code"

    def _check(self, what: str, response: httpx.Response) -> None:
        text = response.text
        if response.status_code >= 400:
            if response.status_code not in DOCUMENTED:
                self._history.fault(f"{what}: status {response.status_code}: {text[:400]}")
            elif response.headers.get("content-type") != "application/problem+json":
                self._history.fault(f"{what}: status {response.status_code} is no problem+json: {text[:400]}")
        if "Traceback" in text:
            self._history.fault(f"{what}: a stack trace: {text[:400]}")


class Client:
    """One client: a random walk over everything that the API offers."""

    def __init__(self, number: int, seed: int, url: str, history: History, datasets: int) -> None:
        self._number = number
        self._rng = np.random.default_rng([seed, number])
        self._caller = Caller(url, history)
        self._history = history
        self._datasets = [f"d{i}" for i in range(datasets)]
        self._fresh = itertools.count(1)
        self._open: dict[str, str] = {}
        self._rows = asked()
        self._actions: list[tuple[Callable[[], None], float]] = [
            (self.submit_fresh, 6),
            (self.submit_long, 1.2),
            (self.resubmit, 3),
            (self.repeat_key, 2),
            (self.cancel, 0.4),
            (self.delete, 0.1),
            (self.predict, 24),
            (self.look, 3),
        ]

    def run(self, stop: threading.Event) -> None:
        """Until told to stop."""
        weights = np.array([weight for _, weight in self._actions])
        try:
            while not stop.is_set():
                act = self._actions[int(self._rng.choice(len(weights), p=weights / weights.sum()))][0]
                try:
                    act()
                except Exception as error:
                    self._history.fault(f"client {self._number} stumbled in {act.__name__}: {error!r}")
                stop.wait(float(self._rng.uniform(0.05, 0.3)))
        finally:
            self._caller.close()

    # Fits

    def submit_fresh(self) -> None:
        """A table that nobody has sent."""
        rows = int(self._rng.integers(100, 400))
        self._submit(self._new(rows, int(self._rng.integers(5, 12)), 8), self._some_dataset())

    def submit_long(self) -> None:
        """A fit of some seconds."""
        self._submit(self._new(int(self._rng.integers(600, 1000)), 20, 32), self._some_dataset())

    def resubmit(self) -> None:
        """A table that somebody sent before, to any dataset."""
        with self._history.lock:
            known = self._history.contents[-40:]
        if known:
            self._submit(known[int(self._rng.integers(len(known)))], self._some_dataset())

    def repeat_key(self) -> None:
        """The same request with the same key once more: the same job, whatever happened in between."""
        with self._history.lock:
            keys = list(self._history.by_key)[-30:]
        if not keys:
            return
        key = keys[int(self._rng.integers(len(keys)))]
        job, dataset, content = self._history.by_key[key]
        response = self._post(content, dataset, key)
        if response is not None and response.status_code in (200, 202):
            told = response.json()["id"]
            if told != job:
                self._history.fault(f"Idempotency-Key {key} was job {job} and is now job {told}")

    def _new(self, rows: int, columns: int, estimators: int) -> Content:
        content = Content(rows, columns, self._number * 100_000 + next(self._fresh), estimators)
        with self._history.lock:
            self._history.contents.append(content)
        return content

    def _submit(self, content: Content, dataset: str) -> None:
        if len(self._open) >= OPEN_MOST and not self._look_at_open():
            self.predict()
            return
        key = f"{self._number}-{next(self._fresh)}" if self._rng.random() < 0.5 else ""
        response = self._post(content, dataset, key)
        if response is None or response.status_code not in (200, 202):
            return
        job = response.json()
        with self._history.lock:
            if key:
                self._history.by_key[key] = job["id"], dataset, content
            if response.status_code == 202:
                self._history.accepted[job["id"]] = Accepted(job["id"], dataset, content, now_ms())
                self._open[job["id"]] = dataset

    def _post(self, content: Content, dataset: str, key: str) -> httpx.Response | None:
        return self._caller.call(
            "fit",
            "POST",
            "/v1/fits",
            files={"file": ("table.parquet", as_parquet(content.table()))},
            data={"dataset": dataset, "target": "y", "options": content.options()},
            headers={"Idempotency-Key": key} if key else {},
        )

    def _look_at_open(self) -> bool:
        """Whether there is room for another job."""
        for job in list(self._open):
            response = self._caller.call("job", "GET", f"/v1/jobs/{job}")
            if response is None:
                continue
            if response.status_code == 404 or (
                response.status_code == 200 and response.json()["state"] in ENDED
            ):
                del self._open[job]
        return len(self._open) < OPEN_MOST

    def cancel(self) -> None:
        """One of this client's jobs, waiting or running."""
        if self._open:
            job = list(self._open)[int(self._rng.integers(len(self._open)))]
            self._caller.call("cancel", "DELETE", f"/v1/jobs/{job}")

    # Datasets

    def delete(self) -> None:
        """A dataset, whatever is being fitted into it."""
        self._caller.call("delete", "DELETE", f"/v1/datasets/{self._some_dataset()}")

    def look(self) -> None:
        """Lists and single things."""
        paths = ("/v1/jobs?limit=20", "/v1/datasets", f"/v1/datasets/{self._some_dataset()}", "/v1/workers")
        self._caller.call("look", "GET", paths[int(self._rng.integers(len(paths)))])

    def predict(self) -> None:
        """Some of the asked rows; the answer is kept and judged when the run is over."""
        size = int(self._rng.integers(1, 7))
        start = int(self._rng.integers(ASKED_ROWS - size))
        self.predict_from(self._some_dataset(), start, size)

    def predict_from(self, dataset: str, start: int, size: int) -> httpx.Response | None:
        """The response to these rows."""
        response = self._caller.call(
            "predict",
            "POST",
            f"/v1/datasets/{dataset}/predict",
            content=rows_of(self._rows, start, size),
            headers={"content-type": ARROW},
            params={"deadline_ms": PREDICT_DEADLINE_MS},
        )
        if response is not None and response.status_code == 200:
            note_answer(self._history, response.json(), start)
        return response

    def _some_dataset(self) -> str:
        return self._datasets[int(self._rng.integers(len(self._datasets)))]


def rows_of(rows: pa.Table, start: int, size: int) -> bytes:
    """A slice as the body of a predict."""
    return as_arrow(rows.slice(start, size))


def note_answer(history: History, answer: Mapping[str, Any], start: int) -> None:
    """Keep an answer for the checker."""
    answered = Answered(
        answer["dataset"],
        answer["version"],
        answer["context"],
        start,
        np.array(answer["probabilities"]),
        now_ms(),
    )
    with history.lock:
        history.answered.append(answered)
