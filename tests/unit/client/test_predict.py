from __future__ import annotations

import datetime as dt
import io
import json

import httpx
import pandas as pd
import pyarrow as pa
import pytest

import tabrelay.client.client as client_module
import tabrelay.client.tables as tables
from tabrelay.client import Invalid

from .fakes import answer, service

FRAME = pd.DataFrame(
    {
        "x": [1.5, None, 3.0],
        "plan": pd.Categorical(["a", "b", "a"]),
        "since": pd.to_datetime(["2024-01-01", None, "2024-03-01"]),
        7: [True, False, True],
    }
)
FACTS = {
    "dataset": "d",
    "version": 2,
    "model": "m",
    "task": "classification",
    "classes": [False, True],
    "new": 1,
}


def arrow_answer(columns, facts):
    table = pa.table(columns).replace_schema_metadata({"tabrelay": json.dumps(facts)})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return httpx.Response(200, content=sink.getvalue(), headers={"Content-Type": tables.ARROW_STREAM})


def without_pyarrow(monkeypatch):
    monkeypatch.setattr(tables, "has_pyarrow", lambda: False)
    monkeypatch.setattr(client_module, "has_pyarrow", lambda: False)


def test_frame_travels_as_arrow_with_its_types_and_gaps():
    svc = service(
        arrow_answer(
            {
                "prediction": [True, False, True],
                "probability:false": [0.1, 0.8, 0.3],
                "probability:true": [0.9, 0.2, 0.7],
                "later": [0, 0, 0],
            },
            FACTS,
        )
    )
    told = svc.client().predict("d", FRAME, version=2, output="proba")
    sent = pa.ipc.open_stream(svc.bodies[0]).read_all()
    assert sent.column_names == ["x", "plan", "since", "7"]
    assert sent.column("x").to_pylist() == [1.5, None, 3.0]
    assert pa.types.is_large_string(sent.schema.field("plan").type) or pa.types.is_string(
        sent.schema.field("plan").type
    )
    assert pa.types.is_timestamp(sent.schema.field("since").type)
    assert svc.requests[0].headers["Content-Type"] == tables.ARROW_STREAM
    assert svc.requests[0].headers["Accept"].startswith(tables.ARROW_STREAM)
    assert dict(svc.requests[0].url.params) == {"version": "2", "output": "proba"}
    assert told.predictions == [True, False, True]
    assert told.probabilities == [[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]]
    assert (told.version, told.classes) == (2, (False, True))
    assert list(told.to_frame().columns) == ["prediction", "probability:false", "probability:true"]


def test_regression_answers_have_mean_and_quantiles_in_both_forms():
    facts = {"dataset": "d", "task": "regression"}
    arrow = arrow_answer(
        {"mean": [1.0, 2.0], "quantile:0.05": [0.5, 1.5], "quantile:0.95": [1.5, 2.5]}, facts
    )
    plain = answer(200, facts | {"mean": [1.0, 2.0], "quantiles": {"0.05": [0.5, 1.5], "0.95": [1.5, 2.5]}})
    by_row = answer(
        200, facts | {"mean": [1.0, 2.0], "levels": [0.05, 0.95], "quantiles": [[0.5, 1.5], [1.5, 2.5]]}
    )
    for given in (arrow, plain, by_row):
        svc = service(given)
        told = svc.client().predict("d", FRAME[["x"]], output="quantiles", quantiles=[0.05, 0.95])
        assert told.predictions == [1.0, 2.0]
        assert told.quantiles == {0.05: [0.5, 1.5], 0.95: [1.5, 2.5]}
        assert svc.requests[0].url.params["quantiles"] == "0.05,0.95"


