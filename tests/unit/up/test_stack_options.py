"""What a stack refuses before it starts anything, and its options as arguments."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tabrelay.up.__main__ import parse
from tabrelay.up.stack import StackOptions, run_up


def test_options_survive_the_command_line() -> None:
    options = StackOptions(
        port=0,
        data_dir=Path("/d"),
        fit_workers=2,
        predict_devices="cuda:1,cuda:2",
        models=("tabicl-v2=/w", "tabicl-mini"),
        threads=2,
    )
    assert parse(options.arguments()) == options
    assert parse([]) == StackOptions()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"host": "0.0.0.0"}, "keys are needed to listen on 0.0.0.0"),  # noqa: S104
        ({"host": "nowhere.example"}, "'nowhere.example' is no address"),
        ({"port": 70_000}, "there is no port 70000"),
        ({"fit_devices": "tpu"}, "'tpu' is no device"),
        ({"threads": 0}, "setting threads"),
        (
            {"redis_url": "redis://:secret@127.0.0.1:1/0"},
            "Redis at redis://:***@127.0.0.1:1/0 does not answer",
        ),
    ],
)
def test_what_can_not_be_is_said_in_one_line(
    options: dict[str, object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_up(StackOptions(**({"port": 0, "data_dir": tmp_path} | options))) == 1  # type: ignore[arg-type]  # a table of cases
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.err.count("\n") == 1
    assert (shown.out, "secret" in shown.err) == ("", False)


def test_unknown_setting_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TABRELAY_TRHEADS", "2")
    assert run_up(StackOptions(port=0, data_dir=tmp_path)) == 1
    assert "TABRELAY_TRHEADS" in capsys.readouterr().err


def test_port_in_use_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert run_up(StackOptions(port=port, data_dir=tmp_path)) == 1
    assert f"port {port} can't be had: Address already in use" in capsys.readouterr().err
