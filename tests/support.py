"""What tests of the real stack share: an HTTP client in the product's words, seeded tables, waiting with a bound."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq

ARROW = "application/vnd.apache.arrow.stream"


def wait_until(holds: Callable[[], Any], what: str, within_s: float = 30.0) -> Any:
    """What `holds` returns once it is true; fails in words."""
    ends = time.monotonic() + within_s
    while True:
        found = holds()
        if found:
            return found
        if time.monotonic() > ends:
            raise AssertionError(f"not within {within_s:g} s: {what}")
        time.sleep(0.05)


def children_of(pid: int) -> dict[int, str]:
    """Every process below `pid`, by id, with its command line."""
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    parents[int(entry)] = int(file.read().rpartition(")")[2].split()[1])
                with open(f"/proc/{entry}/cmdline", "rb") as raw:
                    commands[int(entry)] = raw.read().replace(b"\0", b" ").decode().strip()
            except (FileNotFoundError, ProcessLookupError):
                continue
    found: dict[int, str] = {}
    below = {pid}
    while below:
        below = {child for child, parent in parents.items() if parent in below} - found.keys()
        found |= {child: commands.get(child, "") for child in below}
    return found


class Service:
    """The HTTP API of a running stack."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=120)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def submit(
        self, table: pa.Table | bytes, dataset: str, target: str = "y", **fields: Any
    ) -> httpx.Response:
        """`POST /v1/fits` with the table as a file."""
        headers = {"Idempotency-Key": fields.pop("idempotency_key")} if "idempotency_key" in fields else {}
        name = fields.pop("name", "table.parquet")
        content = table if isinstance(table, bytes) else as_parquet(table)
        data = {"dataset": dataset, "target": target, **fields}
        return self.http.post("/v1/fits", files={"file": (name, content)}, data=data, headers=headers)

    def fit(self, table: pa.Table | bytes, dataset: str, target: str = "y", **fields: Any) -> dict[str, Any]:
        """The succeeded job."""
        response = self.submit(table, dataset, target, **fields)
        assert response.status_code in (200, 202), response.text
        job = self.end_of(response.json()["id"])
        assert job["state"] == "succeeded", job
        return job

    def job(self, job_id: str) -> dict[str, Any]:
        """A job as it stands."""
        return dict(self.http.get(f"/v1/jobs/{job_id}").raise_for_status().json())

    def end_of(self, job_id: str, within_s: float = 120.0) -> dict[str, Any]:
        """The job once it has ended."""
        ended = ("succeeded", "failed", "cancelled")

        def look() -> dict[str, Any] | None:
            job = self.job(job_id)
            return job if job["state"] in ended else None

        return dict(wait_until(look, f"the end of job {job_id}", within_s))

    def predict(self, dataset: str, rows: pa.Table | dict[str, Any], **query: Any) -> dict[str, Any]:
        """The answer to rows sent as Arrow, or as JSON when they are an object."""
        response = self.ask(dataset, rows, **query)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def ask(self, dataset: str, rows: pa.Table | dict[str, Any], **query: Any) -> httpx.Response:
        """The response, whatever it says."""
        path = f"/v1/datasets/{dataset}/predict"
        if isinstance(rows, dict):
            return self.http.post(path, json=rows, params=query)
        return self.http.post(path, content=as_arrow(rows), headers={"content-type": ARROW}, params=query)


def check_problem(
    response: httpx.Response, status: int, code: str, field: str | None = None, says: str = ""
) -> None:
    """The response is this problem, told as a problem is, and names the field."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert (problem["status"], problem["code"]) == (status, code), problem
    assert problem["request_id"] == response.headers["x-request-id"]
    assert "Traceback" not in response.text
    if field is not None:
        assert field in [fault["field"] for fault in problem["errors"]], problem
    assert says in response.text, problem


def as_arrow(table: pa.Table) -> bytes:
    """An Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def as_parquet(table: pa.Table) -> bytes:
    """A Parquet file."""
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def as_csv(table: pa.Table) -> bytes:
    """A CSV file."""
    sink = io.BytesIO()
    pcsv.write_csv(table, sink)
    return sink.getvalue()


def as_json(table: pa.Table) -> dict[str, Any]:
    """The JSON body of a predict."""
    rows = [list(row.values()) for row in table.to_pylist()]
    return {"columns": table.column_names, "rows": rows}


def numeric(rows: int = 120, columns: int = 6, seed: int = 0, classes: int = 2) -> pa.Table:
    """Numbers with gaps; `y` is text, told by the first two columns."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(rows, columns))
    score = values[:, 0] + values[:, 1] + rng.normal(size=rows) * 0.1
    cuts = np.quantile(score, np.linspace(0, 1, classes + 1)[1:-1])
    labels = np.array([f"k{i}" for i in range(classes)])[np.searchsorted(cuts, score)]
    values[rng.random(size=values.shape) < 0.03] = np.nan
    named = {f"c{i}": pa.array(values[:, i], from_pandas=True) for i in range(columns)}
    return pa.table({**named, "y": labels})


def mixed(rows: int = 140, seed: int = 1) -> pa.Table:
    """Text, booleans, dates, whole numbers and gaps; `y` is text, `z` a number."""
    rng = np.random.default_rng(seed)
    text = rng.choice(["basic", "plus", "pro"], size=rows)
    day = np.datetime64("2024-01-01") + rng.integers(0, 700, size=rows).astype("timedelta64[D]")
    moment = np.datetime64("2024-01-01T00:00:00", "us") + rng.integers(0, 10**9, size=rows).astype(
        "timedelta64[s]"
    )
    flag = rng.random(size=rows) < 0.5
    amount = rng.normal(size=rows)
    count = rng.integers(0, 9, size=rows)
    score = amount + flag + (text == "pro") * 2.0 + count * 0.1
    gaps = rng.random(size=rows) < 0.1
    return pa.table(
        {
            "plan": pa.array([None if gap else str(t) for t, gap in zip(text, gaps, strict=True)]),
            "since": pa.array(day),
            "seen": pa.array(moment),
            "auto": pa.array([None if i % 17 == 0 else bool(f) for i, f in enumerate(flag)]),
            "amount": pa.array(np.where(np.roll(gaps, 3), np.nan, amount), from_pandas=True),
            "count": pa.array(count),
            "y": np.where(score > np.median(score), "stay", "leave"),
            "z": score * 10 + 3,
        }
    )
