"""The disk budget: what is given up for a new context, in which order, and when it is refused."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from common.catalogue import Version
from common.contexts.store import ContextStore
from common.errors import StorageFull
from common.retention import Retention
from common.service.rebuild import Rebuild
from tests.unit.stored import Stored

BUDGET = 3000
CONTENT = 500


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path, disk_budget_bytes=BUDGET, versions_kept=9)


def retention(stored: Stored) -> Retention:
    return Retention(stored.catalogue, stored.folder, stored.records, stored.settings)


def make_room(stored: Stored, nbytes: int) -> None:
    with retention(stored).room_for("default", "f" * 64, nbytes):
        pass


def filled(stored: Stored, dataset: str, *letters: str, used_s_ago: float = 0.0) -> list[Version]:
    """Versions of CONTENT bytes each; their tables are cut to nothing."""
    made = []
    for letter in letters:
        version = stored.publish(dataset, letter * CONTENT)
        stored.folder.table("default", version.table).write_text("")
        now = time.time()
        os.utime(stored.path(version), (now - used_s_ago, now))
        made.append(version)
    return made


def versions(stored: Stored, dataset: str) -> list[int]:
    return sorted(stored.catalogue.datasets.get("default", dataset).versions)


def test_within_the_budget_nothing_is_given_up(stored: Stored) -> None:
    filled(stored, "d", "a", "b", "c")
    make_room(stored, BUDGET - 3 * CONTENT)
    assert versions(stored, "d") == [1, 2, 3]


def test_without_a_budget_everything_fits(tmp_path: Path) -> None:
    stored = Stored(tmp_path)
    filled(stored, "d", "a", "b")
    make_room(stored, 10**15)
    assert versions(stored, "d") == [1, 2]


def test_the_version_used_longest_ago_is_given_up_first(stored: Stored) -> None:
    filled(stored, "recent", "a", "b", used_s_ago=10)
    filled(stored, "stale", "c", "d", used_s_ago=1000)
    make_room(stored, BUDGET - 3 * CONTENT)
    assert (versions(stored, "recent"), versions(stored, "stale")) == ([1, 2], [2])
    assert retention(stored).used() == 3 * CONTENT
    make_room(stored, BUDGET - 2 * CONTENT)
    assert versions(stored, "recent") == [2]


def test_current_and_pinned_versions_are_never_given_up(stored: Stored) -> None:
    filled(stored, "pinned", "a", "b", used_s_ago=5000)
    stored.pin("pinned")
    filled(stored, "current", "c", used_s_ago=5000)
    filled(stored, "d", "e", "f")
    make_room(stored, BUDGET - 4 * CONTENT)
    assert (versions(stored, "pinned"), versions(stored, "current"), versions(stored, "d")) == (
        [1, 2],
        [1],
        [2],
    )


def test_what_does_not_fit_is_refused_with_its_figures_and_nothing_is_given_up(stored: Stored) -> None:
    filled(stored, "d", "a", "b", "c")
    held = stored.files()
    with pytest.raises(StorageFull) as refused:
        make_room(stored, BUDGET - CONTENT + 1)
    assert refused.value.status == 507
    assert refused.value.facts == {"limit": BUDGET, "size": BUDGET - CONTENT + 1, "used": 3 * CONTENT}
    assert stored.files() == held
    assert versions(stored, "d") == [1, 2, 3]


def test_a_version_whose_file_another_one_needs_is_not_given_up_for_nothing(stored: Stored) -> None:
    filled(stored, "one", "a", "b", used_s_ago=1000)
    filled(stored, "two", "a", "c", used_s_ago=10)
    with pytest.raises(StorageFull):
        make_room(stored, BUDGET - CONTENT)
    assert (versions(stored, "one"), versions(stored, "two")) == ([1, 2], [1, 2])


def test_files_that_are_dying_go_before_any_version(stored: Stored) -> None:
    filled(stored, "deleted", "a", "b")
    filled(stored, "d", "c", "d")
    stored.catalogue.datasets.delete("default", "deleted")
    make_room(stored, BUDGET - 2 * CONTENT)
    assert versions(stored, "d") == [1, 2]


def test_a_context_that_replaces_its_equal_needs_no_room(stored: Stored) -> None:
    (version,) = filled(stored, "d", "a")
    with retention(stored).room_for("default", version.context, BUDGET * 2):
        pass


def test_two_publishes_never_count_the_same_free_bytes(stored: Stored) -> None:
    waiting = threading.Thread(target=make_room, args=(stored, 1), daemon=True)
    with retention(stored).room_for("default", "e" * 64, 1):
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
    waiting.join(5)
    assert not waiting.is_alive()


def test_a_version_that_was_given_up_stays_given_up_after_a_rebuild(stored: Stored) -> None:
    filled(stored, "d", "a", "b")
    make_room(stored, BUDGET - CONTENT)
    stored.client.flushall()
    Rebuild(stored.catalogue, stored.settings).run()
    assert versions(stored, "d") == [2]


def test_use_is_noted_without_changing_the_file_s_age(stored: Stored) -> None:
    (version,) = filled(stored, "d", "a", used_s_ago=1000)
    before = stored.path(version).stat()
    ContextStore(stored.settings).touch("default", version.context)
    after = stored.path(version).stat()
    assert after.st_atime_ns > before.st_atime_ns
    assert after.st_mtime_ns == before.st_mtime_ns
    ContextStore(stored.settings).touch("default", "0" * 64)
