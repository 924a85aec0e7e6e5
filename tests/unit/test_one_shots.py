"""One-shots on a predict worker: turns on the device, bounds, and contexts that only their tenant meets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from common.errors import DeadlinePassed, InvalidTable, WorkerBusy
from common.models.protocol import Once, OneShot, Prediction, PredictOptions
from common.relay.one_shot import OneShotAnswer, OneShotQuestion
from common.relay.wire import encode_rows
from common.settings import Settings
from common.tables.schema import Features, TableSchema
from common.tables.target import Target
from predict_workers.batcher import Batcher
from predict_workers.one_shot import Kept, KeptContexts, OneShots
from predict_workers.residency import LoadedContext
from tests.unit.test_batcher import Doubling

TRAIN = pa.table({"a": [1.0, 2.0, 4.0], "train_labels": [0.0, 1.0, 5.0]})
ROWS = pa.table({"a": [3.0, 5.0]})


class Scaling:
    """A model whose answer is the rows times the largest training label; a negative one is refused."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.forwards: list[int] = []
        self._pause_s = pause_s

    def once(self, shots: list[OneShot], backbone: Any) -> list[Once]:
        time.sleep(self._pause_s)
        if any((shot.table.y < 0).any() for shot in shots):
            raise InvalidTable("negative")
        self.forwards.append(len(shots))
        return [self._answer(shot) for shot in shots]

    @staticmethod
    def _answer(shot: OneShot) -> Once:
        factor = float(shot.table.y.max())

        class Times:
            nbytes = 100

            def predict(self, features: Features, options: PredictOptions) -> Prediction:
                return Prediction(mean=np.asarray(features.values[0]) * factor)

        return Once(Times(), Times().predict(shot.rows, shot.wanted), 1)


class Loaded:
    """One model's adapter and backbone."""

    def __init__(self, model: Scaling) -> None:
        self.model = model

    def get(self, model: str, task: str) -> tuple[Any, Any]:
        return self.model, "weights"


def question(key: str = "k", tenant: str = "default", **changes: Any) -> OneShotQuestion:
    labels = Target("train_labels", "regression", "float")
    made = OneShotQuestion(
        tenant=tenant,
        key=key,
        model="m",
        task="regression",
        options={"n_estimators": 1},
        schema=TableSchema.infer(TRAIN, "train_labels").encode(),
        target=labels.encode(),
        estimate_s=0.02,
        deadline_s=5.0,
        request_id="r",
    )
    return replace(made, **changes)


def body(asked: OneShotQuestion, train: pa.Table = TRAIN) -> bytes:
    return asked.encode(encode_rows(train), encode_rows(ROWS))


Session = Callable[[OneShots, Batcher], Awaitable[None]]


def run(session: Session, model: Scaling | None = None, **settings: Any) -> OneShots:
    """Run a session against one-shots and a batcher that feed one device."""

    async def all_of_it() -> OneShots:
        batcher = Batcher(rows_per_forward=64, max_in_flight=8, max_rows_in_flight=1000)
        loaded: Any = Loaded(model or Scaling())
        one_shots = OneShots(Settings(**settings), "w", loaded, batcher)
        feeding = [asyncio.create_task(batcher.run()), asyncio.create_task(one_shots.run())]
        try:
            await session(one_shots, batcher)
        finally:
            for task in feeding:
                task.cancel()
            batcher.close()
        return one_shots

    return asyncio.run(all_of_it())


async def ask(one_shots: OneShots, asked: OneShotQuestion, train: pa.Table = TRAIN) -> OneShotAnswer:
    return await one_shots.answer(body(asked, train), time.monotonic())


def mean(told: OneShotAnswer) -> list[float]:
    assert told.answer.prediction.mean is not None
    return told.answer.prediction.mean.tolist()


def test_a_repeated_table_is_answered_from_its_context() -> None:
    model = Scaling()

    async def session(one_shots: OneShots, batcher: Batcher) -> None:
        first = await ask(one_shots, question())
        again = await ask(one_shots, question())
        assert (first.reused, again.reused) == (False, True)
        assert mean(first) == mean(again) == [15.0, 25.0]
        assert again.answer.context == "k"

    run(session, model)
    assert model.forwards == [1]


def test_the_same_table_at_the_same_time_is_fitted_once() -> None:
    model = Scaling(0.02)

    async def session(one_shots: OneShots, batcher: Batcher) -> None:
        told = await asyncio.gather(*(ask(one_shots, question()) for _ in range(5)))
        assert [mean(one) for one in told] == [[15.0, 25.0]] * 5
        assert [one.reused for one in told].count(False) == 1

    run(session, model)
    assert model.forwards == [1]


def test_two_tenants_never_meet_a_context() -> None:
    model = Scaling()
    other = TRAIN.set_column(1, "train_labels", pa.array([0.0, 1.0, 7.0]))

    async def session(one_shots: OneShots, batcher: Batcher) -> None:
        # A key names content within a tenant; were it shared, the second would be answered from the first one's table.
        ours = await ask(one_shots, question(tenant="ours"))
        theirs = await ask(one_shots, question(tenant="theirs"), other)
        assert (ours.reused, theirs.reused) == (False, False)
        assert (mean(ours), mean(theirs)) == ([15.0, 25.0], [21.0, 35.0])
        again = await asyncio.gather(
            ask(one_shots, question(tenant="ours")), ask(one_shots, question(tenant="theirs"), other)
        )
        assert [mean(one) for one in again] == [[15.0, 25.0], [21.0, 35.0]]

    run(session, model)
    assert model.forwards == [1, 1]


