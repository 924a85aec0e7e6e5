"""Sharing a forward: bounds, fairness, and faults that stay with their own rows."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DeadlinePassed, InternalError, InvalidRows, WorkerBusy
from common.models.protocol import Prediction, PredictOptions
from common.tables.schema import Features
from predict_workers.batcher import LEAST_ROWS, Batcher, Piece, Work, forward, share
from predict_workers.residency import LoadedContext


class Doubling:
    """A predictor whose answer is twice the first column; refuses rows that hold a negative number."""

    nbytes = 1

    def __init__(self, pause_s: float = 0.0, error: Exception | None = None) -> None:
        self.sizes: list[int] = []
        self._pause_s = pause_s
        self._error = error or InvalidRows("negative")

    def predict(self, features: Features, options: PredictOptions) -> Prediction:
        time.sleep(self._pause_s)
        self.sizes.append(features.rows)
        values = features.values[0]
        assert isinstance(values, np.ndarray)
        if (values < 0).any():
            raise self._error
        return Prediction(mean=values * 2)


def rows(*values: float) -> Features:
    return Features(("a",), (np.array(values, dtype=np.float64),), len(values))


def context(predictor: Any, digest: str = "c") -> LoadedContext:
    return LoadedContext("default", digest, predictor, None, None, 1, "disk")  # type: ignore[arg-type]  # not read here


def work(size: int, predictor: Any = None) -> Work:
    loop = asyncio.new_event_loop()
    made = Work(
        context(predictor), rows(*range(size)), PredictOptions(), time.monotonic() + 9, loop.create_future()
    )
    loop.close()
    return made


@given(st.lists(st.integers(1, 700), min_size=1, max_size=12), st.integers(8, 256))
def test_a_forward_is_bounded_and_never_leaves_too_few_rows(sizes: list[int], most: int) -> None:
    waiting = [work(size) for size in sizes]
    pieces = share(waiting, most)
    assert pieces
    assert 0 < sum(piece.stop - piece.start for piece in pieces) <= most
    assert len({id(piece.work) for piece in pieces}) == len(pieces)
    for piece in pieces:
        rest = piece.work.features.rows - piece.stop
        assert rest == 0 or rest >= LEAST_ROWS or piece.work.features.rows < LEAST_ROWS
    assert pieces[0].work is waiting[0]


SIZES = st.lists(st.one_of(st.integers(1, 12), st.integers(1, 700)), min_size=1, max_size=12)


def taken(pieces: list[Piece]) -> int:
    return sum(piece.stop - piece.start for piece in pieces)


@given(SIZES, st.integers(8, 256))
def test_every_row_goes_once_in_order_and_no_forward_is_small_while_more_wait(
    sizes: list[int], most: int
) -> None:
    waiting = [work(size) for size in sizes]
    forwards = 0
    while waiting:
        rows_waiting = sum(made.left for made in waiting)
        pieces = share(waiting, most)
        assert min(LEAST_ROWS, rows_waiting) <= taken(pieces) <= most
        for piece in pieces:
            assert piece.start == piece.work.taken < piece.stop <= piece.work.features.rows
            piece.work.taken = piece.stop
        waiting = [made for made in waiting if made.left]
        forwards += 1
    assert forwards <= sum(sizes)


@given(SIZES, st.integers(8, 256))
def test_the_oldest_request_gets_its_half_whoever_else_waits(sizes: list[int], most: int) -> None:
    waiting = [work(size) for size in sizes]
    first = share(waiting, most)[0]
    assert first.work is waiting[0]
    assert first.stop - first.start >= min(sizes[0], most // 2) - (LEAST_ROWS - 1)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12))
def test_what_fits_into_one_forward_is_not_cut(sizes: list[int]) -> None:
    waiting = [work(size) for size in sizes]
    assert [(p.work, p.start, p.stop) for p in share(waiting, 256)] == [
        (w, 0, w.features.rows) for w in waiting
    ]


def test_small_requests_pass_between_the_pieces_of_a_large_one() -> None:
    pieces = share([work(10_000), work(3), work(2)], 256)
    taken = [piece.stop - piece.start for piece in pieces]
    assert taken[1:] == [3, 2]
    assert taken[0] >= 128


def batcher(**bounds: int) -> Batcher:
    return Batcher(**{"rows_per_forward": 64, "max_in_flight": 8, "max_rows_in_flight": 1000, **bounds})


def test_what_waits_together_goes_together_and_answers_part_again() -> None:
    predictor = Doubling(pause_s=0.02)

    async def scenario() -> list[list[float]]:
        feeding = batcher()
        running = asyncio.create_task(feeding.run())
        asked = [rows(float(i), float(i) + 0.5) for i in range(5)]
        until = time.monotonic() + 5
        answers = await asyncio.gather(
            *(feeding.predict(context(predictor), part, PredictOptions(), until) for part in asked)
        )
        running.cancel()
        feeding.close()
        return [answer.mean.tolist() for answer, _ in answers if answer.mean is not None]

    assert asyncio.run(scenario()) == [[2.0 * i, 2.0 * i + 1] for i in range(5)]
    assert predictor.sizes == [10]


def test_large_requests_come_back_whole_and_in_order() -> None:
    async def scenario() -> Any:
        feeding = batcher()
        running = asyncio.create_task(feeding.run())
        answer, _ = await feeding.predict(
            context(Doubling()), rows(*range(301)), PredictOptions(), time.monotonic() + 5
        )
        running.cancel()
        feeding.close()
        return answer.mean

    assert np.array_equal(asyncio.run(scenario()), np.arange(301) * 2)


@pytest.mark.parametrize(
    ("raised", "expected"), [(InvalidRows("no"), InvalidRows), (RuntimeError("kernel"), InternalError)]
)
def test_a_bad_request_fails_alone(raised: Exception, expected: type[Exception]) -> None:
    predictor = Doubling(error=raised)
    waiting = [work(0, predictor) for _ in range(3)]
    for made, values in zip(waiting, [(1.0,), (-1.0,), (3.0,)], strict=True):
        made.features = rows(*values)
    good, bad, also_good = forward(share(waiting, 64))
    assert isinstance(bad, expected)
    assert isinstance(good, Prediction)
    assert isinstance(also_good, Prediction)
    assert (good.mean, also_good.mean) == (np.array([2.0]), np.array([6.0]))


def test_in_flight_is_bounded_and_a_deadline_ends_the_wait() -> None:
    async def scenario() -> None:
        feeding = batcher(max_in_flight=1)
        waiting = asyncio.create_task(
            feeding.predict(context(Doubling()), rows(1.0), PredictOptions(), time.monotonic() + 0.1)
        )
        await asyncio.sleep(0)
        with pytest.raises(WorkerBusy):
            await feeding.predict(context(Doubling()), rows(1.0), PredictOptions(), time.monotonic() + 1)
        with pytest.raises(DeadlinePassed):
            await waiting
        assert (feeding.in_flight, feeding.rows_in_flight) == (0, 0)
        running = asyncio.create_task(feeding.run())
        await asyncio.sleep(0.05)
        assert feeding.dropped == 1
        running.cancel()
        feeding.close()

    asyncio.run(scenario())


def test_contexts_take_turns_and_never_share_a_forward() -> None:
    seen: list[tuple[str, int]] = []

    class Noting(Doubling):
        def __init__(self, name: str) -> None:
            super().__init__(pause_s=0.01)
            self._name = name

        def predict(self, features: Features, options: PredictOptions) -> Prediction:
            seen.append((self._name, features.rows))
            return super().predict(features, options)

    async def scenario() -> None:
        feeding = batcher(max_rows_in_flight=10_000)
        contexts = {name: context(Noting(name), name) for name in "ab"}
        until = time.monotonic() + 10
        asked = [
            feeding.predict(contexts[name], rows(*[float(ord(name))] * size), PredictOptions(), until)
            for name, size in [("a", 300), ("b", 2)]
        ]
        waiting = [asyncio.create_task(one) for one in asked]
        await asyncio.sleep(0)
        running = asyncio.create_task(feeding.run())
        answers = await asyncio.gather(*waiting)
        running.cancel()
        feeding.close()
        for name, (answer, _) in zip("ab", answers, strict=True):
            assert answer.mean is not None
            assert set(answer.mean) == {2.0 * ord(name)}

    asyncio.run(scenario())
    assert [name for name, _ in seen[:2]] == ["a", "b"]  # b's two rows passed before a's second piece
    assert sum(size for name, size in seen if name == "a") == 300


def test_different_options_never_share_a_forward() -> None:
    asked: list[tuple[float, ...]] = []

    class Noting(Doubling):
        def predict(self, features: Features, options: PredictOptions) -> Prediction:
            asked.append(options.quantiles)
            return super().predict(features, options)

    async def scenario() -> None:
        feeding = batcher()
        held = context(Noting())
        until = time.monotonic() + 5
        calls = [
            asyncio.create_task(feeding.predict(held, rows(1.0), options, until))
            for options in (PredictOptions(), PredictOptions((0.5,)), PredictOptions())
        ]
        await asyncio.sleep(0)
        running = asyncio.create_task(feeding.run())
        await asyncio.gather(*calls)
        running.cancel()
        feeding.close()

    asyncio.run(scenario())
    assert asked == [(), (0.5,)]


def test_rows_in_flight_are_bounded_but_one_request_always_passes() -> None:
    feeding = batcher(max_rows_in_flight=10)
    feeding.admit(50)
    feeding.in_flight, feeding.rows_in_flight = 1, 8
    feeding.admit(2)
    with pytest.raises(WorkerBusy) as refused:
        feeding.admit(3)
    assert refused.value.facts["limit"] == 10
    assert refused.value.retry_after_s
    feeding.close()


def test_an_abandoned_request_costs_no_forward() -> None:
    predictor = Doubling()

    async def scenario() -> None:
        feeding = batcher()
        held = context(predictor)
        until = time.monotonic() + 5
        gone = asyncio.create_task(feeding.predict(held, rows(9.0), PredictOptions(), until))
        stays = asyncio.create_task(feeding.predict(held, rows(1.0), PredictOptions(), until))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        running = asyncio.create_task(feeding.run())
        answer, _ = await stays
        assert answer.mean is not None
        assert answer.mean.tolist() == [2.0]
        assert (feeding.dropped, feeding.in_flight, feeding.rows_in_flight) == (1, 0, 0)
        running.cancel()
        feeding.close()

    asyncio.run(scenario())
    assert predictor.sizes == [1]
