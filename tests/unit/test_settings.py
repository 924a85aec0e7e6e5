"""Settings: known names only, and a page that is generated from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from common.settings import Settings, UnknownSetting, reference
from predict_workers.batcher import LEAST_ROWS

ROOT = Path(__file__).resolve().parents[2]


def test_an_unknown_name_refuses_to_start() -> None:
    with pytest.raises(UnknownSetting, match="TABRELAY_LEASE_SECONDS"):
        Settings.load({"TABRELAY_LEASE_SECONDS": "3", "TABRELAY_URL": "http://here"})


def test_a_known_name_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TABRELAY_LEASE_S", "3")
    monkeypatch.setenv("TABRELAY_MODEL_PATHS", '{"tabicl-v2": "/w"}')
    assert (Settings.load().lease_s, Settings.load().model_paths) == (3.0, {"tabicl-v2": "/w"})


def test_settings_are_frozen_and_checked() -> None:
    with pytest.raises(ValidationError):
        Settings(lease_s=-1)
    with pytest.raises(ValidationError):
        Settings().lease_s = 4  # type: ignore[misc]  # that it is refused is the test


def test_a_forward_has_room_for_two_pieces_that_keep_the_last_bit() -> None:
    """With less room, a request of LEAST_ROWS or more would be cut into forwards of fewer rows."""
    with pytest.raises(ValidationError):
        Settings(rows_per_forward=2 * LEAST_ROWS - 2)
    assert Settings(rows_per_forward=2 * LEAST_ROWS).rows_per_forward == 2 * LEAST_ROWS


def test_the_configuration_page_is_generated_from_the_settings() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == reference() + "\n"


def test_a_long_data_folder_keeps_its_sockets_short(tmp_path: Path) -> None:
    deep = Settings(data_dir=tmp_path / ("x" * 120))
    assert len(str(deep.run / "predict-0.sock")) < 107
    assert deep.run != Settings(data_dir=tmp_path / ("y" * 120)).run
