"""A one-shot's way to a predict worker: what both say, and which worker is asked.

Request: `POST /once`; a line of JSON with the facts of `OneShotQuestion`, then two Arrow IPC streams, the training table with its
labels as the last column and the rows. Answer 200: a line of JSON, then `Answer.encode`. Other statuses: `TabrelayError.encode`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import orjson

from common.catalogue.records import PredictWorker
from common.errors import ContextGone
from common.models.protocol import TrainingTable
from common.relay.client import WorkerConnections
from common.relay.rounds import ask_in_turn
from common.relay.snapshot import RoutingSnapshot
from common.relay.wire import Answer, decode_rows
from common.tables.schema import TableSchema
from common.tables.target import Target


@dataclass(frozen=True)
class OneShotQuestion:
    """A one-shot as the worker gets it."""

    tenant: str
    key: str  # of the context that the training table makes; names it as a digest names a stored one
    model: str
    task: str
    options: Mapping[str, Any]
    schema: Mapping[str, Any]  # TableSchema.encode()
    target: Mapping[str, Any]  # Target.encode()
    estimate_s: float
    deadline_s: float  # seconds left when sent
    request_id: str
    quantiles: tuple[float, ...] = ()
    point: str = "mean"
    #: Id of a context that a fit worker wrote for this key; empty when the worker is to make it.
    made: str = ""
    made_digest: str = ""
    #: Whether the worker answers only if it holds the key's context; without one it says ContextGone.
    if_held: bool = False

    def encode(self, train: bytes, rows: bytes) -> bytes:
        """As a body; `train` and `rows` are Arrow IPC streams."""
        return b"".join((orjson.dumps({**asdict(self), "train_bytes": len(train)}), b"\n", train, rows))

    @classmethod
    def decode(cls, body: bytes) -> tuple[OneShotQuestion, memoryview, memoryview]:
        """The question, the training table's stream and the rows'; raises ValueError, KeyError or TypeError."""
        line = body.index(b"\n")
        facts = orjson.loads(body[:line])
        train = facts.pop("train_bytes")
        facts["quantiles"] = tuple(facts["quantiles"])
        streams = memoryview(body)[line + 1 :]
        return cls(**facts), streams[:train], streams[train:]

    def training(self, train: memoryview) -> TrainingTable:
        """The training table out of its stream."""
        schema, target = TableSchema.decode(self.schema), Target.decode(self.target)
        table = decode_rows(train)
        last = table.num_columns - 1
        labels = target.encode_labels(table.column(last))
        return TrainingTable(schema.features(table.remove_column(last)), schema, target, labels)


@dataclass(frozen=True)
class OneShotAnswer:
    """A worker's answer to a one-shot."""

    answer: Answer
    members: int  # of the ensemble that answered
    reused: bool  # whether the context was there before
    pace: float = 1.0  # real seconds for an estimated one on the worker's device, lately

    def encode(self) -> bytes:
        """As a body."""
        facts = orjson.dumps({"members": self.members, "reused": self.reused, "pace": self.pace})
        return facts + b"\n" + self.answer.encode()

    @classmethod
    def decode(cls, body: bytes) -> OneShotAnswer:
        """What `encode` wrote."""
        line = body.index(b"\n")
        return cls(answer=Answer.decode(body[line + 1 :]), **orjson.loads(body[:line]))


class OneShotRelay:
    """Sends one-shots to predict workers, the same training table to the same worker while it lives."""

    def __init__(self, snapshot: RoutingSnapshot) -> None:
        self._snapshot = snapshot
        self._connections = WorkerConnections()

    def close(self) -> None:
        """Close the idle connections."""
        self._connections.close()

    def ask(self, question: OneShotQuestion, train: bytes, rows: bytes, deadline: float) -> OneShotAnswer:
        """The answer from the key's context; raises as `ask_in_turn`, and ContextGone as the question says."""

        def one(worker: PredictWorker, left_s: float) -> OneShotAnswer:
            body = replace(question, deadline_s=left_s).encode(train, rows)
            told = OneShotAnswer.decode(
                self._connections.one_shot(worker.address, question.request_id, body, left_s + 0.25)
            )
            if told.answer.context != question.key:
                raise ContextGone(
                    "a predict worker answered from another context; the answer was thrown away"
                )
            return replace(told, answer=replace(told.answer, worker=worker.name))

        return ask_in_turn(
            lambda: by_key(question, self._snapshot.workers),
            one,
            self._connections,
            deadline,
            question.request_id,
        )


def by_key(question: OneShotQuestion, workers: Sequence[PredictWorker]) -> list[PredictWorker]:
    """Workers that serve the model, in an order that the tenant and the key decide.

    One that joins or leaves moves only the keys that it gets or had.
    """

    def rank(worker: PredictWorker) -> bytes:
        text = f"{question.tenant}/{question.key}/{worker.name}"
        return hashlib.blake2b(text.encode(), digest_size=8).digest()

    return sorted((worker for worker in workers if question.model in worker.models), key=rank)
