"""Each model's own stack, for every test of the parity suite."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tabrelay.up.embedded import Stack
from tabrelay.up.stack import StackOptions
from tests.models import fitting
from tests.parity.models import MODELS, Model
from tests.support import Service


@pytest.fixture(scope="session", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model with its checkpoints."""
    chosen = MODELS[request.param]
    if chosen.checkpoints is not None:
        return chosen
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    version = chosen.name.removeprefix("tabpfn-")
    return replace(
        chosen, checkpoints={task: fitting.weights(folder, version, task).path for task in fitting.TASKS}
    )


@pytest.fixture(scope="session")
def service(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The API of a stack that serves it."""
    assert model.checkpoints is not None
    given = {f"{model.name}:{task}": str(path) for task, path in model.checkpoints.items()}
    options = StackOptions(
        port=0, data_dir=tmp_path_factory.mktemp("parity") / "data", models=(model.name,), threads=1
    )
    environ = {"TABRELAY_MODEL_PATHS": json.dumps(given)}
    with Stack(options, quiet=True, environ=environ) as stack, Service(stack.url) as shared:
        yield shared
