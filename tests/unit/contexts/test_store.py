"""Where contexts lie: published durably on disk, copied into a bounded host tier that may vanish at any time."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from common.contexts.build import build_context
from common.contexts.store import ContextStore
from common.contexts.writer import write_context
from common.errors import ContextDamaged, ContextGone, VerificationFailed
from common.models.protocol import Prediction, TensorSource
from common.names import new_id
from common.settings import Settings
from tests.support import numeric
from tests.unit import fitting

TENANT = "default"
BYTES = 100_000


def store_of(data: Path, host_bytes: int = 10 * BYTES, **settings: object) -> ContextStore:
    return ContextStore(
        Settings(data_dir=data, host_dir=data / "host", host_tier_bytes=host_bytes, **settings)  # type: ignore[arg-type]  # test values
    )


def published(store: ContextStore, fill: int, tenant: str = TENANT) -> str:
    """A file of about BYTES bytes, by its digest. Not a whole context: copies never look inside."""
    data = np.full(BYTES, fill, dtype=np.uint8)
    written = write_context(
        store.temporary(tenant, new_id()),
        "{}",
        [TensorSource("a", "U8", data.shape, lambda: iter([data.data]))],
    )
    store.publish(written.path, tenant, written.digest)
    return written.digest


def hosted(data: Path) -> set[str]:
    return {path.stem for path in (data / "host").rglob("*.safetensors")}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> fitting.Fitted:
    return fitting.fit(fitting.training(numeric(rows=30)), tmp_path_factory.mktemp("real"), n_estimators=1)


@pytest.fixture
def copied(real: fitting.Fitted, tmp_path: Path) -> tuple[ContextStore, str, Path]:
    """A store of its own with a real context: store, digest, the context's path on disk."""
    place = tmp_path / "contexts" / TENANT / real.path.name
    place.parent.mkdir(parents=True)
    shutil.copy(real.path, place)
    return store_of(tmp_path, 2**30), real.digest, place


def test_a_context_comes_from_memory_once_it_was_copied_there(
    copied: tuple[ContextStore, str, Path], real: fitting.Fitted
) -> None:
    store, digest, place = copied
    on_disk = store.open(TENANT, digest)
    assert (on_disk.tier, store.best_path(TENANT, digest)) == ("disk", place)
    assert store.copy_to_host(TENANT, digest)
    in_memory = store.open(TENANT, digest)
    assert in_memory.tier == "host"
    assert in_memory.nbytes == place.stat().st_size
    for name, tensor in on_disk.tensors.items():
        assert torch.equal(in_memory.tensors[name], tensor)
    copy = store.best_path(TENANT, digest)
    assert copy is not None
    assert copy.stat().st_mode & 0o777 == 0o600
    assert copy.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty"])
def test_a_damaged_copy_in_memory_falls_back_to_the_disk_and_is_removed(
    copied: tuple[ContextStore, str, Path], damage: str
) -> None:
    store, digest, _ = copied
    assert store.copy_to_host(TENANT, digest)
    host = store.best_path(TENANT, digest)
    assert host is not None
    data = bytearray(host.read_bytes())
    data[-1] ^= 1
    host.write_bytes({"flipped": bytes(data), "truncated": bytes(data[:-5]), "empty": b""}[damage])
    assert store.open(TENANT, digest).tier == "disk"
    assert not host.exists()


