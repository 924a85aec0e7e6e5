"""The file is safetensors, whole and exactly what its name says, or it is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from blake3 import blake3
from safetensors import safe_open

from common.contexts.format import ALIGNMENT, build_header, parse_header
from common.contexts.reader import open_context
from common.contexts.writer import write_context
from common.errors import ContextDamaged, ContextGone, ContextIncompatible, InternalError
from common.models.protocol import TensorSource
from tests.support import mixed
from tests.unit import fitting

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> fitting.Fitted:
    return fitting.fit(
        fitting.training(mixed(rows=40).drop_columns(["z"])), tmp_path_factory.mktemp("d"), n_estimators=2
    )


def test_any_safetensors_library_reads_the_same_tensors(fitted: fitting.Fitted) -> None:
    mapped = fitted.store.open("default", fitted.digest)
    with safe_open(fitted.path, framework="pt") as other:
        assert set(other.keys()) == set(mapped.tensors)
        for name, tensor in mapped.tensors.items():
            assert torch.equal(other.get_tensor(name), tensor)
        assert orjson.loads(other.metadata()["tabrelay"])["format"] == 1


def test_the_body_is_aligned_the_file_private_and_named_by_its_digest(fitted: fitting.Fitted) -> None:
    data = fitted.path.read_bytes()
    assert parse_header(memoryview(data)).body_at % ALIGNMENT == 0
    assert fitted.path.stem == blake3(data).hexdigest() == fitted.digest
    assert fitted.path.stat().st_mode & 0o777 == 0o600
    assert fitted.path.parent.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in fitted.path.parent.iterdir()] == [fitted.path.name]


def test_a_flipped_bit_anywhere_is_found(fitted: fitting.Fitted, tmp_path: Path) -> None:
    data = bytearray(fitted.path.read_bytes())
    body = parse_header(memoryview(bytes(data))).body_at
    rng = np.random.default_rng(0)
    sampled = [*rng.integers(0, body, 20).tolist(), *rng.integers(body, len(data), 40).tolist()]
    for place in [0, 7, 8, 20, body - 1, body, len(data) - 1, *sampled]:
        bit = 1 << (place % 8)
        data[place] ^= bit
        copy = tmp_path / "copy"
        copy.write_bytes(data)
        with pytest.raises(ContextDamaged):
            open_context(copy, fitted.digest, "disk")
        data[place] ^= bit


@pytest.mark.parametrize("size", [0, 5, 4096, -1])
def test_a_truncated_file_is_found(fitted: fitting.Fitted, tmp_path: Path, size: int) -> None:
    copy = tmp_path / "copy"
    copy.write_bytes(fitted.path.read_bytes()[:size])
    with pytest.raises(ContextDamaged):
        open_context(copy, fitted.digest, "disk")


def test_a_missing_file_is_gone(tmp_path: Path) -> None:
    with pytest.raises(ContextGone):
        open_context(tmp_path / "none", "0" * 64, "disk")


def file_of(header: Any, body: bytes = b"", *, length: int | None = None, pad: bool = True) -> bytes:
    text = header if isinstance(header, bytes) else orjson.dumps(header)
    if pad:
        text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


def entry(start: int = 0, stop: int = 8, dtype: Any = "F32", shape: Any = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


META = {"__metadata__": {"tabrelay": "{}"}}
ABUSES = {
    "huge header length": file_of(META, length=2**63),
    "header over the format's bound": file_of(META, length=200_000_000),
    "header beyond the file": file_of(META, length=10_000),
    "not JSON": file_of(b"{nope"),
    "not an object": file_of([1]),
    "no manifest": file_of({"a": entry()}, bytes(8)),
    "manifest not text": file_of({"__metadata__": {"tabrelay": 1}}),
    "more metadata": file_of({"__metadata__": {"tabrelay": "{}", "x": "y"}}),
    "unaligned body": file_of(META, pad=False),
    "header is empty": file_of(b""),
    "no tensors but bytes": file_of(META, bytes(8)),
    "the same bytes twice": file_of({**META, "a": entry(), "b": entry()}, bytes(8)),
    "offsets turned": file_of({**META, "a": entry(8, 0)}, bytes(8)),
    "three offsets": file_of({**META, "a": {**entry(), "data_offsets": [0, 4, 8]}}, bytes(8)),
    "negative size": file_of({**META, "a": entry(shape=(-2, -1))}, bytes(8)),
    "a tensor named as metadata": file_of({"__metadata__": entry()}, bytes(8)),
    "not UTF-8": file_of(b'{"__metadata__":{"tabrelay":"\xff"}}'),
    "trailing bytes": file_of({**META, "a": entry()}, bytes(9)),
    "body too short": file_of({**META, "a": entry()}, bytes(7)),
    "overlap": file_of({**META, "a": entry(), "b": entry(4, 12)}, bytes(12)),
    "hole": file_of({**META, "a": entry(), "b": entry(16, 24)}, bytes(24)),
    "negative offset": file_of({**META, "a": entry(-8, 0)}),
    "shape and bytes differ": file_of({**META, "a": entry(shape=(3,))}, bytes(8)),
    "shape overflows": file_of({**META, "a": entry(shape=(2**47, 2**47, 4))}, bytes(8)),
    "unknown dtype": file_of({**META, "a": entry(dtype="F8")}, bytes(8)),
    "dtype no text": file_of({**META, "a": entry(dtype=[1])}, bytes(8)),
    "shape not whole": file_of({**META, "a": entry(shape=(2.0,))}, bytes(8)),
    "boolean offset": file_of({**META, "a": {"dtype": "F32", "shape": [0], "data_offsets": [False, False]}}),
    "unaligned tensor": file_of({**META, "a": entry(0, 1, "U8", (1,)), "b": entry(1, 9)}, bytes(9)),
    "more keys": file_of({**META, "a": {**entry(), "x": 1}}, bytes(8)),
}


@pytest.mark.parametrize("kind", ABUSES)
def test_an_abused_header_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ContextDamaged):
        parse_header(memoryview(ABUSES[kind]))
    path = tmp_path / "abused"
    path.write_bytes(ABUSES[kind])
    with pytest.raises(ContextDamaged):
        open_context(path, blake3(ABUSES[kind]).hexdigest(), "disk")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda manifest: manifest | {"format": 2}, ContextIncompatible),
        (lambda manifest: manifest | {"rows": "many"}, ContextDamaged),
        (lambda manifest: {k: v for k, v in manifest.items() if k != "schema"}, ContextDamaged),
        (lambda manifest: manifest | {"extra": 1}, ContextDamaged),
        (lambda manifest: [manifest], ContextDamaged),
    ],
)
def test_another_manifest_is_refused_by_name(
    fitted: fitting.Fitted, tmp_path: Path, change: Callable[[Any], Any], error: type[Exception]
) -> None:
    manifest = orjson.loads(parse_header(memoryview(fitted.path.read_bytes())).manifest)
    written = write_context(tmp_path / "other", orjson.dumps(change(manifest)).decode(), [])
    with pytest.raises(error):
        open_context(written.path, written.digest, "disk")


def source(name: str, array: Any, parts: int = 1) -> TensorSource:
    pieces = np.array_split(array, parts)
    return TensorSource(
        name, "F32", array.shape, lambda: iter([p.reshape(-1).view(np.uint8).data for p in pieces])
    )


def test_parts_are_written_in_order_and_must_add_up(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    written = write_context(tmp_path / "a", "{}", [source("a", array, parts=3)])
    assert blake3((tmp_path / "a").read_bytes()).hexdigest() == written.digest
    layout = parse_header(memoryview((tmp_path / "a").read_bytes()))
    assert (tmp_path / "a").read_bytes()[layout.body_at :] == array.tobytes()
    short = TensorSource("a", "F32", (5, 3), source("a", array).parts)
    with pytest.raises(InternalError):
        write_context(tmp_path / "b", "{}", [short])
    assert not (tmp_path / "b").exists()
    assert build_header("{}", []).endswith(b" ")


FULL = """
import resource, sys
from pathlib import Path
import numpy as np
from common.contexts.writer import write_context
from common.errors import StorageFull
from common.models.protocol import TensorSource
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
data = np.zeros(10**6, dtype=np.uint8)
path = Path(sys.argv[1])
try:
    write_context(path, "{}", [TensorSource("a", "U8", data.shape, lambda: iter([data.data]))])
