"""Continuous batching: what arrived while the device was busy goes together, one forward a context.

One thread computes. Each time it is free the batcher picks the next context in turn, takes up to
`rows_per_forward` of its waiting rows and runs one forward. Large requests go in pieces, so that small ones
pass between them; expired and abandoned requests are dropped before they cost anything.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields

import numpy as np

from common import logs
from common.errors import DeadlinePassed, InternalError, TabrelayError, WorkerBusy
from common.models.protocol import Prediction, PredictOptions
from common.tables.schema import Features
from predict_workers.residency import LoadedContext

log = logs.get("batcher")

#: Forwards of fewer rows round differently in the last bit; a larger request is never cut below it.
LEAST_ROWS = 4


@dataclass(eq=False)
class Work:
    """One request's rows on their way through the device."""

    context: LoadedContext
    features: Features
    options: PredictOptions
    deadline: float  # time.monotonic()
    done: asyncio.Future[Prediction]
    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None
    forward_s: float = 0.0
    taken: int = 0
    parts: list[Prediction] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Rows not yet given to the device."""
        return self.features.rows - self.taken


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of one request within a forward."""

    work: Work
    start: int
    stop: int


def share(waiting: Sequence[Work], most: int) -> list[Piece]:
    """Which rows of the waiting requests go into the next forward of at most `most` rows.

    The oldest request gets at least half, the rest goes to the smallest; no request of LEAST_ROWS or more is left
    with a remainder below LEAST_ROWS.
    """
    pieces: dict[int, int] = {}
    room = most

    def take(work: Work, allowed: int) -> None:
        nonlocal room
        had = pieces.get(id(work), 0)
        rows = min(work.left - had, allowed, room)
        rest = work.left - had - rows
        if 0 < rest < LEAST_ROWS:
            rows -= LEAST_ROWS - rest
        if rows > 0:
            pieces[id(work)] = had + rows
            room -= rows

    oldest = waiting[0]
    take(oldest, max(most // 2, LEAST_ROWS))
    for work in sorted(waiting, key=lambda w: w.left):
        if room < 1:
            break
        take(work, room)
    return [
        Piece(work, work.taken, work.taken + pieces[id(work)])
        for work in waiting
        if pieces.get(id(work), 0) > 0
    ]


class Batcher:
    """Feeds the device thread; lives on the event loop."""

    def __init__(self, *, rows_per_forward: int, max_in_flight: int, max_rows_in_flight: int) -> None:
        self._rows_per_forward = rows_per_forward
        self._max_in_flight = max_in_flight
        self._max_rows = max_rows_in_flight
        self._waiting: OrderedDict[tuple[str, str, PredictOptions], list[Work]] = OrderedDict()
        self._arrived = asyncio.Event()
        self._device = ThreadPoolExecutor(1, thread_name_prefix="device")
        self.in_flight = 0
        self.rows_in_flight = 0
        self.served = 0
        self.dropped = 0
        self.forwards = 0

    @property
    def device(self) -> ThreadPoolExecutor:
        """The one thread that computes; other work may take turns on it, one short piece at a time."""
        return self._device

    def admit(self, rows: int) -> None:
        """Raise WorkerBusy when one more request of `rows` would pass a bound."""
        if self.in_flight >= self._max_in_flight:
            raise WorkerBusy(retry_after_s=1, limit=self._max_in_flight)
        if self.in_flight and self.rows_in_flight + rows > self._max_rows:
            raise WorkerBusy(
                "the predict worker has as many rows in flight as it may",
                retry_after_s=1,
                limit=self._max_rows,
            )

    async def predict(
        self, context: LoadedContext, features: Features, options: PredictOptions, deadline: float
    ) -> tuple[Prediction, Work]:
        """The answer for these rows; raises WorkerBusy or DeadlinePassed."""
        self.admit(features.rows)
        done: asyncio.Future[Prediction] = asyncio.get_running_loop().create_future()
        work = Work(context, features, options, deadline, done)
        self.in_flight += 1
        self.rows_in_flight += features.rows
        try:
            group = (context.tenant, context.digest, options)
            self._waiting.setdefault(group, []).append(work)
            self._arrived.set()
            async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
                prediction = await done
        except TimeoutError as error:
            raise DeadlinePassed(retry_after_s=1) from error
        finally:
            self.in_flight -= 1
            self.rows_in_flight -= features.rows
        self.served += 1
        return prediction, work

    async def run(self) -> None:
        """Feed the device until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            pieces = self._next()
            if not pieces:
                self._arrived.clear()
                continue
            started = time.monotonic()
            for piece in pieces:
                piece.work.taken = piece.stop
                piece.work.started = piece.work.started or started
            answers = await loop.run_in_executor(self._device, forward, pieces)
            self.forwards += 1
            took = time.monotonic() - started
            for piece, answer in zip(pieces, answers, strict=True):
                self._deliver(piece, answer, took)

    def _next(self) -> list[Piece]:
        """The pieces of the next forward; an empty list when nothing waits."""
        now = time.monotonic()
        while self._waiting:
            group, works = self._waiting.popitem(last=False)
            live = [work for work in works if not work.done.done() and work.deadline > now and work.left > 0]
            self.dropped += sum(work.left > 0 for work in works) - len(live)
            if live:
                pieces = share(live, self._rows_per_forward)
                given = {id(piece.work): piece.stop for piece in pieces}
                rest = [work for work in live if given.get(id(work), work.taken) < work.features.rows]
                if rest:
                    self._waiting[group] = rest  # to the end: other contexts go first
                return pieces
        return []

    def _deliver(self, piece: Piece, answer: Prediction | TabrelayError, took_s: float) -> None:
        work = piece.work
        work.forward_s += took_s
        if work.done.done():
            return
        if isinstance(answer, TabrelayError):
            work.done.set_exception(answer)
            return
        work.parts.append(answer)
        if sum(len(part) for part in work.parts) == work.features.rows:
            work.done.set_result(join(work.parts))

    def close(self) -> None:
        """Stop computing after the forward that runs."""
        self._device.shutdown(wait=False, cancel_futures=True)


def forward(pieces: Sequence[Piece]) -> list[Prediction | TabrelayError]:
    """One forward for all pieces of one context; on a fault each piece alone, so that a bad one fails alone."""
    first = pieces[0].work
    parts = [piece.work.features.take(slice(piece.start, piece.stop)) for piece in pieces]
    try:
        joined = parts[0] if len(parts) == 1 else Features.concat(parts)
        whole = first.context.predictor.predict(joined, first.options)
    except TabrelayError as error:
        return [error] if len(pieces) == 1 else [forward([piece])[0] for piece in pieces]
    except Exception:
        if len(pieces) > 1:
            return [forward([piece])[0] for piece in pieces]
        log.exception("forward failed", context=first.context.digest[:12], rows=joined.rows)
        return [InternalError("the model failed on these rows; the worker's log has the cause")]
    if len(pieces) == 1:
        return [whole]
    bounds = np.cumsum([0, *(piece.stop - piece.start for piece in pieces)])
    return [cut(whole, int(a), int(b)) for a, b in itertools.pairwise(bounds)]


def cut(whole: Prediction, start: int, stop: int) -> Prediction:
    """Rows start to stop of a prediction."""
    held = {field.name: getattr(whole, field.name) for field in fields(Prediction)}
    return Prediction(
        **{name: None if values is None else values[start:stop] for name, values in held.items()}
    )


def join(parts: Sequence[Prediction]) -> Prediction:
    """Pieces of one request, in order, as one prediction."""
    if len(parts) == 1:
        return parts[0]

    def joined(name: str) -> np.ndarray | None:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else np.concatenate(values)

    return Prediction(**{field.name: joined(field.name) for field in fields(Prediction)})
