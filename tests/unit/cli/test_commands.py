from __future__ import annotations

import csv
import functools
import json
import subprocess
import sys

import httpx
import pandas as pd
import pytest
from typer.testing import CliRunner

import tabrelay.client
from tabrelay.cli.app import app, run
from tabrelay.client import Pace
from tests.unit.client.fakes import Service, answer, event, job, problem, service, stream

REFUSED = httpx.ConnectError("[Errno 111] Connection refused")
PROBA = {
    "dataset": "churn",
    "version": 2,
    "model": "tabicl-mini",
    "task": "classification",
    "classes": ["no", "yes"],
    "predictions": ["yes", "no"],
    "probabilities": [[0.2, 0.8], [0.9, 0.1]],
}


@pytest.fixture
def serve(monkeypatch):
    """`serve(answers...)` stands in for the service that commands talk to."""
    monkeypatch.delenv("TABRELAY_URL", raising=False)
    monkeypatch.delenv("TABRELAY_API_KEY", raising=False)

    def start(*answers) -> Service:
        svc = service(*answers)
        made = functools.partial(
            tabrelay.client.client.Client,
            transport=httpx.MockTransport(svc.handle),
            pace=Pace(now=lambda: svc.now, sleep=svc.sleep, chance=lambda: 0.0),
        )
        monkeypatch.setattr("tabrelay.client.Client", made)
        return svc

    return start


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "new.csv"
    path.write_text('id;note\n007;"a;b"\n008;\n')
    return path


def test_fit_waits_and_shows_plain_lines_without_a_terminal(serve, capsys, table):
    serve(
        answer(202, job(queue_position=2)),
        answer(200, job("running", phase="encoding", fraction=0.5, eta_s=3)),
        answer(
            200, job("succeeded", version=1, rows=10, columns=3, model="tabicl-mini", context_bytes=2_500_000)
        ),
    )
    assert run(["fit", str(table), "--target", "y", "--dataset", "churn"]) == 0
    out, err = capsys.readouterr()
    assert out == "churn version 1 is ready: 10 x 3, tabicl-mini, context 2.5 MB\n"
    assert err.splitlines() == [
        "churn: queued, position 2",
        "churn: encoding 50%, about 3.0 s left",
        "churn: succeeded",
    ]


