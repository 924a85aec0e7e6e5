"""One-shots: a small table comes with its rows, is fitted and answered in one go, and its context kept for a while.

They take turns with the batcher's forwards on the one thread that computes: one piece of work, `most_s` long by estimate, is
handed to it at a time, so that no other predict waits for more than that. One-shots of one shape that wait together share
a forward: of 150 x 10, two take 0.8 and four 0.7 of their time alone. A table that comes again is answered by the batcher, from the
context that is held.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from common import logs
from common.admission import ONE_SHOT_S_LEAST, Pace
from common.contexts.reader import open_context
from common.contexts.store import ContextStore
from common.errors import (
    ContextGone,
    ContextIncompatible,
    DeadlinePassed,
    InternalError,
    TabrelayError,
    WorkerBusy,
)
from common.models.once import once
from common.models.protocol import (
    Adapter,
    Backbone,
    Once,
    OneShot,
    Prediction,
    PredictOptions,
    TrainingTable,
)
from common.relay.one_shot import OneShotAnswer, OneShotQuestion
from common.relay.wire import Answer, decode_rows
from common.settings import Settings
from common.tables.schema import Features, TableSchema
from common.tables.target import Target
from predict_workers.batcher import Batcher
from predict_workers.residency import Backbones, LoadedContext

log = logs.get("one-shot")

Key = tuple[str, str]  # tenant, context key


@dataclass(frozen=True)
class Kept:
    """A one-shot's context while it is held."""

    context: LoadedContext
    members: int


class KeptContexts:
    """Contexts of one-shots, least recently used dropped first; a tenant's are found by that tenant alone."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._held: OrderedDict[Key, Kept] = OrderedDict()
        self.used_bytes = 0

    def get(self, key: Key) -> Kept | None:
        """The context of a tenant's key, which is now the latest used."""
        kept = self._held.get(key)
        if kept is not None:
            self._held.move_to_end(key)
        return kept

    def keep(self, key: Key, kept: Kept) -> None:
        """Hold it; one that is larger than the whole budget is not held."""
        nbytes = kept.context.nbytes
        if key in self._held or nbytes > self._budget:
            return
        while self.used_bytes + nbytes > self._budget:
            _, dropped = self._held.popitem(last=False)
            self.used_bytes -= dropped.context.nbytes
        self._held[key] = kept
        self.used_bytes += nbytes


@dataclass(eq=False)
class Waiting:
    """A one-shot on its way to the device."""

    shot: OneShot
    adapter: Adapter
    backbone: Backbone
    pace: Pace
    estimate_s: float  # before the pace is applied
    deadline: float  # time.monotonic()
    done: asyncio.Future[Once]
    took_s: float = 0.0

    @property
    def expected_s(self) -> float:
        """Seconds alone on the device."""
        return self.estimate_s * self.pace.ratio

    @property
    def shape(self) -> tuple[object, ...]:
        """One-shots of one shape can share a forward."""
        features = self.shot.table.features
        return self.backbone, features.rows, len(features.names), self.shot.rows.rows