except StorageFull as error:
    sys.exit(0 if not path.exists() else 2)
sys.exit(1)
"""


def test_a_full_disk_is_storage_full_and_nothing_stays(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path / "a")], check=False, cwd=ROOT)
    assert done.returncode == 0


PEAK = """
import resource, sys
from pathlib import Path
import numpy as np
from common.contexts.writer import write_context
from common.models.protocol import TensorSource
size = 200 * 2**20
def parts():
    for i in range(4):
        yield np.full(size // 4, i, dtype=np.uint8).data
warm = [TensorSource("w", "U8", (8,), lambda: iter([np.zeros(8, np.uint8).data]))]
write_context(Path(sys.argv[1] + "w"), "{}", warm)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_context(Path(sys.argv[1]), "{}", [TensorSource(n, "U8", (size,), parts) for n in "ab"])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / size)
"""


def test_writing_needs_less_memory_than_the_largest_tensor(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path / "a")], check=True, capture_output=True, cwd=ROOT
    )
    assert float(done.stdout) <= 1.1


def test_opening_maps_and_copies_nothing(fitted: fitting.Fitted) -> None:
    mapped = fitted.store.open("default", fitted.digest)
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps if fitted.digest in line]
    within = [(int(start, 16), int(stop, 16)) for start, stop in ranges]
    assert within
    for name, tensor in mapped.tensors.items():
        assert any(start <= tensor.data_ptr() < stop for start, stop in within), name
    assert sum(t.numel() * t.element_size() for t in mapped.tensors.values()) == mapped.manifest.tensor_bytes


def test_writing_to_a_view_never_reaches_the_file(fitted: fitting.Fitted) -> None:
    mapped = fitted.store.open("default", fitted.digest)
    name = max(mapped.tensors, key=lambda name: mapped.tensors[name].numel())
    mapped.tensors[name].zero_()
    assert blake3(fitted.path.read_bytes()).hexdigest() == fitted.digest
    assert fitted.store.open("default", fitted.digest).tensors[name].count_nonzero() > 0