def test_json_is_all_that_is_written(serve, capsys, table):
    serve(answer(202, job()), answer(200, job("succeeded", version=1, brand_new="kept")))
    assert run(["fit", str(table), "--target", "y", "--dataset", "churn", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["brand_new"] == "kept"
    assert err == ""


def test_fit_sends_its_options_and_does_not_wait_when_told(serve, capsys, table):
    svc = serve(answer(202, job()))
    command = ["fit", str(table), "--target", "y", "--dataset", "churn", "--no-wait", "--model", "m"]
    assert run([*command, "--task", "regression", "--option", "n=8", "--option", "mode=fp16"]) == 0
    assert "accepted as job j1" in capsys.readouterr().out
    assert b'{"n": 8, "mode": "fp16"}' in svc.bodies[0]
    assert len(svc.requests) == 1


def test_fit_says_what_columns_are(serve, table):
    svc = serve(answer(202, job()))
    command = ["fit", str(table), "--target", "y", "--dataset", "churn", "--no-wait", "--ignore", "id"]
    command += ["--categorical", "zip", "--categorical", "shop", "--missing=-999", "--option", "n=8"]
    assert run(command) == 0
    said = b'{"categorical": ["zip", "shop"], "ignore": ["id"], "missing": ["-999"]}'
    assert b'{"n": 8, "schema": ' + said + b"}" in svc.bodies[0]


def test_failed_fit_is_one_line_and_exit_1(serve, capsys, table):
    error = {"code": "invalid_target", "detail": "The target has\none class.", "errors": [], "facts": {}}
    serve(answer(202, job()), answer(200, job("failed", error=error)))
    assert run(["fit", str(table), "--target", "y", "--dataset", "churn", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["state"] == "failed"
    assert err == "tabrelay: The target has one class. (job j1) [invalid_target]\n"


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["job"], 2, "Missing argument"),
        (["nonsense"], 2, "No such command 'nonsense'"),
        (["jobs", "--limit", "x"], 2, "--limit"),
        (["fit", "x.csv", "--target", "y", "--dataset", "d", "--option", "n"], 2, "K=V"),
        (["fit", "missing.csv", "--target", "y", "--dataset", "d"], 1, "missing.csv: no such file"),
        (["fit", "x.xlsx", "--target", "y", "--dataset", "d"], 1, "can't tell the format of x.xlsx"),
        (["predict", "d", "x.csv", "--quantiles", "5"], 2, "between 0 and 1"),
        (["predict", "d", "x.csv", "--out", "y.xlsx"], 1, "write to .csv or .parquet"),
        (["delete", "d"], 2, "add --yes"),
        (["--url", "ftp://me:pw@svc", "jobs"], 1, "not a usable url"),
    ],
)
def test_mistake_is_one_line_on_standard_error(serve, capsys, arguments, status, said):
    svc = serve(answer(200, {}))
    assert run(arguments) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("tabrelay: ")
    assert said in err
    assert svc.requests == []


def test_refused_connection_says_how_to_start_the_service(serve, capsys):
    serve(REFUSED)
    assert run(["jobs"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "can't reach http://127.0.0.1:8000" in err
    assert "tabrelay up" in err


def test_problem_is_one_line_with_its_fields(serve, capsys, table):
    serve(
        problem(
            422, "invalid_rows", "1 column is missing", errors=[{"field": "age", "message": "is missing"}]
        )
    )
    assert run(["predict", "churn", str(table)]) == 1
    assert capsys.readouterr().err == "tabrelay: 1 column is missing: age: is missing [invalid_rows]\n"


def test_unexpected_fault_is_no_traceback(serve, capsys, monkeypatch):
    serve(answer(200, {}))
    monkeypatch.setattr("tabrelay.client.client.Client.limits", lambda self: 1 / 0)
    assert run(["limits"]) == 1
    assert capsys.readouterr().err == "tabrelay: ZeroDivisionError: division by zero\n"


def test_ctrl_c_says_that_the_job_goes_on_and_how_to_resume(serve, capsys):
    def interrupted(request):
        raise KeyboardInterrupt

    serve(answer(200, job("running")), interrupted)
    assert run(["--url", "http://svc:9", "job", "j1", "--watch"]) == 130
    err = capsys.readouterr().err
    assert "the job goes on" in err
    assert "tabrelay job j1 --watch --url http://svc:9" in err


def test_url_and_key_may_stand_before_or_after_the_command(serve, capsys):
    for arguments in (
        ["--url", "http://a", "--api-key", "k", "jobs"],
        ["jobs", "--url", "http://a", "--api-key", "k"],
    ):
        svc = serve(answer(200, {"jobs": [], "next": None}))
        assert run(arguments) == 0
        assert svc.requests[0].url.host == "a"
        assert svc.requests[0].headers["Authorization"] == "Bearer k"
    assert "no jobs" in capsys.readouterr().out


def test_predict_keeps_the_input_cells_as_they_were(serve, capsys, table, tmp_path):
    serve(answer(200, PROBA))
    out = tmp_path / "answered.csv"
    assert run(["predict", "churn", str(table), "--out", str(out)]) == 0
    with out.open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["id", "note", "prediction", "probability:no", "probability:yes"],
            ["007", "a;b", "yes", "0.2", "0.8"],
            ["008", "", "no", "0.9", "0.1"],
        ]
    assert "2 rows answered by churn version 2" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answered.csv", "new.csv"]


def test_answered_file_can_be_asked_again(serve, tmp_path, table):
    serve(answer(200, PROBA))
    once, twice = tmp_path / "once.csv", tmp_path / "twice.csv"
    run(["predict", "churn", str(table), "--out", str(once)])
    run(["predict", "churn", str(once), "--out", str(twice)])
    assert once.read_text() == twice.read_text()


@pytest.mark.parametrize(
    ("encoding", "told"), [("latin-1", ["--encoding", "latin-1"]), ("utf-16-le", []), ("utf-16-be", [])]
)
def test_a_file_of_another_encoding_is_named_to_the_service_and_read(serve, capsys, tmp_path, encoding, told):
    svc = serve(answer(200, PROBA))
    path = tmp_path / "new.csv"
    path.write_bytes("id;note\n007;ü\n008;café\n".encode(encoding))
    assert run(["predict", "churn", str(path), *told]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[1] for line in lines] == ["note", "ü", "café"]
    assert svc.requests[0].url.params.get("encoding") == (told[1] if told else None)


def test_fit_names_the_encoding(serve, table):
    svc = serve(answer(202, job()))
    assert (
        run(["fit", str(table), "--target", "y", "--dataset", "d", "--encoding", "cp1252", "--no-wait"]) == 0
    )
    assert b'name="encoding"\r\n\r\ncp1252' in svc.bodies[0]


def test_predict_writes_csv_where_there_is_no_terminal(serve, capsys, table):
    for arguments in (["--out", "-"], []):
        serve(answer(200, PROBA))
        assert run(["predict", "churn", str(table), *arguments]) == 0
        assert capsys.readouterr().out.splitlines()[0] == "id,note,prediction,probability:no,probability:yes"


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_predict_writes_parquet_by_suffix(serve, tmp_path, kind):
    source = tmp_path / f"rows.{kind}"
    frame = pd.DataFrame({"a": [1, 2], "b": ["x", None]})
    frame.to_csv(source, index=False) if kind == "csv" else frame.to_parquet(source)
    serve(answer(200, PROBA))
    assert run(["predict", "churn", str(source), "--out", str(tmp_path / "o.parquet")]) == 0
    told = pd.read_parquet(tmp_path / "o.parquet")
    assert list(told.columns) == ["a", "b", "prediction", "probability:no", "probability:yes"]
    assert told["a"].tolist() == [1, 2]
    assert told["b"].isna().tolist() == [False, True]


def test_answer_of_another_length_is_refused_and_leaves_no_file(serve, capsys, table, tmp_path):
    serve(answer(200, PROBA | {"predictions": ["yes"], "probabilities": None}))
    assert run(["predict", "churn", str(table), "--out", str(tmp_path / "o.csv")]) == 1
    assert "has 2 rows but 1 were answered" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["new.csv"]


def test_predict_json_is_the_answer(serve, capsys, table):
    svc = serve(
        answer(200, {"dataset": "d", "mean": [1.0, 2.0], "levels": [0.5], "quantiles": [[1.0], [2.0]]})
    )
    assert run(["predict", "d", str(table), "--quantiles", "0.5", "--version", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["predictions"], told["quantiles"]) == ([1.0, 2.0], {"0.5": [1.0, 2.0]})
    assert dict(svc.requests[0].url.params) == {"version": "3", "output": "quantiles", "quantiles": "0.5"}


def test_lists_and_single_things_are_shown(serve, capsys):
    listed = {
        "name": "churn",
        "version": 2,
        "model": "m",
        "task": "classification",
        "rows": 1000,
        "columns": 7,
    }
    listed |= {"bytes": 1500, "pinned": True, "updated_at": "2026-01-01T00:00:00Z", "versions": 1}
    one = listed | {
        "versions": [{"version": 2, "bytes": 1500, "tiers": ["disk", "host"], "resident_on": ["predict-0"]}],
        "schema": {"columns": [{"name": "plan", "kind": "text"}]},
    }
    models = {"models": [{"name": "m", "ready": {"classification": True}}], "default": "m"}
    shown = {
        "datasets": ({"datasets": [listed], "next": None}, ["churn", "1,000 x 7", "1.5 kB", "yes"]),
        "dataset churn": (one, ["plan", "disk, host", "predict-0"]),
        "models": (models, ["m", "classification", "yes"]),
        "limits": ({"rows": 5, "models": {"m": {"max_rows": 9}}}, ["rows", "m max_rows 9"]),
        "workers": ({"predict": [{"name": "p0", "contexts": []}], "fit": [{"name": "f0"}]}, ["p0", "f0"]),
        "jobs": ({"jobs": [job("running", phase="writing")], "next": None}, ["j1", "writing"]),
        "job j1": (job("failed", error={"code": "c", "detail": "why"}), ["why [c]"]),
        "cancel j1": (job("cancelled"), ["cancelled j1"]),
        "delete churn --yes": ({}, ["deleted churn"]),
        "pin churn": ({}, ["pinned churn"]),
        "unpin churn": ({}, ["unpinned churn"]),
    }
    for command, (data, words) in shown.items():
        serve(answer(200, data))
        assert run(command.split()) == 0
        out = capsys.readouterr().out
        assert all(word in out for word in words), (command, out)
        serve(answer(200, data))
        assert run([*command.split(), "--json"]) == 0
        json.loads(capsys.readouterr().out)


def test_version_is_told_both_ways(capsys):
    assert run(["version"]) == 0
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.split() == [tabrelay.__version__] * 2


def test_every_command_shows_an_example():
    runner = CliRunner()
    commands = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert len(commands) == 17
    for name in commands:
        shown = runner.invoke(app, [name, "--help"])
        assert shown.exit_code == 0
        assert f"Example: tabrelay {name}" in " ".join(shown.output.split())


def test_up_passes_only_what_was_given(monkeypatch):
    seen = []
    monkeypatch.setattr("tabrelay.up.stack.run_up", lambda options: seen.append(options) or 0)
    assert run(["up", "--port", "0", "--predict-workers", "2", "--model", "a", "--model", "b=/w"]) == 0
    (options,) = seen
    assert (options.port, options.predict_workers, options.models, options.data_dir) == (
        0,
        2,
        ("a", "b=/w"),
        None,
    )


def test_starting_the_command_loads_no_heavy_library():
    code = (
        "import sys; from tabrelay.cli.app import run; run(['jobs', '--help']);"
        "print([m for m in ('pandas', 'pyarrow', 'sklearn', 'numpy', 'torch', 'httpx') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_closed_pipe_is_no_complaint():
    code = "from tabrelay.cli import main; raise SystemExit(main(['--help']))"
    done = subprocess.run(
        ["bash", "-c", f'{sys.executable} -c "{code}" | true'], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""


def test_events_print_one_json_object_a_change(serve, capsys):
    svc = serve(answer(500))
    svc.streams = [
        stream(
            event("progress", job("queued", queue_position=2), "0-0"),
            event("progress", job("queued", queue_position=1)),
            event("progress", job("running", phase="encoding", brand_new="kept"), "1-0"),
            event("end", job("succeeded"), "2-0"),
        )
    ]
    assert run(["job", "j1", "--events", "--json"]) == 0
    out, err = capsys.readouterr()
    told = [json.loads(line) for line in out.splitlines()]
    assert [(t["state"], t.get("queue_position")) for t in told] == [
        ("queued", 2),
        ("queued", 1),
        ("running", None),
        ("succeeded", None),
    ]
    assert told[2]["brand_new"] == "kept"
    assert err == ""


def test_events_of_a_failed_job_are_exit_1(serve, capsys):
    svc = serve(answer(500))
    error = {"code": "invalid_table", "detail": "no rows", "errors": []}
    svc.streams = [stream(event("end", job("failed", error=error), "2-0"))]
    assert run(["job", "j1", "--events"]) == 1
    out, err = capsys.readouterr()
    assert out == "failed\n"
    assert err == "tabrelay: no rows (job j1) [invalid_table]\n"


def test_the_bar_spans_all_phases_and_tells_the_attempt(serve, capsys):
    svc = serve(answer(200, job()))
    svc.streams = [
        stream(
            event("progress", job("running", phase="loading", fraction=0, progress=0.0, attempt=2), "1-0"),
            event("progress", job("running", phase="encoding", fraction=0.5, progress=0.48, eta_s=9), "2-0"),
            event("progress", job("running", phase="writing", fraction=0, progress=0.92, eta_s=1), "3-0"),
            event("end", job("succeeded", progress=1.0), "4-0"),
        )
    ]
    assert run(["job", "j1", "--watch"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "churn: queued",
        "churn: loading 0%, attempt 2",
        "churn: encoding 48%, about 9.0 s left",
        "churn: writing 92%, about 1.0 s left",
        "churn: succeeded",
    ]
