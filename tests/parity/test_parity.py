"""Every table's answers over HTTP against the library in one process on the same schema's frame (`make slow`)."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest

from tests.integration.oracle import Oracle
from tests.parity.models import Model
from tests.parity.tables import MAKERS, Case, asked, case, decoded
from tests.support import Service, as_parquet

pytestmark = [pytest.mark.integration, pytest.mark.slow]

#: Rows of a request. Matrix products of fewer than four rows round differently; every row is asked at last.
SIZES = (1, 2, 3, 4, 7, 1000)
LEVELS = (0.05, 0.5, 0.95)
#: Rows that one forward takes: TABRELAY_ROWS_PER_FORWARD.
FORWARD = 256


def submitted(service: Service, model: Model, name: str) -> tuple[str, Case, dict[str, Any]]:
    """The dataset's name, what it is fitted on, and the job at its end."""
    chosen = case(name)
    dataset = re.sub(r"\W", "-", f"parity-{model.name}-{name}")
    fields: dict[str, Any] = {"model": model.name}
    fields["options"] = orjson.dumps({"n_estimators": model.members} | chosen.options).decode()
    if chosen.encoding is not None:
        fields["encoding"] = chosen.encoding
    content = chosen.file or as_parquet(chosen.table)
    response = service.submit(
        content, dataset, chosen.target, task=chosen.task, name=chosen.file_name, **fields
    )
    assert response.status_code in (200, 202), response.text
    return dataset, chosen, service.end_of(response.json()["id"])


def fitted(service: Service, model: Model, name: str) -> tuple[str, Case]:
    """The dataset's name, and what it was fitted on."""
    dataset, chosen, job = submitted(service, model, name)
    assert job["state"] == "succeeded", job
    return dataset, chosen


def expected(oracle: Oracle, model: Model, chosen: Case, rows: pa.Table, sizes: Any) -> list[dict[str, Any]]:
    """The library's answers for the first so many rows."""
    return oracle.ask(
        decoded(chosen.table),
        chosen.target,
        chosen.task,
        [slice(0, size) for size in sizes],
        rows=rows,
        quantiles=LEVELS,
        library=model.library,
        checkpoint=model.checkpoints[chosen.task],
        members=model.members,
        schema=chosen.options.get("schema"),
    )


def told(service: Service, model: Model, dataset: str, task: str, rows: pa.Table) -> dict[str, Any]:
    """All that the service says of the rows, by the oracle's names."""
    if task == "classification":
        return {"probabilities": service.predict(dataset, rows)["probabilities"]}
    answer = service.predict(dataset, rows, quantiles=",".join(map(repr, LEVELS)))
    points = {point: service.predict(dataset, rows, output=point) for point in model.points}
    assert {point: answer["predictions"] for point, answer in points.items()} == {
        point: answer[point] for point, answer in points.items()
    }
    return {**{point: points[point][point] for point in points}, "quantiles": answer["quantiles"]}


def worst(ours: dict[str, Any], theirs: dict[str, Any], scale: float = 1.0) -> float:
    """The largest difference of two answers, in units of `scale`."""
    assert ours.keys() <= theirs.keys()
    return max(
        float(np.abs(np.subtract(values, theirs[name])).max()) / scale for name, values in ours.items()
    )


@pytest.mark.parametrize("name", MAKERS)
def test_every_answer_is_the_library_s(service: Service, oracle: Oracle, model: Model, name: str) -> None:
    if name in model.refuses:
        error = submitted(service, model, name)[2]["error"]
        assert error["code"] in ("invalid_table", "invalid_target"), error
        assert model.refuses[name] in error["detail"], error
        return
    dataset, chosen = fitted(service, model, name)
    rows = asked(chosen)
    for size, wanted in zip(SIZES, expected(oracle, model, chosen, rows, SIZES), strict=True):
        ours = told(service, model, dataset, chosen.task, rows.slice(0, size))
        assert worst(ours, wanted) <= model.within, f"{name}: {size} rows"


def test_a_request_of_several_forwards_is_within_the_stated_tolerance(
    service: Service, oracle: Oracle, model: Model
) -> None:
    for name in ("mixed", "mixed regression"):
        dataset, chosen = fitted(service, model, name)
        rows = chosen.table.drop_columns([chosen.target])
        rows = pa.concat_tables([rows] * 5).slice(0, 2 * FORWARD + 90)
        (wanted,) = expected(oracle, model, chosen, rows, [rows.num_rows])
        ours = told(service, model, dataset, chosen.task, rows)
        assert worst(ours, wanted, spread(chosen)) <= model.shared, name


def test_requests_that_share_a_forward_are_within_the_stated_tolerance(
    service: Service, oracle: Oracle, model: Model
) -> None:
    for name in ("every type", "every type regression"):
        dataset, chosen = fitted(service, model, name)
        rows = asked(chosen)
        (wanted,) = expected(oracle, model, chosen, rows, [6])
        company = [rows.slice(0, 6), rows.slice(60), rows.slice(30)]
        with ThreadPoolExecutor(8) as pool:
            asking = [
                pool.submit(told, service, model, dataset, chosen.task, company[i % 3]) for i in range(48)
            ]
            answers = [answer.result() for answer in asking[::3]]
        assert max(worst(answer, wanted, spread(chosen)) for answer in answers) <= model.shared, name


def spread(chosen: Case) -> float:
    """What a tolerance is told in: probability, or the target's standard deviation."""
    if chosen.task == "classification":
        return 1.0
    return float(np.std(chosen.table.column(chosen.target).to_numpy()))


def test_a_constant_target_comes_back_as_the_library_has_it(
    service: Service, oracle: Oracle, model: Model
) -> None:
    dataset, chosen = fitted(service, model, "case 11c")
    rows = chosen.table.drop_columns([chosen.target])
    (wanted,) = expected(oracle, model, chosen, rows, [rows.num_rows])
    ours = told(service, model, dataset, chosen.task, rows)
    assert worst(ours, wanted) <= model.within
    assert np.allclose(ours["mean"], 3.5, atol=0.02)
