"""Which models there are, where their weights lie, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import (
    InvalidRequest,
    InvalidTarget,
    LicenceNotAccepted,
    ModelNotFound,
    ModelNotReady,
    TooLarge,
)
from common.models.registry import CHECKPOINTS, Registry, check_table, validate_options
from common.settings import Settings
from common.tables.target import Target

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(Settings(data_dir=tmp_path))


def test_the_mini_model_is_ready_and_the_default_without_downloads(registry: Registry) -> None:
    assert registry.default_model() == "tabicl-mini"
    shown = {model["name"]: model for model in registry.describe()}
    assert shown["tabicl-mini"]["ready"] == {"classification": True, "regression": True}
    assert len(shown["tabicl-mini"]["weights"]["classification"]) == 64
    assert shown["tabicl-v2"]["ready"] == {"classification": False, "regression": False}
    assert "--model" in shown["tabicl-v2"]["reasons"]["classification"]
    assert shown["tabicl-mini"]["licence"]


def test_unknown_models_and_missing_weights_say_what_there_is(registry: Registry) -> None:
    with pytest.raises(ModelNotFound, match="tabicl-mini"):
        registry.spec("gpt")
    with pytest.raises(ModelNotReady, match=r"tabicl-classifier-v2.*missing"):
        registry.weights("tabicl-v2", "classification")


def test_given_paths_are_used(tmp_path: Path) -> None:
    file = CHECKPOINTS / "tabicl-mini-classifier.ckpt"
    given = Registry(Settings(data_dir=tmp_path, model_paths={"tabicl-v2": str(file)}))
    assert given.weights("tabicl-v2", "classification").path == file
    assert given.default_model() == "tabicl-v2"
    told = Registry(Settings(data_dir=tmp_path, model_paths={"tabicl-v2:regression": str(file)}))
    assert told.path("tabicl-v2", "regression") == file


def test_a_changed_file_gets_another_digest(tmp_path: Path) -> None:
    copy = tmp_path / "classifier.ckpt"
    copy.write_bytes((CHECKPOINTS / "tabicl-mini-classifier.ckpt").read_bytes())
    registry = Registry(Settings(data_dir=tmp_path, model_paths={"tabicl-mini": str(copy)}))
    before = registry.weights("tabicl-mini", "classification").digest
    with copy.open("ab") as file:
        file.write(b"x")
    assert registry.weights("tabicl-mini", "classification").digest != before


def test_options_are_filled_in_and_checked(registry: Registry) -> None:
    spec = registry.spec("tabicl-mini")
    defaults = {"n_estimators": 8, "seed": 42, "precision": "auto", "cache": "auto"}
    assert validate_options(spec, {}) == defaults
    assert validate_options(spec, {"precision": "int8"}) == {**defaults, "precision": "int8"}
    for given, field in [
        ({"n_estimators": 0}, "options.n_estimators"),
        ({"n_estimators": True}, "options.n_estimators"),
        ({"n_estimators": 2.5}, "options.n_estimators"),
        ({"seed": -1}, "options.seed"),
        ({"precision": "fp8"}, "options.precision"),
        ({"precision": 8}, "options.precision"),
        ({"cache": ["kv"]}, "options.cache"),
        ({"depth": 1}, "options.depth"),
        ({"schema": ["id"]}, "options.schema"),
        ({"schema": {"drop": ["id"]}}, "options.schema.drop"),
        ({"schema": {"ignore": "id"}}, "options.schema.ignore"),
        ({"schema": {"ignore": ["id"], "numeric": ["id"]}}, "options.schema.ignore"),
        ({"schema": {"missing": ["x" * 65]}}, "options.schema.missing"),
    ]:
        with pytest.raises(InvalidRequest) as refused:
            validate_options(spec, given)
        assert refused.value.errors[0].field == field


def test_equal_overrides_are_equal_options_whatever_their_order(registry: Registry) -> None:
    spec = registry.spec("tabicl-mini")
    assert "schema" not in validate_options(spec, {"schema": {"ignore": []}})
    one = validate_options(spec, {"schema": {"missing": ["x", "-"], "ignore": ["b", " a "]}})
    other = validate_options(spec, {"schema": {"ignore": ["a", "b", "a"], "missing": ["-", "x", ""]}})
    assert one == other
    assert one["schema"] == {"ignore": ["a", "b"], "missing": ["-", "x"]}


def test_tables_over_a_model_s_limits_are_refused_with_the_numbers(registry: Registry) -> None:
    spec = registry.spec("tabicl-mini")
    two = Target("y", "classification", "int", (0, 1))
    check_table(spec, 20_000, 200, two)
    with pytest.raises(TooLarge) as refused:
        check_table(spec, 20_001, 200, two)
    assert (refused.value.facts["limit"], refused.value.facts["size"]) == (20_000, 20_001)
    with pytest.raises(TooLarge):
        check_table(spec, 10, 201, two)
    with pytest.raises(InvalidTarget, match="10"):
        check_table(spec, 10, 2, Target("y", "classification", "int", tuple(range(11))))


@pytest.mark.parametrize(
    "package", ["api.app", "tabrelay", "tabrelay.cli.app", "tabrelay.up.stack", "common.service.fits"]
)
def test_what_users_and_the_api_import_never_loads_torch(package: str) -> None:
    look = f"import sys, {package}; sys.exit(bool({{'torch', 'tabicl', 'tabpfn'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", look], check=False, cwd=ROOT).returncode == 0


def test_a_licence_that_was_not_accepted_is_named_with_the_setting(tmp_path: Path) -> None:
    registry = Registry(Settings(data_dir=tmp_path))
    with pytest.raises(LicenceNotAccepted) as refused:
        registry.weights("tabpfn-v2.6", "classification")
    assert "TABRELAY_ACCEPT_LICENSE=tabpfn-v2.6" in refused.value.detail
    assert refused.value.facts["licence_url"] in refused.value.detail
    assert refused.value.status == 403
    assert not registry.ready("tabpfn-v2.6", "classification")
    shown = {model["name"]: model for model in registry.describe()}
    assert [name for name, model in shown.items() if not model["licence_accepted"]] == [
        "tabpfn-v2.5",
        "tabpfn-v2.6",
        "tabpfn-v3",
        "tabpfn-v3.5",
    ]
    assert "TABRELAY_ACCEPT_LICENSE" in shown["tabpfn-v3.5"]["reasons"]["regression"]
    assert "commercial" in shown["tabpfn-v3"]["notice"]


def test_an_accepted_licence_leaves_the_file_and_says_where_it_comes_from(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, accept_license=" tabpfn-v2.6, tabpfn-v3.5")
    registry = Registry(settings)
    with pytest.raises(ModelNotReady, match=r"huggingface\.co/Prior-Labs/tabpfn_2_6.*put it into") as missing:
        registry.weights("tabpfn-v2.6", "classification")
    assert str(tmp_path / "models" / "tabpfn-v2.6") in missing.value.detail
    with pytest.raises(LicenceNotAccepted):
        registry.weights("tabpfn-v2.5", "classification")
    one = tmp_path / "tabpfn-v3.5-20260909.safetensors"
    one.write_bytes(b"weights")
    given = Registry(settings.model_copy(update={"model_paths": {"tabpfn-v3.5": str(one)}}))
    assert {given.path("tabpfn-v3.5", task) for task in ("classification", "regression")} == {one}


def test_only_what_is_configured_counts_as_missing(tmp_path: Path) -> None:
    assert Registry(Settings(data_dir=tmp_path)).unready() == {}
    paths = {"tabpfn-v2": str(tmp_path), "tabpfn-v3:regression": str(tmp_path / "v3.ckpt")}
    unready = Registry(Settings(data_dir=tmp_path, model_paths=paths)).unready()
    assert list(unready) == ["tabpfn-v2", "tabpfn-v3"]
    assert str(tmp_path / "tabpfn-v2-regressor.ckpt") in unready["tabpfn-v2"]
    assert "Prior-Labs/TabPFN-v2-clf" in unready["tabpfn-v2"]
    assert "TABRELAY_ACCEPT_LICENSE=tabpfn-v3" in unready["tabpfn-v3"]
