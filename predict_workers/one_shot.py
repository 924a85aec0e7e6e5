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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
)
from common.relay.one_shot import OneShotAnswer, OneShotQuestion
from common.relay.wire import Answer, decode_rows
from common.settings import Settings
from common.tables.schema import TableSchema
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


@dataclass(frozen=True)
class Asked:
    """A one-shot as it came in."""

    question: OneShotQuestion
    train: memoryview
    rows: memoryview
    arrived: float  # time.monotonic()

    @property
    def key(self) -> Key:
        """What its training table's context is held under."""
        return self.question.tenant, self.question.key

    @property
    def deadline(self) -> float:
        """When its answer is of no use any more, as time.monotonic() tells."""
        return self.arrived + self.question.deadline_s

    @property
    def options(self) -> PredictOptions:
        """What is asked for beyond the defaults."""
        return PredictOptions(self.question.quantiles, self.question.point)


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
        asked = Asked(*OneShotQuestion.decode(body), arrived)
        question, key = asked.question, asked.key
        try:
            async with asyncio.timeout(max(asked.deadline - time.monotonic(), 0)):
                while (making := self._making.get(key)) is not None:
                    await asyncio.wait([making])  # the same table, a moment ago
        except TimeoutError as error:
            raise DeadlinePassed(retry_after_s=1) from error
        kept = self.kept.get(key)
        if kept is not None:
            return await self._again(kept, asked)
        if question.if_held:
            raise ContextGone("this worker holds no context of the one-shot's table")
        making = self._making[key] = asyncio.get_running_loop().create_future()
        try:
            if question.made:
                kept = await asyncio.to_thread(self._open, question)
                self.kept.keep(key, kept)
                return replace(await self._again(kept, asked), reused=False)
            with self._room(question.estimate_s * self._paces[question.model].ratio):
                return await self._first(asked)
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

    async def _again(self, kept: Kept, asked: Asked) -> OneShotAnswer:
        """From a context that is held, as any other predict."""
        features = kept.context.schema.features(decode_rows(asked.rows))
        parsed = time.monotonic()
        prediction, work = await self._batcher.predict(kept.context, features, asked.options, asked.deadline)
        told = self._answer(asked, prediction, parsed, work.forward_s)
        pace = self._paces[asked.question.model]
        return OneShotAnswer(told, kept.members, reused=True, pace=pace.ratio)

    async def _first(self, asked: Asked) -> OneShotAnswer:
        """From the table itself; its context is held from now on."""
        question = asked.question
        table = question.training(asked.train)
        features = table.schema.features(decode_rows(asked.rows))
        adapter, backbone = await asyncio.to_thread(self._backbones.get, question.model, question.task)
        parsed = time.monotonic()
        waiting = Waiting(
            OneShot(table, features, question.options, asked.options),
            adapter,
            backbone,
            self._paces[question.model],
            question.estimate_s,
            asked.deadline,
            asyncio.get_running_loop().create_future(),
        )
        made = await self._compute(waiting)
        nbytes = made.predictor.nbytes
        context = LoadedContext(*asked.key, made.predictor, table.schema, table.target, nbytes, "memory")
        self.kept.keep(asked.key, Kept(context, made.members))
        told = self._answer(asked, made.prediction, parsed, waiting.took_s)
        return OneShotAnswer(told, made.members, reused=False, pace=waiting.pace.ratio)

    def _answer(self, asked: Asked, prediction: Prediction, parsed: float, forward_s: float) -> Answer:
        told_s = {
            "parse": parsed - asked.arrived,
            "queue": time.monotonic() - parsed - forward_s,
            "forward": forward_s,
        }
        return Answer(
            prediction=prediction,
            context=asked.question.key,
            worker=self._name,
            target=asked.question.target,
            quantiles=asked.question.quantiles,
            timings_ms={name: round(max(seconds, 0.0) * 1000, 3) for name, seconds in told_s.items()},
        )

    @contextmanager
    def _room(self, expected_s: float) -> Iterator[None]:
        """Room for so many seconds of work while the block runs; raises WorkerBusy. Alone, anything finds room."""
        if self._pending_s and self._pending_s + expected_s > self._backlog_s:
            raise WorkerBusy(
                f"one-shots of {self._pending_s:.2f} s wait here, the most is {self._backlog_s:g} s",
                retry_after_s=1,
                limit=self._backlog_s,
            )
        self._pending_s += expected_s
        try:
            yield
        finally:
            self._pending_s = max(self._pending_s - expected_s, 0.0)

    async def _compute(self, waiting: Waiting) -> Once:
        self._waiting.append(waiting)
        self._arrived.set()
        try:
            async with asyncio.timeout(max(waiting.deadline - time.monotonic(), 0)):
                return await waiting.done
        except TimeoutError as error:
            raise DeadlinePassed(retry_after_s=1) from error

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
