"""Two processes of one host that map a context pay for its file once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from common.contexts.store import ContextStore
from common.contexts.writer import write_context
from common.models.protocol import TensorSource
from common.names import new_id
from common.settings import Settings

#: Opens the context as a predict worker does, reads every tensor, says what it costs, waits for the other.
READER = """
import sys
from pathlib import Path
from common.contexts.reader import _map
from blake3 import blake3
import torch

def anonymous():
    with open("/proc/self/smaps_rollup") as rollup:
        return sum(int(l.split()[1]) for l in rollup if l.startswith(("Private_Dirty", "Anonymous"))) // 2

path = Path(sys.argv[1])
before = anonymous()
mapped, _ = _map(path)
assert blake3(memoryview(mapped)).hexdigest() == path.stem
body = torch.frombuffer(mapped, dtype=torch.uint8)
body.max()
grown = anonymous() - before
print("ready", flush=True)
sys.stdin.readline()
pss, ours = 0, False
for line in open("/proc/self/smaps"):
    if "-" in line.split(" ", 1)[0] and not line.split(" ", 1)[0].endswith(":"):
        ours = path.name in line
    elif ours and line.startswith("Pss:"):
        pss += int(line.split()[1])
print(pss * 1024, grown * 1024, flush=True)
sys.stdin.readline()
"""


def test_a_context_costs_its_file_once_a_host(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 255, 32 * 2**20, dtype=np.uint8)
    store = ContextStore(Settings(data_dir=tmp_path, host_dir=tmp_path / "host"))
    written = write_context(
        store.temporary("default", new_id()),
        "{}",
        [TensorSource("a", "U8", data.shape, lambda: iter([data.data]))],
    )
    path = store.publish(written.path, "default", written.digest)
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    costs = []
    try:
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "ready\n"
        for reader in readers:
            assert reader.stdin is not None
            assert reader.stdout is not None
            print(file=reader.stdin, flush=True)
            costs.append([int(part) for part in reader.stdout.readline().split()])
    finally:
        for reader in readers:
            reader.communicate("\n", timeout=10)
    shared, copied = (sum(part) for part in zip(*costs, strict=True))
    assert 0.95 * written.nbytes < shared + copied <= 1.05 * written.nbytes, costs
