"""The parser child: bounded, replaceable, and its faults are errors like any other."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from common.errors import InternalError, InvalidTable, InvalidTarget, MalformedBody
from common.tables.canonical import file_digest
from common.tables.child import ParserChild
from common.tables.shape import TableLimits

LIMITS = TableLimits(max_rows=5_000_000, max_columns=2_000, max_cells=50_000_000)
MIB = 1024**2


@pytest.fixture
def child(tmp_path: Path) -> Iterator[ParserChild]:
    with ParserChild(memory_bytes=1024 * MIB, timeout_s=20, uses=3, scratch_dir=tmp_path) as running:
        yield running


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "in.csv"
    path.write_text(text)
    return path


def test_a_training_file_becomes_a_canonical_table(child: ParserChild, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    parsed = child.parse_training(write(tmp_path, "a,b,y\n1,x,p\n2,,q\n"), "csv", "y", None, out, LIMITS)
    assert (parsed.rows, parsed.columns, parsed.target.task) == (2, 3, "classification")
    assert file_digest(parsed.path) == parsed.table_digest
    assert [column.kind for column in parsed.schema.columns] == ["numeric", "text"]
    assert [p.name for p in out.iterdir()] == [parsed.path.name]


def test_two_files_of_the_same_content_do_not_share_a_name(child: ParserChild, tmp_path: Path) -> None:
    source = write(tmp_path, "a,y\n1,p\n2,q\n")
    first, second = (child.parse_training(source, "csv", "y", None, tmp_path, LIMITS) for _ in range(2))
    assert first.table_digest == second.table_digest
    assert first.path != second.path


def test_a_json_body_brings_its_own_fields(child: ParserChild, tmp_path: Path) -> None:
    path = tmp_path / "in.json"
    path.write_text(
        '{"dataset":"d","target":"y","options":{"seed":1},"columns":["a","y"],"rows":[[1,"p"],[2,"q"]]}'
    )
    parsed = child.parse_training(path, "json", None, None, tmp_path, LIMITS)
    assert parsed.request["dataset"] == "d"
    assert parsed.request["options"] == {"seed": 1}


def test_rows_come_back_as_arrow_with_csv_cells_as_text(child: ParserChild) -> None:
    rows = pa.ipc.open_stream(child.parse_rows(b"a,b\n007,\n8,x\n", "csv", LIMITS)).read_all()
    assert rows.to_pydict() == {"a": ["007", "8"], "b": [None, "x"]}


def test_errors_cross_with_code_and_fields(child: ParserChild, tmp_path: Path) -> None:
    with pytest.raises(InvalidTarget) as refused:
        child.parse_training(write(tmp_path, "a,y\n1,p\n"), "csv", "z", None, tmp_path, LIMITS)
    assert refused.value.errors[0].field == "target"
    with pytest.raises(MalformedBody):
        child.parse_rows(b"nope", "parquet", LIMITS)


def test_a_child_is_replaced_after_its_uses(child: ParserChild) -> None:
    pids = set()
    for _ in range(7):
        child.parse_rows(b"a\n1\n", "csv", LIMITS)
        pids.add(child.pid)
    assert len(pids) >= 2


def test_a_killed_child_is_an_error_and_the_next_file_is_read(child: ParserChild, tmp_path: Path) -> None:
    big = write(tmp_path, "a,b,y\n" + "1.5,2.5,p\n" * 900_000)
    child.ping()
    killer = threading.Timer(0.15, lambda: os.kill(child.pid or 0, signal.SIGKILL))
    killer.start()
    with pytest.raises(InvalidTable, match="memory"):
        child.parse_training(big, "csv", "y", None, tmp_path, LIMITS)
    assert child.parse_rows(b"a\n1\n", "csv", LIMITS)


def test_memory_is_bounded(tmp_path: Path) -> None:
    path = write(tmp_path, "a,b,c,y\n" + "some text,more text,3.5,p\n" * 1_500_000)
    with ParserChild(memory_bytes=100 * MIB, timeout_s=30, scratch_dir=tmp_path) as small:
        with pytest.raises(InvalidTable, match="memory"):
            small.parse_training(path, "csv", "y", None, tmp_path, LIMITS)
        assert small.parse_rows(b"a\n1\n", "csv", LIMITS)


def test_time_is_bounded(tmp_path: Path) -> None:
    path = write(tmp_path, "a,b,y\n" + "1.5,2.5,p\n" * 2_000_000)
    with ParserChild(memory_bytes=2048 * MIB, timeout_s=20, scratch_dir=tmp_path) as child:
        child.ping()
        child.timeout_s = 0.2
        began = time.monotonic()
        with pytest.raises(InvalidTable, match="longer"):
            child.parse_training(path, "csv", "y", None, tmp_path, LIMITS)
        assert time.monotonic() - began < 5


def test_a_closed_parser_leaves_nothing(tmp_path: Path) -> None:
    child = ParserChild(memory_bytes=512 * MIB, timeout_s=20, scratch_dir=tmp_path)
    child.parse_rows(b"a\n1\n", "csv", LIMITS)
    pid = child.pid
    assert pid is not None
    child.close()
    assert not Path(f"/proc/{pid}").exists()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InternalError):
        child.ping()
