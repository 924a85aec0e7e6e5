"""Redis loses everything while the stack runs: nothing is deleted, predicts go on, and rebuild brings it back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from common.catalogue import Catalogue
from common.service.rebuild import Rebuild
from common.settings import Settings
from tabrelay.up.embedded import Stack
from tabrelay.up.redis_server import running_url
from tests.support import Service, check_problem, numeric, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.slow]

StartStack = Callable[..., Stack]

EAGER = {"TABRELAY_SWEEP_EVERY_S": "1"}
CLI = "import sys, tabrelay.cli; sys.exit(tabrelay.cli.main())"
QUICK = '{"n_estimators": 2}'


def files(data: Path) -> set[str]:
    """Every context and table."""
    return {
        str(path.relative_to(data))
        for pattern in ("contexts/*/*.safetensors", "tables/*/*.parquet")
        for path in data.glob(pattern)
    }


def rebuild(data: Path) -> dict[str, Any]:
    """What the command says."""
    command = [sys.executable, "-c", CLI, "catalogue", "rebuild", "--data-dir", str(data), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_emptied_redis_empties_no_disk_and_rebuild_brings_every_version_and_pin_back(
    private_stack: StartStack,
) -> None:
    stack = private_stack(environ=EAGER)
    data = stack.data_dir
    url = running_url(Settings(data_dir=data))
    assert url is not None
    rows = numeric().drop_columns(["y"]).slice(0, 5)
    with Service(stack.url) as service, redis.from_url(url) as client:
        service.fit(numeric(seed=1), "one", options=QUICK)
        service.fit(numeric(seed=2), "two", options=QUICK)
        service.fit(numeric(seed=3), "two", options=QUICK)
        service.fit(numeric(seed=4), "pinned", options=QUICK)
        service.http.put("/v1/datasets/pinned/pin").raise_for_status()
        asked: list[tuple[str, dict[str, Any]]] = [("one", {}), ("two", {}), ("pinned", {})]
        asked += [("two", {"version": 1}), ("two", {"version": 2})]

        def answers() -> list[Any]:
            keys = ("version", "context", "probabilities")
            said = [service.predict(name, rows, **query) for name, query in asked]
            return [[answer[key] for key in keys] for answer in said]

        before, held = answers(), files(data)
        for name in held:  # old enough for the janitor: only the epoch keeps it from the disk
            os.utime(data / name, (time.time() - 7200,) * 2)
        wait_until(
            lambda: all(not d["pending_jobs"] for d in service.http.get("/v1/datasets").json()["datasets"]),
            "quiet",
        )
        settings = Settings(data_dir=data, redis_url=url)
        healthy = Rebuild(Catalogue.connect(settings), settings)
        assert healthy.run().changed is False

        client.flushall()
        assert answers() == before
        check_problem(service.submit(numeric(seed=5), "new"), 503, "catalogue_emptied")
        check_problem(service.http.get("/v1/datasets/one"), 503, "catalogue_emptied")
        missing = service.http.get("/readyz").json()["missing"]
        assert "tabrelay catalogue rebuild" in missing["epoch"]
        wait_until(lambda: client.exists("tabrelay:sweep"), "a sweep")
        wait_until(lambda: not client.exists("tabrelay:sweep"), "its end")
        assert answers() == before
        assert files(data) == held

        report = rebuild(data)
        assert (report["datasets"], report["versions"], report["pins"]) == (3, 4, 1), report
        assert report["not_restored"] == []
        wait_until(lambda: service.http.get("/readyz").status_code == 200, "readiness")
        assert answers() == before
        assert files(data) == held
        shown = {d["name"]: d for d in service.http.get("/v1/datasets").json()["datasets"]}
        assert {name: d["pinned"] for name, d in shown.items()} == {
            "one": False,
            "two": False,
            "pinned": True,
        }
        assert service.fit(numeric(seed=5), "two", options=QUICK)["version"] == 3
        assert service.predict("two", rows)["version"] == 3
        assert healthy.run().changed is False
