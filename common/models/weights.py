"""Weights before a stack starts: find them, check them, fetch them. `python -m common.models.weights resolve [MODEL ...]`

A child process of `tabrelay up`, because looking into a checkpoint loads torch. Each MODEL is `NAME`, `NAME=PATH` or
`NAME:TASK=PATH`, PATH a file or a folder. Progress goes to stderr; the last line of stdout is JSON:
`{"default_model", "model_paths", "notes"}`, or `{"error"}` (TabrelayError.encode) with exit status 1.

Downloads use the call that tabicl's own loader makes (tabicl/_sklearn/classifier.py, `_load_model`): same repository, same
file names, resumed where they broke off.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from common.errors import FieldError, InvalidRequest, LicenceNotAccepted, ModelNotReady, TabrelayError
from common.models.protocol import AUTO, ModelSpec
from common.models.registry import FALLBACK, PREFERRED, Registry, load_adapter, split_key, task_of_word
from common.settings import Settings

#: Seconds until a hub that does not answer counts as out of reach.
REACH_S = 3.0
DEFAULT_HUB = "https://huggingface.co"


def hub() -> str:
    """Where weights are downloaded from; `HF_ENDPOINT` names a mirror."""
    return os.environ.get("HF_ENDPOINT") or DEFAULT_HUB


def reachable(endpoint: str) -> bool:
    """Whether something listens there, so that an offline machine is told at once and not after many retries."""
    parts = urlsplit(endpoint)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname or "", port), timeout=REACH_S):
            return True
    except OSError:
        return False


def download(registry: Registry, spec: ModelSpec) -> None:
    """Fetch the model's missing files into its folder.

    Raises ModelNotReady that says why it can't be done or, where a licence must be accepted first, how to get the file;
    LicenceNotAccepted.
    """
    registry.require_licence(spec)
    missing = [task for task in spec.files if not registry.ready(spec.name, task)]
    if not missing or spec.bundled:
        return
    if spec.gated:
        registry.weights(spec.name, missing[0])
    if not reachable(hub()):
        raise ModelNotReady(
            f"the weights of {spec.name} are not here and {hub()} can't be reached", model=spec.name
        )
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    folder = registry.folder(spec)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for task in missing:
        name, repository = spec.files[task], spec.hub[task]
        say(f"downloading {name} from {repository} into {folder}")
        try:
            hf_hub_download(repository, name, revision=spec.hub_revision, local_dir=folder)
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise ModelNotReady(
                f"{name} could not be downloaded from {hub()}: {error}", model=spec.name
            ) from error


def inspect(spec: ModelSpec, path: Path, expected: str | None) -> tuple[str, ...]:
    """The tasks of a weights file, or the expected one; raises InvalidRequest when it is of another model or task."""
    tasks = load_adapter(spec).inspect(path, spec.name)
    if expected is None:
        return tasks
    if expected not in tasks:
        kinds = {"classification": "a classifier", "regression": "a regressor"}
        message = f"{path} is {kinds[tasks[0]]}, but {kinds[expected]} of {spec.name} is wanted there"
        raise InvalidRequest(message, errors=[FieldError("model", message)])
    return (expected,)


def resolve(models: Sequence[str], settings: Settings) -> dict[str, Any]:
    """Paths, default model and notes for the stack; downloads what a named model lacks.

    A named model that can't be had is a note as long as another named one can. Raises ModelNotFound, ModelNotReady,
    LicenceNotAccepted, InvalidRequest.
    """
    paths: dict[str, str] = dict(settings.model_paths)
    named: list[str] = []
    registry = Registry(settings)
    for given in models:
        key, _, path = given.partition("=")
        name, told = split_key(key)
        spec = registry.spec(name)
        named.append(name)
        if path:
            paths |= _checked(spec, told, Path(path).expanduser().absolute())
    registry = Registry(settings.model_copy(update={"model_paths": paths}))
    notes: list[str] = []
    default, absent = _default(registry, named, settings.default_model, notes)
    for name in absent:
        # Where its files are looked for: `/readyz` says what is missing there, until it no longer is.
        folder = registry.folder(registry.spec(name))
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        paths.setdefault(name, str(folder))
    return {"default_model": default, "model_paths": paths, "notes": notes}


def _checked(spec: ModelSpec, told: str | None, path: Path) -> dict[str, str]:
    """`model_paths` entries of one given path, each file looked into."""
    if not path.exists():
        message = f"{path} is not there"
        raise InvalidRequest(message, errors=[FieldError("model", message)])
    if path.is_dir():
        found = {task: path / name for task, name in spec.files.items() if (path / name).is_file()}
        if told is not None:
            found = {task: file for task, file in found.items() if task == told}
        if not found:
            wanted = ", ".join(spec.files.values())
            message = f"{path} holds no weights of {spec.name}; wanted are {wanted}"
            raise InvalidRequest(message, errors=[FieldError("model", message)])
        for task, file in found.items():
            inspect(spec, file, task)
        return {f"{spec.name}:{task}": str(file) for task, file in found.items()}
    tasks = inspect(spec, path, told or task_of_word(path.name))
    return {f"{spec.name}:{task}": str(path) for task in tasks}


def _default(
    registry: Registry, named: Sequence[str], setting: str, notes: list[str]
) -> tuple[str, list[str]]:
    """The default model, its weights in place, and the named models that can't be had.

    The default is the first one named that can be had, the setting's, or the best that can.
    """
    wanted = list(dict.fromkeys(named)) or ([] if setting == AUTO else [setting])
    absent: dict[str, ModelNotReady | LicenceNotAccepted] = {}
    for name in wanted:
        spec = registry.spec(name)
        if not any(registry.ready(name, task) for task in spec.files):
            try:
                download(registry, spec)
            except (ModelNotReady, LicenceNotAccepted) as error:
                absent[name] = error
    if wanted:
        there = [name for name in wanted if name not in absent]
        if not there:
            raise absent[wanted[0]]
        notes += [
            f"{error.detail}; until then {name} is not served, the default model is {there[0]}"
            for name, error in absent.items()
        ]
        return there[0], list(absent)
    try:
        download(registry, registry.spec(PREFERRED))
        return PREFERRED, []
    except ModelNotReady as error:
        notes.append(
            f"{error.detail}; {FALLBACK}, small and in this installation, is the default model instead"
        )
        return FALLBACK, []


def say(line: str) -> None:
    """Progress for whoever watches."""
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    if not arguments or arguments[0] != "resolve":
        say("usage: python -m common.models.weights resolve [NAME | NAME=PATH | NAME:TASK=PATH ...]")
        return 2
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is progress, not the answer
    answer: Mapping[str, Any]
    try:
        answer, status = resolve(arguments[1:], Settings.load()), 0
    except TabrelayError as error:
        answer, status = {"error": error.encode()}, 1
    with contextlib.closing(answers):
        answers.write(orjson.dumps(answer) + b"\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
