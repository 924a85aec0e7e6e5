"""The lane between the API and fit workers: bounds, replies, and what happens to one-shots that nobody waits for."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import fakeredis
import pytest

from common.catalogue import Catalogue
from common.errors import Cancelled, DeadlinePassed, InvalidTable, Overloaded
from common.lane import Made, OneShotLane
from common.settings import Settings


def never() -> bool:
    return False


@pytest.fixture
def lane(tmp_path: Path) -> OneShotLane:
    settings = Settings(data_dir=tmp_path, one_shots_waiting=2)
    return OneShotLane(Catalogue(fakeredis.FakeRedis(decode_responses=True), settings), settings)


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def files(tmp_path: Path) -> list[Path]:
    return [path for path in tmp_path.rglob("*") if path.is_file() and "lock" not in str(path)]


def test_what_a_fit_worker_made_comes_back(lane: OneShotLane, tmp_path: Path) -> None:
    id = lane.submit(b"question")
    assert lane.take() == (id, b"question")
    assert lane.take() is None
    lane.wanted(id)
    made = Made(id, "d" * 64, 12.5)
    lane.context("default", id).write_bytes(b"context")
    lane.made("default", made)
    assert lane.wait(id, soon(), never) == made
    lane.forget("default", id)
    assert not files(tmp_path)


def test_an_asker_waits_until_the_reply_comes(lane: OneShotLane) -> None:
    id = lane.submit(b"question")
    lane.take()
    threading.Timer(0.4, lambda: lane.made("default", Made(id, "d" * 64, 1.0))).start()
    assert lane.wait(id, soon(), never).digest == "d" * 64


def test_an_error_of_the_fit_comes_back_as_itself(lane: OneShotLane) -> None:
    id = lane.submit(b"question")
    lane.take()
    lane.failed(id, InvalidTable("no"))
    with pytest.raises(InvalidTable, match="no"):
        lane.wait(id, soon(), never)


def test_a_full_lane_is_refused_and_keeps_nothing_of_it(lane: OneShotLane, tmp_path: Path) -> None:
    ids = [lane.submit(b"a"), lane.submit(b"b")]
    with pytest.raises(Overloaded) as caught:
        lane.submit(b"c")
    assert caught.value.retry_after_s
    assert len(files(tmp_path)) == 2
    assert lane.waiting() == 2
    assert [lane.take(), lane.take()] == [(ids[0], b"a"), (ids[1], b"b")]


def test_one_that_no_worker_took_in_time_may_come_again(lane: OneShotLane) -> None:
    id = lane.submit(b"question")
    with pytest.raises(Overloaded) as caught:
        lane.wait(id, soon(0.05), never)
    assert caught.value.retry_after_s
    assert lane.waiting() == 0


def test_one_that_was_taken_and_is_late_passed_its_deadline(lane: OneShotLane) -> None:
    id = lane.submit(b"question")
    lane.take()
    with pytest.raises(DeadlinePassed):
        lane.wait(id, soon(0.05), never)


def test_an_asker_that_left_is_worked_for_no_more(lane: OneShotLane, tmp_path: Path) -> None:
    first, second = lane.submit(b"first"), lane.submit(b"second")
    with pytest.raises(Cancelled):
        lane.wait(first, soon(), lambda: True)
    lane.forget("default", first)
    assert lane.take() == (second, b"second")
    lane.forget("default", second)
    with pytest.raises(Cancelled):
        lane.wanted(second)
    # Its worker was just done: what it made has no reader.
    lane.context("default", second).write_bytes(b"context")
    lane.made("default", Made(second, "d" * 64, 1.0))
    assert not files(tmp_path)


def test_one_whose_file_is_gone_is_passed_over(lane: OneShotLane) -> None:
    lost, kept = lane.submit(b"lost"), lane.submit(b"kept")
    lane.table(lost).unlink()
    assert lane.take() == (kept, b"kept")