def test_kept_contexts_stay_within_their_bytes_least_recently_used_first() -> None:
    held = KeptContexts(250)

    def kept(nbytes: int = 100) -> Kept:
        return Kept(LoadedContext("t", "k", None, None, None, nbytes, "memory"), 1)  # type: ignore[arg-type]  # not read

    held.keep(("t", "a"), kept())
    held.keep(("t", "b"), kept())
    assert held.get(("t", "a")) is not None
    held.keep(("t", "c"), kept())
    assert (held.get(("t", "b")), held.used_bytes) == (None, 200)
    held.keep(("t", "huge"), kept(251))
    assert (held.get(("t", "huge")), held.used_bytes) == (None, 200)
    assert held.get(("t", "a")) is not None


def test_waiting_one_shots_of_one_shape_share_a_forward() -> None:
    model = Scaling(0.05)

    async def session(one_shots: OneShots, batcher: Batcher) -> None:
        told = await asyncio.gather(*(ask(one_shots, question(f"k{i}")) for i in range(4)))
        assert [mean(one) for one in told] == [[15.0, 25.0]] * 4

    run(session, model, one_shot_device_s=1.0, one_shot_backlog_s=5.0)
    assert sum(model.forwards) == 4
    assert len(model.forwards) <= 2


def test_a_bad_table_fails_alone() -> None:
    bad = TRAIN.set_column(1, "train_labels", pa.array([0.0, 1.0, -5.0]))

    async def session(one_shots: OneShots, batcher: Batcher) -> None:
        tables = [TRAIN, TRAIN, bad, TRAIN]
        asked = [ask(one_shots, question(f"k{i}"), table) for i, table in enumerate(tables)]
        told = await asyncio.gather(*asked, return_exceptions=True)
        assert [isinstance(one, InvalidTable) for one in told] == [False, False, True, False]
        assert all(mean(one) == [15.0, 25.0] for one in told if isinstance(one, OneShotAnswer))

    run(session, Scaling(0.02), one_shot_device_s=1.0, one_shot_backlog_s=5.0)


def test_more_than_the_backlog_is_busy_and_passes() -> None:
    async def session(one_shots: OneShots, batcher: Batcher) -> None:
        asked = [ask(one_shots, question(f"k{i}")) for i in range(12)]
        told = await asyncio.gather(*asked, return_exceptions=True)
        refused = [one for one in told if isinstance(one, WorkerBusy)]
        answered = [one for one in told if isinstance(one, OneShotAnswer)]
        assert len(refused) + len(answered) == 12
        assert len(answered) >= 4
        assert refused
        assert refused[0].retry_after_s == 1
        assert not (await ask(one_shots, question("later"))).reused

    run(session, Scaling(0.03), one_shot_backlog_s=0.1)


def test_past_its_deadline_a_one_shot_is_dropped_unworked() -> None:
    model = Scaling(0.1)

    async def session(one_shots: OneShots, batcher: Batcher) -> None:
        late = question("late", deadline_s=0.05)
        told = await asyncio.gather(ask(one_shots, question()), ask(one_shots, late), return_exceptions=True)
        assert isinstance(told[1], DeadlinePassed)
        await asyncio.sleep(0.05)
        await ask(one_shots, question("after"))

    assert run(session, model).dropped == 1
    assert sum(model.forwards) == 2


def test_an_abandoned_one_shot_is_dropped_unworked() -> None:
    model = Scaling(0.1)

    async def session(one_shots: OneShots, batcher: Batcher) -> None:
        first = asyncio.create_task(ask(one_shots, question()))
        left = asyncio.create_task(ask(one_shots, question("left")))
        await asyncio.sleep(0.05)
        left.cancel()
        await first
        await ask(one_shots, question("after"))

    assert run(session, model, one_shot_device_s=0.0).dropped == 1
    assert sum(model.forwards) == 2


def test_other_predicts_pass_between_one_shots() -> None:
    """A predict waits for the piece that runs, never for all one-shots that wait."""

    async def session(one_shots: OneShots, batcher: Batcher) -> None:
        asked = [asyncio.create_task(ask(one_shots, question(f"k{i}"))) for i in range(6)]
        await asyncio.sleep(0.02)
        context = LoadedContext("default", "c", Doubling(), None, None, 1, "disk")  # type: ignore[arg-type]  # not read
        rows = Features(("a",), (np.array([1.0]),), 1)
        began = time.monotonic()
        await batcher.predict(context, rows, PredictOptions(), began + 5)
        assert time.monotonic() - began < 0.15
        assert sum(task.done() for task in asked) <= 3
        await asyncio.gather(*asked)

    run(session, Scaling(0.05), one_shot_device_s=0.0, one_shot_backlog_s=5.0)


def test_a_question_and_an_answer_survive_the_wire() -> None:
    asked = question(quantiles=(0.1, 0.9))
    got, train, rows = OneShotQuestion.decode(body(asked))
    assert got == asked
    assert bytes(train) == encode_rows(TRAIN)
    assert bytes(rows) == encode_rows(ROWS)