def test_a_damaged_file_on_disk_never_answers(copied: tuple[ContextStore, str, Path]) -> None:
    store, digest, place = copied
    data = bytearray(place.read_bytes())
    data[len(data) // 2] ^= 1
    place.write_bytes(data)
    with pytest.raises(ContextDamaged):
        store.open(TENANT, digest)


def test_a_mapped_context_outlives_its_file(copied: tuple[ContextStore, str, Path]) -> None:
    store, digest, place = copied
    mapped = store.open(TENANT, digest)
    before = {name: tensor.clone() for name, tensor in mapped.tensors.items()}
    place.unlink()
    for name, tensor in before.items():
        assert torch.equal(mapped.tensors[name], tensor)
    with pytest.raises(ContextGone):
        store.open(TENANT, digest)
    assert not store.copy_to_host(TENANT, digest)
    assert store.best_path(TENANT, digest) is None


def test_the_host_tier_stays_within_its_bytes_and_drops_what_was_opened_longest_ago(tmp_path: Path) -> None:
    store = store_of(tmp_path, int(3.5 * (BYTES + 4096)))
    digests = [published(store, fill) for fill in range(5)]
    for age, digest in enumerate(digests[:3]):
        assert store.copy_to_host(TENANT, digest)
        path = store.best_path(TENANT, digest)
        assert path is not None
        os.utime(path, (1000 + age, 1000 + age))
    first = store.best_path(TENANT, digests[0])
    assert first is not None
    os.utime(first)  # opened again since
    assert store.copy_to_host(TENANT, digests[3])
    assert hosted(tmp_path) == {digests[0], digests[2], digests[3]}
    assert store.copy_to_host(TENANT, digests[4])
    assert hosted(tmp_path) == {digests[0], digests[3], digests[4]}
    used = sum(path.stat().st_size for path in (tmp_path / "host").rglob("*.safetensors"))
    assert used <= 3.5 * (BYTES + 4096)


def test_opening_from_memory_counts_as_use(copied: tuple[ContextStore, str, Path]) -> None:
    store, digest, _ = copied
    assert store.copy_to_host(TENANT, digest)
    host = store.best_path(TENANT, digest)
    assert host is not None
    os.utime(host, (1000, 1000))
    store.open(TENANT, digest)
    assert host.stat().st_atime > 1000
    assert host.stat().st_mtime == 1000  # a changed one would mean that somebody wrote


def test_all_tenants_share_the_host_tiers_bytes(tmp_path: Path) -> None:
    store = store_of(tmp_path, int(1.5 * (BYTES + 4096)))
    ours, theirs = published(store, 1), published(store, 2, "stranger")
    assert store.copy_to_host(TENANT, ours)
    assert store.copy_to_host("stranger", theirs)
    assert hosted(tmp_path) == {theirs}
    assert store.best_path(TENANT, theirs) is None


@pytest.mark.parametrize("host_bytes", [0, BYTES // 2])
def test_what_does_not_fit_into_the_host_tier_stays_on_disk(tmp_path: Path, host_bytes: int) -> None:
    store = store_of(tmp_path, host_bytes)
    digest = published(store, 1)
    assert not store.copy_to_host(TENANT, digest)
    assert hosted(tmp_path) == set()
    path = store.best_path(TENANT, digest)
    assert path is not None
    assert path.is_relative_to(tmp_path / "contexts")


def test_the_same_content_twice_is_one_file(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    assert published(store, 7) == published(store, 7)
    assert len(list((tmp_path / "contexts" / TENANT).iterdir())) == 1


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "A" * 64, "0" * 63, "/" + "0" * 63])
def test_only_a_digest_names_a_context(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="digest"):
        store_of(tmp_path).open(TENANT, name)


@pytest.mark.parametrize("tenant", ["..", "a/b", "", "."])
def test_only_a_tenants_name_names_its_folder(tmp_path: Path, tenant: str) -> None:
    with pytest.raises(ValueError, match="tenant"):
        store_of(tmp_path).open(tenant, "0" * 64)


class Liar:
    """A fitted state that answers otherwise than the state it freezes."""

    def __init__(self, state: object) -> None:
        self._state = state

    def __getattr__(self, name: str) -> object:
        return getattr(self._state, name)

    def predict(self, rows: object) -> Prediction:
        honest = self._state.predict(rows)  # type: ignore[attr-defined]  # the state's
        return Prediction(probabilities=honest.probabilities[:, ::-1].copy())


def test_a_context_that_answers_otherwise_than_its_estimator_is_not_kept(
    real: fitting.Fitted, tmp_path: Path
) -> None:
    store = store_of(tmp_path)
    with pytest.raises(VerificationFailed, match="nothing was published"):
        build_context(
            store, TENANT, new_id(), fitting.adapter(), fitting.backbone("classification"), Liar(real.state), real.table,  # type: ignore[arg-type]  # stands in for a state
            table_digest="0" * 64, key="k", options={}, timings_ms={},
        )  # fmt: skip
    assert list((tmp_path / "contexts").rglob("*.*")) == []


def test_leaving_a_built_context_unpublished_leaves_no_file(real: fitting.Fitted, tmp_path: Path) -> None:
    store = store_of(tmp_path)
    built = build_context(
        store, TENANT, new_id(), fitting.adapter(), fitting.backbone("classification"), real.state, real.table,
        table_digest="0" * 64, key="k", options={}, timings_ms={},
    )  # fmt: skip
    with built:
        assert built.path.exists()
    assert list((tmp_path / "contexts").rglob("*.*")) == []
