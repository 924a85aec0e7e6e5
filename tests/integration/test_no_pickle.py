"""A predict worker unpickles nothing between its start and its answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tabrelay.up.embedded import Stack
from tests.support import Service, mixed

pytestmark = pytest.mark.integration

HOOK = """
import os, sys
if "predict_workers" in " ".join(sys.orig_argv):
    events = os.open({path!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(events, b"watching\\n")
    def look(event, arguments):
        if event == "pickle.find_class":
            os.write(events, f"{{event}} {{arguments[0]}}.{{arguments[1]}}\\n".encode())
    sys.addaudithook(look)
"""


def test_predict_worker_unpickles_nothing(private_stack: Callable[..., Stack], tmp_path: Path) -> None:
    events = tmp_path / "events"
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HOOK.format(path=str(events)))
    stack = private_stack(environ={"PYTHONPATH": str(folder)})
    with Service(stack.url) as service:
        table = mixed()
        service.fit(table.drop_columns(["z"]), "watched")
        service.fit(table.drop_columns(["y"]), "watched-reg", "z")
        rows = table.drop_columns(["y", "z"]).slice(0, 6)
        assert len(service.predict("watched", rows)["predictions"]) == 6
        assert len(service.predict("watched-reg", rows, quantiles="0.1,0.9")["quantiles"]) == 6
    assert events.read_text().splitlines() == ["watching"]
