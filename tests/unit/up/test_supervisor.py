"""The supervisor, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.unit.up.helpers import SUPERVISE, Supervised, alive, group_pids, noting, stopping, until

IGNORING = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\npathlib.Path('ignoring').touch()\ntime.sleep(600)"
CRASHING = "print('no such device', flush=True)\nsys.exit(3)"


def test_stages_start_in_order_each_after_the_one_before_is_ready(tmp_path: Path) -> None:
    slow = noting("order", "time.sleep(0.5)\npathlib.Path('a.ready').touch()\ntime.sleep(600)")
    after = "assert pathlib.Path('a.ready').exists()\npathlib.Path('b.ready').touch()\ntime.sleep(600)"
    with Supervised(
        tmp_path,
        {"name": "a", "code": slow, "ready_file": str(tmp_path / "a.ready")},
        {"name": "b", "code": noting("order", after), "ready_file": str(tmp_path / "b.ready"), "stage": 1},
    ) as supervised:
        supervised.wait_ready()
        assert len(supervised.pids("order")) == 2
        assert supervised.stop()[0] == 0


def test_children_stop_in_reverse_and_a_stage_together(tmp_path: Path) -> None:
    children: list[dict[str, Any]] = [
        {"name": name, "code": stopping(name), "ready_file": str(tmp_path / f"{name}.ready"), "stage": stage}
        for name, stage in (("redis", 0), ("fit", 1), ("predict", 1), ("api", 2))
    ]
    with Supervised(tmp_path, *children) as supervised:
        supervised.wait_ready()
        status, took_s = supervised.stop()
    order = (tmp_path / "stopped").read_text().split()
    assert (status, order[0], order[-1], sorted(order[1:3])) == (0, "api", "redis", ["fit", "predict"])
    assert took_s < 5


def test_killed_child_is_started_again_after_a_growing_pause(tmp_path: Path) -> None:
    times = "open('times', 'a').write(f'{time.time()}\\n')\n"
    code = noting("pids", times + "pathlib.Path('up').touch()\ntime.sleep(600)")

    def wait_for_lines(name: str, lines: int) -> None:
        until(lambda: len((tmp_path / name).read_text().split()) == lines)

    with Supervised(tmp_path, {"name": "a", "code": code, "ready_file": str(tmp_path / "up")}) as supervised:
        supervised.wait_ready()
        pauses = []
        for starts in (1, 2, 3):
            wait_for_lines("pids", starts)
            killed_at = time.time()
            os.kill(supervised.pids("pids")[-1], signal.SIGKILL)
            wait_for_lines("times", starts + 1)
            pauses.append(float((tmp_path / "times").read_text().split()[-1]) - killed_at)
        assert supervised.stop()[0] == 0
    assert pauses[0] >= 0.2
    assert pauses[1] >= 0.4
    assert 0.8 <= pauses[2] < 4
    assert "a ended by SIGKILL; starting it again in 0.2 s" in supervised.log


def test_pause_starts_over_after_a_long_life_and_is_bounded(tmp_path: Path) -> None:
    code = noting("pids", "pathlib.Path('up').touch()\ntime.sleep(0.4)\nsys.exit(1)")
    restart = {"reset_after_s": 0.3, "ends_while_starting": 100}
    with Supervised(
        tmp_path, {"name": "a", "code": code, "ready_file": str(tmp_path / "up"), "restart": restart}
    ) as supervised:
        supervised.wait_ready()
        until(lambda: len(supervised.pids("pids")) >= 4)
    assert supervised.log.count("starting it again in 0.2 s") >= 3


def test_child_that_ignores_sigterm_is_killed_in_time(tmp_path: Path) -> None:
    children: list[dict[str, Any]] = [
        {"name": "redis", "code": stopping("redis"), "ready_file": str(tmp_path / "redis.ready")},
        {
            "name": "fit",
            "code": noting("fit", IGNORING),
            "ready_file": str(tmp_path / "ignoring"),
            "stage": 1,
        },
    ]
    with Supervised(tmp_path, *children) as supervised:
        supervised.wait_ready()
        status, took_s = supervised.stop()
        assert status == 0
        assert 7 < took_s < 10
        assert not alive(supervised.pids("fit")[0])
    assert (tmp_path / "stopped").read_text().split() == ["redis"], (
        "a hanging stage keeps no other from a polite end"
    )
    assert "killing fit" in supervised.log


def test_second_interrupt_kills_at_once(tmp_path: Path) -> None:
    child = {"name": "fit", "code": noting("fit", IGNORING), "ready_file": str(tmp_path / "ignoring")}
    with Supervised(tmp_path, child) as supervised:
        supervised.wait_ready()
        supervised.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        status, took_s = supervised.stop(signal.SIGINT)
        assert (status, alive(supervised.pids("fit")[0])) == (0, False)
    assert took_s < 2


def test_interrupt_passed_on_twice_by_a_launcher_still_stops_politely(tmp_path: Path) -> None:
    child = {"name": "a", "code": stopping("a"), "ready_file": str(tmp_path / "a.ready")}
    with Supervised(tmp_path, child) as supervised:
        supervised.wait_ready()
        supervised.process.send_signal(signal.SIGINT)
        assert supervised.stop(signal.SIGINT)[0] == 0
    assert (tmp_path / "stopped").read_text().split() == ["a"]


def test_killed_supervisor_leaves_nothing(tmp_path: Path) -> None:
    """Not a child, not one that ignores SIGTERM, and not what a child started."""
    grandchild = (
        "import subprocess\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    )
    children: list[dict[str, Any]] = [
        {"name": "a", "code": stopping("a"), "ready_file": str(tmp_path / "a.ready")},
        {"name": "b", "code": noting("b", grandchild + IGNORING), "ready_file": str(tmp_path / "ignoring")},
    ]
    with Supervised(tmp_path, *children) as supervised:
        supervised.wait_ready()
        polite, hanging = supervised.pids("a")[0], supervised.pids("b")[0]
        assert len(group_pids(hanging)) == 2
        supervised.process.kill()
        until(lambda: not alive(polite), 2)
        until(lambda: not group_pids(hanging), 7)


def test_restart_first_ends_what_the_dead_child_left_behind(tmp_path: Path) -> None:
    left = (
        "import subprocess\nleft = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    )
    code = noting("pids", left + "open('left', 'a').write(f'{left.pid}\\n')\ntime.sleep(600)")
    with Supervised(
        tmp_path, {"name": "a", "code": code, "ready_file": str(tmp_path / "left")}
    ) as supervised:
        supervised.wait_ready()
        until(lambda: len(supervised.pids("left")) == 1)
        os.kill(supervised.pids("pids")[0], signal.SIGKILL)
        until(lambda: len(supervised.pids("left")) == 2)
        assert not alive(supervised.pids("left")[0])


def test_child_that_keeps_ending_at_the_start_stops_the_stack_with_its_last_lines(tmp_path: Path) -> None:
    children: list[dict[str, Any]] = [
        {"name": "redis", "code": stopping("redis"), "ready_file": str(tmp_path / "redis.ready")},
        {"name": "fit-0", "code": noting("fit", CRASHING), "ready_file": "/nowhere", "stage": 1},
    ]
    with Supervised(tmp_path, *children) as supervised:
        assert supervised.process.wait(20) == 1
        assert len(supervised.pids("fit")) == 4
        assert not alive(supervised.pids("redis")[0])
    assert "fit-0 ended with status 3 4 times while starting; its last lines:" in supervised.log
    assert supervised.log.strip().endswith("no such device")


def test_child_that_says_its_configuration_is_wrong_is_not_tried_again(tmp_path: Path) -> None:
    code = noting("pids", "print('there is no cuda:7', flush=True)\nsys.exit(78)")
    with Supervised(tmp_path, {"name": "fit-0", "code": code, "ready_file": "/nowhere"}) as supervised:
        assert supervised.process.wait(20) == 1
        assert len(supervised.pids("pids")) == 1
    assert "there is no cuda:7" in supervised.log


def test_child_that_is_never_ready_stops_the_stack(tmp_path: Path) -> None:
    code = noting("pids", "print('still loading', flush=True)\ntime.sleep(600)")
    child = {"name": "a", "code": code, "ready_file": "/nowhere", "ready_timeout_s": 1.0}
    with Supervised(tmp_path, child) as supervised:
        assert supervised.process.wait(20) == 1
        assert not alive(supervised.pids("pids")[0])
    assert "a was not ready within 1 s; its last lines:" in supervised.log


def test_stop_while_starting_stops_what_was_started(tmp_path: Path) -> None:
    with Supervised(tmp_path, {"name": "a", "code": stopping("a"), "ready_file": "/nowhere"}) as supervised:
        until((tmp_path / "a.ready").exists)
        assert supervised.stop()[0] == 0
        assert not alive(supervised.pids("a")[0])


def test_output_is_prefixed_and_children_do_not_see_ctrl_c(tmp_path: Path) -> None:
    code = noting("pids", "print('one\\ntwo', flush=True)\npathlib.Path('up').touch()\ntime.sleep(600)")
    with Supervised(
        tmp_path, {"name": "fit-0", "code": code, "ready_file": str(tmp_path / "up")}
    ) as supervised:
        supervised.wait_ready()
        pid = supervised.pids("pids")[0]
        assert os.getsid(pid) == pid
        supervised.stop()
    assert "fit-0 | one\nfit-0 | two\n" in supervised.log


def test_log_that_nobody_reads_does_not_stop_the_supervisor(tmp_path: Path) -> None:
    flood = (
        "line = 'x' * 1000\nfor _ in range(20_000): print(line)\npathlib.Path('up').touch()\ntime.sleep(600)"
    )
    asked = {"children": [{"name": "a", "code": noting("pids", flood), "ready_file": str(tmp_path / "up")}]}
    command = [sys.executable, str(SUPERVISE), json.dumps(asked)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
    ) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == b"all ready\n"
        began = time.monotonic()
        supervisor.terminate()
        assert supervisor.wait(15) == 0
        assert time.monotonic() - began < 5
