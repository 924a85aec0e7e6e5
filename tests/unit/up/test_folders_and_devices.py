"""The stack's folders, lock and device lists."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tabrelay.up import folders
from tabrelay.up.devices import Device, assign
from tabrelay.up.errors import CannotStart
from tabrelay.up.folders import data_folder, locked, private_folder, write_private


def test_folders_are_made_closed_to_others(tmp_path: Path) -> None:
    made = private_folder(tmp_path / "a" / "run")
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o755)
    assert private_folder(made).stat().st_mode & 0o777 == 0o700
    assert data_folder(tmp_path / "data").stat().st_mode & 0o777 == 0o700


def test_folder_that_somebody_put_there_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(CannotStart, match="not a folder of this user"):
        private_folder(tmp_path / "link")


def test_data_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CannotStart, match="file"):
        data_folder(tmp_path / "file")


def test_private_file_is_never_open_to_others(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_private(tmp_path / "password", "a")
    finally:
        os.umask(before)
    assert (tmp_path / "password").stat().st_mode & 0o777 == 0o600


def test_second_holder_of_a_data_folder_is_told_who_the_first_is(tmp_path: Path) -> None:
    said: list[str] = []
    with (
        locked(tmp_path, said.append),
        pytest.raises(CannotStart, match=f"process {os.getpid()}"),
        locked(tmp_path, said.append),
    ):
        pass
    with locked(tmp_path, said.append):
        assert said == []


def test_start_waits_for_the_processes_of_a_killed_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with locked(tmp_path, said.append) as descriptor:
        code = "import time; time.sleep(1)"
        left = subprocess.Popen([sys.executable, "-c", code], pass_fds=(descriptor,))
    with left:
        began = time.monotonic()
        with locked(tmp_path, said.append):
            assert time.monotonic() - began > 0.3
            assert left.poll() is not None or time.monotonic() - began > 0.9
    assert said == ["waiting for the processes of an earlier run to end"]
    monkeypatch.setattr(folders, "LEFTOVERS_S", 0.2)
    with locked(tmp_path, said.append) as descriptor:
        left = subprocess.Popen(["sleep", "600"], pass_fds=(descriptor,))
    with left:
        with pytest.raises(CannotStart, match="earlier run"), locked(tmp_path, said.append):
            pass
        left.kill()


def test_each_device_gets_a_worker_that_sees_no_other() -> None:
    assert assign("cuda:2, cpu", None, {}) == [Device("cuda:0", "2"), Device("cpu", "")]
    assert assign("cuda", None, {}) == [Device("cuda:0", "0")]


def test_more_workers_than_devices_take_turns() -> None:
    assert [d.visible for d in assign("cuda:0,cuda:1", 3, {})] == ["0", "1", "0"]
    assert assign("cpu", 2, {}) == [Device("cpu", "")] * 2


def test_devices_count_in_the_list_that_is_set_already() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "4,GPU-5f1"}
    assert assign("cuda:1", None, environ) == [Device("cuda:0", "GPU-5f1")]
    with pytest.raises(CannotStart, match="leaves 2 CUDA devices"):
        assign("cuda:2", None, environ)


@pytest.mark.parametrize(
    ("devices", "workers"), [("", None), ("gpu", None), ("cuda:x", None), ("cpu", 0), ("cuda:0,cuda:1", 1)]
)
def test_device_list_that_can_not_be_is_refused(devices: str, workers: int | None) -> None:
    with pytest.raises(CannotStart):
        assign(devices, workers, {})