class OneShots:
    """Lives on the event loop, computes on the batcher's thread."""

    def __init__(self, settings: Settings, name: str, backbones: Backbones, batcher: Batcher) -> None:
        self._name = name
        self._backbones = backbones
        self._batcher = batcher
        self._store = ContextStore(settings)
        self._most_s = settings.one_shot_device_s
        self._backlog_s = settings.one_shot_backlog_s
        self._waiting: deque[Waiting] = deque()
        self._making: dict[Key, asyncio.Future[None]] = {}
        self._arrived = asyncio.Event()
        self._pending_s = 0.0  # expected seconds of what waits and runs
        self.kept = KeptContexts(settings.one_shot_context_bytes)
        self._paces: defaultdict[str, Pace] = defaultdict(Pace)  # by model
        self.forwards = 0
        self.dropped = 0

    async def answer(self, body: bytes, arrived: float) -> OneShotAnswer:
        """The answer to a body of `OneShotQuestion.encode`.

        Raises WorkerBusy, DeadlinePassed, ModelNotReady, InvalidRows, and what a fit raises for the table.
        """
        question, train, rows = OneShotQuestion.decode(body)
        deadline = arrived + question.deadline_s
        key = question.tenant, question.key
        options = PredictOptions(question.quantiles)
        schema = TableSchema.decode(question.schema)
        asked = schema.features(decode_rows(rows))
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
                while (making := self._making.get(key)) is not None:
                    await asyncio.wait([making])  # the same table, a moment ago
        except TimeoutError as error:
            raise DeadlinePassed(retry_after_s=1) from error
        kept = self.kept.get(key)
        if kept is not None:
            return await self._again(kept, asked, options, question, arrived, deadline)
        if question.if_held:
            raise ContextGone("this worker holds no context of the one-shot's table")
        making = self._making[key] = asyncio.get_running_loop().create_future()
        try:
            if question.made:
                kept = await asyncio.to_thread(self._open, question)
                self.kept.keep(key, kept)
                told = await self._again(kept, asked, options, question, arrived, deadline)
                return replace(told, reused=False)
            return await self._first(train, asked, schema, options, question, arrived, deadline)
        finally:
            del self._making[key]
            making.set_result(None)

    def _open(self, question: OneShotQuestion) -> Kept:
        """The context that a fit worker made; its file may be unlinked from now on. Raises as `open_context`."""
        path = self._store.temporary(question.tenant, question.made)
        mapped = open_context(path, question.made_digest, "memory")
        manifest = mapped.manifest
        adapter, backbone = self._backbones.get(question.model, question.task)
        if (manifest.key, manifest.weights_digest) != (question.key, backbone.weights.digest):
            raise ContextIncompatible("the one-shot's context is of another table or of other weights")
        target = Target.decode(manifest.target)
        predictor = adapter.thaw(mapped.tensors, manifest.state, backbone, target)
        schema = TableSchema.decode(manifest.schema)
        context = LoadedContext(
            question.tenant, question.key, predictor, schema, target, mapped.nbytes, "memory"
        )
        return Kept(context, getattr(predictor, "members", int(manifest.options.get("n_estimators", 1))))

    async def _again(
        self,
        kept: Kept,
        asked: Features,
        options: PredictOptions,
        question: OneShotQuestion,
        arrived: float,
        deadline: float,
    ) -> OneShotAnswer:
        """From a context that is held, as any other predict."""
        parsed = time.monotonic()
        prediction, work = await self._batcher.predict(kept.context, asked, options, deadline)
        answered = time.monotonic()
        told = {
            "parse": parsed - arrived,
            "queue": answered - parsed - work.forward_s,
            "forward": work.forward_s,
        }
        answer = _answer(prediction, question, self._name, told)
        return OneShotAnswer(answer, kept.members, reused=True, pace=self._paces[question.model].ratio)

    async def _first(
        self,
        train: memoryview,
        asked: Features,
        schema: TableSchema,
        options: PredictOptions,
        question: OneShotQuestion,
        arrived: float,
        deadline: float,
    ) -> OneShotAnswer:
        """From the table itself; its context is held from now on."""
        table = decode_rows(train)
        target = Target.decode(question.target)
        last = table.num_columns - 1
        training = TrainingTable(
            schema.features(table.remove_column(last)),
            schema,
            target,
            target.encode_labels(table.column(last)),
        )
        adapter, backbone = await asyncio.to_thread(self._backbones.get, question.model, question.task)
        shot = OneShot(training, asked, question.options, options)
        parsed = time.monotonic()
        pace = self._paces[question.model]
        made, waited = await self._compute(
            Waiting(
                shot,
                adapter,
                backbone,
                pace,
                question.estimate_s,
                deadline,
                asyncio.get_running_loop().create_future(),
            )
        )
        answered = time.monotonic()
        nbytes = made.predictor.nbytes
        context = LoadedContext(
            question.tenant, question.key, made.predictor, schema, target, nbytes, "memory"
        )
        self.kept.keep((question.tenant, question.key), Kept(context, made.members))
        told = {
            "parse": parsed - arrived,
            "queue": answered - parsed - waited.took_s,
            "forward": waited.took_s,
        }
        answer = _answer(made.prediction, question, self._name, told)
        return OneShotAnswer(answer, made.members, reused=False, pace=pace.ratio)

    async def _compute(self, waiting: Waiting) -> tuple[Once, Waiting]:
        expected_s = waiting.expected_s
        if self._pending_s and self._pending_s + expected_s > self._backlog_s:
            raise WorkerBusy(
                f"one-shots of {self._pending_s:.2f} s wait here, the most is {self._backlog_s:g} s",
                retry_after_s=1,
                limit=self._backlog_s,
            )
        self._pending_s += expected_s
        try:
            self._waiting.append(waiting)
            self._arrived.set()
            async with asyncio.timeout(max(waiting.deadline - time.monotonic(), 0)):
                return await waiting.done, waiting
        except TimeoutError as error:
            raise DeadlinePassed(retry_after_s=1) from error
        finally:
            self._pending_s = max(self._pending_s - expected_s, 0.0)

    async def run(self) -> None:
        """Feed the device until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            together = self._next()
            if not together:
                self._arrived.clear()
                continue
            answers, took_s = await loop.run_in_executor(self._batcher.device, compute, together)
            self.forwards += 1
            together[0].pace.learn(joint_s(together), took_s)
            for waiting, made in zip(together, answers, strict=True):
                waiting.took_s = took_s
                if waiting.done.done():
                    continue
                if isinstance(made, TabrelayError):
                    waiting.done.set_exception(made)
                else:
                    waiting.done.set_result(made)

    def _next(self) -> list[Waiting]:
        """The oldest that somebody still waits for, and those of its shape that fit beside it."""
        now = time.monotonic()
        live = [one for one in self._waiting if not one.done.done() and one.deadline > now]
        self.dropped += len(self._waiting) - len(live)
        together: list[Waiting] = []
        for one in live:
            if not together or (
                one.shape == together[0].shape and joint_s([*together, one]) * one.pace.ratio <= self._most_s
            ):
                together.append(one)
        self._waiting = deque(one for one in live if one not in together)
        return together


def joint_s(together: Sequence[Waiting]) -> float:
    """Estimated seconds of one forward for all of them, before the pace is applied."""
    return ONE_SHOT_S_LEAST + sum(max(one.estimate_s - ONE_SHOT_S_LEAST, 0.0) for one in together)


def compute(together: Sequence[Waiting]) -> tuple[list[Once | TabrelayError], float]:
    """The answers and the seconds they took; on a fault each alone, so that a bad one fails alone."""
    began = time.monotonic()
    first = together[0]
    answers: list[Once | TabrelayError]
    try:
        answers = list(once(first.adapter, first.backbone, [one.shot for one in together]))
    except Exception as error:
        if len(together) > 1:
            answers = [compute([one])[0][0] for one in together]
        elif isinstance(error, TabrelayError):
            answers = [error]
        else:
            log.exception("one-shot failed", rows=first.shot.table.features.rows)
            answers = [InternalError("the model failed on this table; the worker's log has the cause")]
    return answers, time.monotonic() - began


def _answer(
    prediction: Prediction, question: OneShotQuestion, worker: str, told_s: dict[str, float]
) -> Answer:
    return Answer(
        prediction=prediction,
        context=question.key,
        worker=worker,
        target=question.target,
        quantiles=question.quantiles,
        timings_ms={name: round(max(seconds, 0.0) * 1000, 3) for name, seconds in told_s.items()},
    )
