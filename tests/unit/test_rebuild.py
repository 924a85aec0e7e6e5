"""Rebuild: what comes back, what does not and why, and that a healthy catalogue stays as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.catalogue.replay import replay
from common.files import bury
from common.names import new_id
from common.service.datasets import DatasetService
from common.service.rebuild import Rebuild, Rebuilt
from tabrelay.cli.app import run
from tests.unit.stored import QUEUE, Stored


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path)


def rebuild(stored: Stored) -> Rebuilt:
    return Rebuild(stored.catalogue, stored.settings).run()


def reasons(report: Rebuilt) -> list[tuple[str, int, str]]:
    return [(entry.dataset, entry.version, entry.reason) for entry in report.not_restored]


def test_everything_published_comes_back_as_it_was(stored: Stored) -> None:
    for content in "abc":
        stored.publish("three", content)
    stored.publish("other", "x", tenant="another")
    stored.publish("pinned", "p")
    stored.pin("pinned")
    for content in "qr":
        stored.publish("pinned", content)
    stored.publish("was-pinned", "w")
    stored.pin("was-pinned")
    stored.pin("was-pinned", False)
    stored.publish("temporary", "t", ttl_s=3600)
    assert bury(stored.folder, stored.catalogue, "default") == 2  # the first of three
    before = {
        tenant: stored.catalogue.datasets.names(tenant, after=None, limit=9)
        for tenant in ("default", "another")
    }
    shown = {(t, n): stored.catalogue.datasets.get(t, n) for t, names in before.items() for n in names}
    refs = {key: stored.client.smembers(key) for key in stored.client.keys("tabrelay:refs:*")}
    keys = stored.client.hgetall("tabrelay:keys:default")
    stored.client.flushall()

    report = rebuild(stored)

    assert (report.datasets, report.versions, report.pins) == (5, 8, 1)
    assert (report.epoch, report.not_restored) == (True, [])
    for (tenant, name), dataset in shown.items():
        again = stored.catalogue.datasets.get(tenant, name)
        assert (again.versions, again.current) == (dataset.versions, dataset.current)
        assert (again.pinned, again.expires_ms) == (dataset.pinned, dataset.expires_ms)
        number = stored.client.hget(f"tabrelay:dataset:{tenant}:{name}", "next")
        assert int(number) == dataset.current
    assert {key: stored.client.smembers(key) for key in stored.client.keys("tabrelay:refs:*")} == refs
    assert stored.client.hgetall("tabrelay:keys:default") == keys
    assert before["default"] == stored.catalogue.datasets.names("default", after=None, limit=9)
    assert stored.catalogue.datasets.changed_since(0)[1]
    assert stored.catalogue.epoch.matches()
    assert stored.client.zrange("tabrelay:expiring", 0, -1) == ["default/temporary"]


def test_a_healthy_catalogue_is_not_changed(stored: Stored) -> None:
    for content in "abc":
        stored.publish("d", content)
    stored.publish("e", "e", record="aborted")
    stored.publish("p", "p")
    stored.pin("p")
    before = stored.state()
    report = rebuild(stored)
    assert not report.changed
    assert (report.known_datasets, report.known_versions) == (2, 3)
    assert stored.state() == before


def test_twice_is_as_once(stored: Stored) -> None:
    for content in "abc":
        stored.publish("d", content)
    stored.client.flushall()
    assert rebuild(stored).versions == 2
    once = stored.state()
    assert not rebuild(stored).changed
    assert stored.state() == once


def test_what_can_not_come_back_is_told_with_its_reason_and_no_file_is_deleted(stored: Stored) -> None:
    missing, damaged = stored.publish("missing", "m"), stored.publish("damaged", "d")
    stored.publish("deleted", "x")
    stored.publish("aborted", "y", record="aborted")
    unrecorded = stored.context("nobody recorded this")
    stored.path(missing).unlink()
    stored.path(damaged).write_text("changed")
    stored.records.delete("default", "deleted")
    held = stored.files()
    stored.client.flushall()
    report = rebuild(stored)
    assert (report.datasets, report.versions) == (0, 0)
    assert sorted(reasons(report)) == [
        ("", 0, "aborted"),
        ("", 0, "no record"),
        ("", 0, "tombstoned"),
        ("damaged", 1, "damaged"),
        ("missing", 1, "file missing"),
    ]
    assert [e.context for e in report.not_restored if e.reason == "no record"] == [unrecorded]
    assert stored.files() == held
    assert stored.client.keys("tabrelay:dataset*") == []


def test_the_highest_version_that_is_whole_becomes_current_and_its_number_is_not_used_again(
    stored: Stored,
) -> None:
    first, second = stored.publish("d", "a"), stored.publish("d", "b")
    stored.path(second).unlink()
    stored.client.flushall()
    rebuild(stored)
    dataset = stored.catalogue.datasets.get("default", "d")
    assert (dataset.current, dict(dataset.versions)) == (1, {1: first})
    assert stored.publish("d", "c").version == 3


def test_a_context_in_the_host_tier_alone_is_enough(stored: Stored) -> None:
    version = stored.publish("d", "a")
    disk, host = stored.folder.tiers("default", "context", version.context)
    host.parent.mkdir(parents=True)
    disk.rename(host)
    stored.client.flushall()
    assert rebuild(stored).versions == 1


@pytest.mark.parametrize("damaged", [False, True])
def test_an_intent_without_an_end_counts_when_its_file_is_whole(stored: Stored, damaged: bool) -> None:
    version = stored.publish("d", "a", record="intent")
    if damaged:
        stored.path(version).write_text("torn")
    stored.client.flushall()
    assert rebuild(stored).versions == (0 if damaged else 1)


def test_an_intent_of_a_job_that_is_still_known_is_left_to_that_job(stored: Stored) -> None:
    stored.submit("d", stored.table("t"))
    claim = stored.catalogue.jobs.claim(QUEUE, "w", 1, new_id())
    assert claim is not None
    other = stored.publish("other", "a")
    version = type(other)(**{**json.loads(other.encode()), "job": claim.job.id})
    stored.records.intend("default", "d", version)
    assert not rebuild(stored).changed
    assert stored.client.hget("tabrelay:dataset:default:d", "current") is None


def test_a_version_that_was_given_up_or_replaced_does_not_come_back(stored: Stored) -> None:
    for content in "abc":
        stored.publish("d", content)
    version = stored.catalogue.datasets.get("default", "d").versions[2]
    stored.records.end("default", "d", 2)
    stored.catalogue.datasets.drop("default", "d", version)
    stored.client.flushall()
    rebuild(stored)
    assert sorted(stored.catalogue.datasets.get("default", "d").versions) == [3]


def test_a_dataset_deleted_and_made_again_comes_back_with_what_was_published_since(stored: Stored) -> None:
    service = DatasetService(stored.catalogue, stored.settings)
    stored.publish("d", "old")
    stored.pin("d")
    service.delete("default", "d")
    again = stored.publish("d", "new")
    stored.client.flushall()
    rebuild(stored)
    dataset = stored.catalogue.datasets.get("default", "d")
    assert (dict(dataset.versions), dataset.pinned) == ({1: again}, False)


def test_the_catalogue_s_newer_state_wins(stored: Stored) -> None:
    stored.publish("d", "a")
    stored.pin("d")
    stored.catalogue.datasets.pin("default", "d", False)
    stored.client.hset("tabrelay:dataset:default:d", mapping={"next": 9, "current": 8})
    stored.client.hdel("tabrelay:versions:default:d", "1")
    report = rebuild(stored)
    entry = stored.client.hgetall("tabrelay:dataset:default:d")
    assert report.versions == 1
    assert (entry["next"], entry["current"], entry["pinned"]) == ("9", "8", "0")


def test_a_job_that_an_emptied_catalogue_took_does_not_overwrite_a_restored_version(stored: Stored) -> None:
    stored.publish("d", "a")
    stored.client.flushall()
    waiting = stored.submit("d", stored.table("t"))
    assert waiting.version == 1
    rebuild(stored)
    assert stored.catalogue.jobs.get("default", waiting.id).version == 2
    assert stored.catalogue.datasets.get("default", "d").current == 1


def test_torn_and_senseless_lines_are_passed_over(stored: Stored) -> None:
    stored.publish("a", "a")
    with stored.records.path.open("ab") as file:
        file.write(b'{"op":"publish","tenant":"default","dataset":"to')
    stored.publish("b", "b")
    with stored.records.path.open("ab") as file:
        file.write(
            b'{"op":"publish","tenant":"../x","dataset":"d","version":{}}\n{"op":"other","tenant":"a","dataset":"b"}\n'
        )
        file.write(
            b'[1]\n{"op":"publish","tenant":"default","dataset":"d","version":{"new_field":1}}\n{"op":"publ'
        )
    stored.client.flushall()
    report = rebuild(stored)
    assert (report.datasets, report.unreadable_lines) == (2, 3)


def test_the_record_file_says_which_files_a_published_version_needs(stored: Stored) -> None:
    kept = stored.publish("d", "a")
    stored.publish("e", "b", record="aborted")
    assert replay(stored.records.read(), 2).files() == {
        ("default", "context", kept.context),
        ("default", "table", kept.table),
    }


def test_the_command_says_what_it_did_and_why_it_could_not_run(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def connected(url: str) -> Any:
        assert url == "redis://somewhere"
        return stored.client

    monkeypatch.setattr("common.catalogue.connection.connect", connected)
    monkeypatch.setenv("TABRELAY_HOST_DIR", str(stored.settings.host))
    lost = stored.publish("lost", "b")
    stored.publish("d", "a")
    stored.path(lost).unlink()
    command = [
        "catalogue",
        "rebuild",
        "--data-dir",
        str(stored.settings.data),
        "--redis-url",
        "redis://somewhere",
    ]
    stored.client.flushall()
    assert run(command) == 0
    said = capsys.readouterr().out
    assert "versions restored" in said
    assert "file missing" in said
    assert run([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["changed"], told["known_versions"]) == (False, 1)
    assert told["not_restored"][0]["dataset"] == "lost"
    assert run(command) == 0
    assert "nothing to restore: the catalogue holds 1 datasets" in capsys.readouterr().out
    assert run(["catalogue", "rebuild", "--data-dir", str(tmp_path / "nowhere")]) == 1
    assert "there is no data folder" in capsys.readouterr().err
    (stored.settings.data / "redis").mkdir()
    assert run(["catalogue", "rebuild", "--data-dir", str(stored.settings.data)]) == 1
    assert "start it with `tabrelay up`" in capsys.readouterr().err