def test_points_and_thresholds_are_asked_for_and_read_in_both_forms():
    facts = {"dataset": "d", "task": "regression"}
    binary = arrow_answer({"prediction": [2.0], "mean": [1.0], "median": [2.0]}, facts)
    plain = answer(200, facts | {"predictions": [2.0], "mean": [1.0], "median": [2.0]})
    for reply in (binary, plain):
        svc = service(reply)
        told = svc.client().predict("d", FRAME[["x"]].head(1), output="median", threshold=0.25)
        assert (told.predictions, told.mean, told.median, told.mode) == ([2.0], [1.0], [2.0], None)
        assert told.columns() == {"prediction": [2.0], "mean": [1.0], "median": [2.0]}
        assert dict(svc.requests[0].url.params) == {"output": "median", "threshold": "0.25"}


def test_frame_goes_as_json_where_pyarrow_is_missing(monkeypatch):
    without_pyarrow(monkeypatch)
    svc = service(answer(200, FACTS | {"predictions": [True, False, True]}))
    svc.client().predict("d", FRAME)
    assert json.loads(svc.bodies[0]) == {
        "columns": ["x", "plan", "since", "7"],
        "rows": [
            [1.5, "a", "2024-01-01T00:00:00", True],
            [None, "b", None, False],
            [3.0, "a", "2024-03-01T00:00:00", True],
        ],
    }
    assert svc.requests[0].headers["Accept"] == "application/json"


def test_records_go_as_json_and_missing_values_as_null():
    svc = service(answer(200, FACTS | {"predictions": [True]}))
    row = {
        "x": float("nan"),
        "n": FRAME["x"].to_numpy()[0],
        "when": dt.date(2024, 1, 2),
        "na": pd.NA,
        "nat": pd.NaT,
    }
    svc.client().predict("d", [row])
    assert json.loads(svc.bodies[0]) == {
        "records": [{"x": None, "n": 1.5, "when": "2024-01-02", "na": None, "nat": None}]
    }


@pytest.mark.parametrize("value", [float("inf"), object()])
def test_cell_that_can_not_be_sent_is_named_before_sending(value):
    svc = service(answer())
    with pytest.raises(Invalid, match="column 'x' can't be sent: x: ") as caught:
        svc.client().predict("d", [{"x": value}])
    assert caught.value.errors[0].field == "x"
    assert svc.requests == []


def test_mixed_column_is_named_before_sending():
    with pytest.raises(Invalid, match="column odd"):
        service(answer()).client().predict("d", pd.DataFrame({"odd": [1, "a", object()]}))


def test_files_go_as_they_are(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("x\n1\n")
    svc = service(answer(200, FACTS | {"predictions": [True]}))
    svc.client().predict("d", path)
    assert svc.bodies == [b"x\n1\n"]
    assert svc.requests[0].headers["Content-Type"] == "text/csv"
    assert svc.requests[0].headers["Content-Length"] == "4"


def test_unknown_suffix_missing_file_and_what_is_no_table_are_told(tmp_path):
    client = service(answer()).client()
    with pytest.raises(Invalid, match=r"can't tell the format of rows\.xlsx"):
        client.predict("d", tmp_path / "rows.xlsx")
    with pytest.raises(FileNotFoundError):
        client.predict("d", tmp_path / "rows.csv")
    with pytest.raises(TypeError, match="dict is no table"):
        client.predict("d", {"a": 1})


def test_fit_of_a_frame_sends_parquet():
    svc = service(answer(202, {"id": "j", "state": "queued"}))
    svc.client().submit(FRAME, "x", "d")
    assert b'filename="table.parquet"\r\nContent-Type: application/vnd.apache.parquet' in svc.bodies[0]
    assert b"PAR1" in svc.bodies[0]


def test_asked_labels_come_without_probabilities_in_both_forms():
    columns = {"prediction": [True], "probability:false": [0.1], "probability:true": [0.9]}
    for given in (arrow_answer(columns, FACTS), answer(200, FACTS | {"predictions": [True]})):
        told = service(given).client().predict("d", FRAME[:1], output="label")
        assert (told.predictions, told.probabilities) == ([True], None)
