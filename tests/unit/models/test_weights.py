"""Weights before a stack starts: checked in words, downloaded from a stand-in of the hub, resumed where they broke off."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from common.errors import InvalidRequest, LicenceNotAccepted, ModelNotFound, ModelNotReady
from common.models import weights
from common.models.registry import CHECKPOINTS, Registry
from common.settings import Settings

MINI = CHECKPOINTS / "tabicl-mini-classifier.ckpt"
REGRESSOR = CHECKPOINTS / "tabicl-mini-regressor.ckpt"
NAMES = ("tabicl-classifier-v2-20260212.ckpt", "tabicl-regressor-v2-20260212.ckpt")


class Hub(ThreadingHTTPServer):
    """Answers `/jingang/TabICL/resolve/main/<file>` as the hub does; may break off once."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = {NAMES[0]: MINI.read_bytes(), NAMES[1]: REGRESSOR.read_bytes()}
        self.break_after: int | None = None
        self.ranges: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def _head(self) -> bytes | None:
        content = self.server.files.get(self.path.rsplit("/", 1)[-1].split("?")[0])
        if content is None or not self.path.startswith("/jingang/TabICL/resolve/main/"):
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        begin = 0
        asked = self.headers.get("Range", "")
        if asked.startswith("bytes=") and self.command == "GET":
            self.server.ranges.append(asked)
            begin = int(asked.removeprefix("bytes=").split("-")[0] or 0)
        self.send_response(206 if begin else 200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("Accept-Ranges", "bytes")
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - begin))
        self.end_headers()
        return content[begin:]

    def do_HEAD(self) -> None:
        self._head()

    def do_GET(self) -> None:
        content = self._head()
        if content is None:
            return
        if self.server.break_after is not None:
            self.wfile.write(content[: self.server.break_after])
            self.wfile.flush()
            self.server.break_after = None
            self.close_connection = True
            return
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{running.server_address[1]}"
        monkeypatch.setenv("HF_ENDPOINT", url)
        from huggingface_hub import constants, file_download

        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(
            file_download, "HUGGINGFACE_CO_URL_TEMPLATE", constants.HUGGINGFACE_CO_URL_TEMPLATE, raising=False
        )
        yield running
        running.shutdown()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path)


@pytest.mark.filterwarnings("default")
def test_missing_weights_are_downloaded_and_become_the_default(hub: Hub, settings: Settings) -> None:
    resolved = weights.resolve([], settings)
    assert (resolved["default_model"], resolved["notes"]) == ("tabicl-v2", [])
    registry = Registry(settings)
    assert registry.weights("tabicl-v2", "classification").path.read_bytes() == MINI.read_bytes()
    assert registry.default_model() == "tabicl-v2"


@pytest.mark.filterwarnings("default")
def test_a_download_that_broke_off_goes_on_where_it_was(hub: Hub, settings: Settings) -> None:
    hub.files[NAMES[0]] = MINI.read_bytes() * 10  # the hub's client keeps pieces of 10 MB
    hub.break_after = 20_000_000
    assert weights.resolve([], settings)["default_model"] == "tabicl-v2"
    got = Registry(settings).weights("tabicl-v2", "classification").path.read_bytes()
    assert got == hub.files[NAMES[0]]
    begins = [int(asked.removeprefix("bytes=").split("-")[0]) for asked in hub.ranges]
    assert any(begin > 0 for begin in begins), hub.ranges


@pytest.mark.filterwarnings("default")
def test_a_named_model_that_the_hub_lacks_is_refused_in_words(hub: Hub, settings: Settings) -> None:
    hub.files.clear()
    with pytest.raises(ModelNotReady, match=r"could not be downloaded"):
        weights.resolve(["tabicl-v2"], settings)
    assert weights.resolve([], settings)["default_model"] == "tabicl-mini"


def test_an_unreachable_hub_is_told_at_once(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    began = time.monotonic()
    resolved = weights.resolve([], settings)
    assert time.monotonic() - began < 4
    assert resolved["default_model"] == "tabicl-mini"
    assert "can't be reached" in resolved["notes"][0]
    with pytest.raises(ModelNotReady, match="can't be reached"):
        weights.resolve(["tabicl-v2"], settings)


def test_a_named_model_that_can_not_be_had_is_a_note_beside_one_that_can(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    resolved = weights.resolve(["tabpfn-v2", "tabicl-mini", "tabpfn-v3"], settings)
    assert resolved["default_model"] == "tabicl-mini"
    assert resolved["notes"][0].split(";")[0].endswith("can't be reached")
    assert "TABRELAY_ACCEPT_LICENSE=tabpfn-v3" in resolved["notes"][1]
    assert set(resolved["model_paths"]) == {"tabpfn-v2", "tabpfn-v3"}
    started = Registry(settings.model_copy(update=resolved | {"default_model": "tabicl-mini"}))
    assert set(started.unready()) == {"tabpfn-v2", "tabpfn-v3"}
    with pytest.raises(LicenceNotAccepted):
        weights.resolve(["tabpfn-v3"], settings)


def test_given_files_are_looked_into(settings: Settings, tmp_path: Path) -> None:
    given = weights.resolve([f"tabicl-v2={MINI}"], settings)
    assert given["default_model"] == "tabicl-v2"
    assert given["model_paths"] == {"tabicl-v2:classification": str(MINI)}
    folder = weights.resolve([f"tabicl-mini={CHECKPOINTS}"], settings)
    assert set(folder["model_paths"]) == {"tabicl-mini:classification", "tabicl-mini:regression"}
    with pytest.raises(InvalidRequest, match=r"is a regressor, but a classifier"):
        weights.resolve([f"tabicl-v2:classification={REGRESSOR}"], settings)
    misnamed = tmp_path / "my-classifier.ckpt"
    misnamed.write_bytes(REGRESSOR.read_bytes())
    with pytest.raises(InvalidRequest, match=r"is a regressor, but a classifier"):
        weights.resolve([f"tabicl-v2={misnamed}"], settings)
    with pytest.raises(InvalidRequest, match="is not there"):
        weights.resolve(["tabicl-v2=/nowhere"], settings)
    with pytest.raises(InvalidRequest, match="holds no weights"):
        weights.resolve([f"tabicl-v2={CHECKPOINTS}"], settings)
    with pytest.raises(InvalidRequest, match="checkpoint"):
        weights.resolve([f"tabicl-v2:regression={__file__}"], settings)
    with pytest.raises(ModelNotFound):
        weights.resolve(["gpt"], settings)
