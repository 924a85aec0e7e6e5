"""Where a one-shot runs: by its estimate, by what workers measured, and always the same worker for the same table."""

from __future__ import annotations

from dataclasses import replace

from common.admission import Pace, estimate_one_shot_s
from common.catalogue.records import PredictWorker
from common.models.registry import SPECS
from common.relay.one_shot import by_key
from common.settings import Settings
from tests.unit.test_one_shots import question

MINI, V2 = SPECS["tabicl-mini"], SPECS["tabicl-v2"]


def workers(*names: str) -> list[PredictWorker]:
    return [PredictWorker(n, "", "h", 1, "cpu", ("m",), 1, 0, 0, 0, 0, 1, ()) for n in names]


def test_a_table_goes_to_the_same_worker_while_it_lives() -> None:
    three = workers("a", "b", "c")
    keys = [question(f"k{i}") for i in range(60)]
    chosen = {q.key: by_key(q, three)[0].name for q in keys}
    assert chosen == {q.key: by_key(q, three[::-1])[0].name for q in keys}
    assert set(chosen.values()) == {"a", "b", "c"}
    without = {q.key: by_key(q, workers("a", "c"))[0].name for q in keys}
    assert all(without[key] == name for key, name in chosen.items() if name != "b")


def test_tenants_of_the_same_table_need_not_share_a_worker() -> None:
    three = workers("a", "b", "c")
    places = {by_key(question("k", tenant=f"t{i}"), three)[0].name for i in range(40)}
    assert places == {"a", "b", "c"}


def test_only_workers_of_the_model_are_asked() -> None:
    other = replace(workers("o")[0], models=("another",))
    assert [w.name for w in by_key(question(), [other, *workers("a")])] == ["a"]


def test_small_tables_of_the_mini_model_stay_on_predict_workers_and_others_do_not() -> None:
    most_s = Settings().one_shot_device_s
    one, four = {"n_estimators": 1}, {"n_estimators": 4}
    assert estimate_one_shot_s(MINI, 170, 10, one) <= most_s
    assert estimate_one_shot_s(MINI, 170, 10, four) > most_s
    assert estimate_one_shot_s(MINI, 1024, 70, one) > most_s
    assert estimate_one_shot_s(V2, 170, 10, one) > most_s


def test_a_pace_follows_what_is_measured_and_no_single_moment() -> None:
    pace = Pace()
    assert pace.ratio == 1.0
    pace.learn(0.02, 0.04)
    assert pace.ratio == 2.0
    pace.learn(0.02, 2.0)
    assert pace.ratio < 8.0
    for _ in range(100):
        pace.learn(0.02, 0.01)
    assert abs(pace.ratio - 0.5) < 0.01
