"""What a fit says of its columns is shown, kept with the context and applied to rows of every format."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tests.support import Service, as_csv

pytestmark = pytest.mark.integration

ROWS = 60
DECLARED = pa.table(
    {
        "id": list(range(ROWS)),
        "zip": [[10115.0, 20095.0, 50667.0][i % 3] for i in range(ROWS)],
        "amount": [["12.5", "-999", "07", "n.a."][i % 4] for i in range(ROWS)],
        "since": [f"2024-0{1 + i % 9}-01" for i in range(ROWS)],
        "y": [["no", "yes"][i % 3 == 0] for i in range(ROWS)],
    }
)
OPTIONS = (
    '{"schema": {"ignore": ["id"], "categorical": ["zip"], "numeric": ["amount"], "datetime": ["since"],'
    ' "missing": ["n.a.", "-999"]}}'
)


@pytest.mark.parametrize("name", ["table.csv", "table.parquet", "table.csv.zst"])
def test_declarations_are_shown_kept_and_applied_to_rows_of_every_format(service: Service, name: str) -> None:
    content: bytes | pa.Table = DECLARED
    if "csv" in name:
        content = as_csv(DECLARED)
    if name.endswith(".zst"):
        content = pa.compress(content, codec="zstd", asbytes=True)
    dataset = "declared-" + name.replace(".", "-")
    job = service.fit(content, dataset, name=name, options=OPTIONS)
    shown = service.http.get(f"/v1/datasets/{dataset}").json()["schema"]
    assert job["schema"] == shown
    assert shown["missing"] == ["-999", "n.a."]
    kinds = {column["name"]: column["kind"] for column in shown["columns"]}
    assert kinds == {"zip": "text", "amount": "numeric", "since": "datetime"}
    assert job["columns"] == 3

    rows = DECLARED.drop_columns(["id", "y"]).slice(0, 8)
    expected = service.predict(dataset, rows)["probabilities"]
    path = f"/v1/datasets/{dataset}/predict"
    csv = {"content-type": "text/csv"}
    packed = pa.compress(as_csv(rows), codec="zstd", asbytes=True)
    gaps = [[10115, 12.5], [20095, None], [50667, 7], [10115, None], [20095, 12.5], [50667, -999]]
    records = [
        {"zip": code, "amount": amount, "since": day}
        for (code, amount), day in zip(gaps, rows.column("since").to_pylist(), strict=False)
    ]
    assert service.http.post(path, content=as_csv(rows), headers=csv).json()["probabilities"] == expected
    assert service.http.post(path, content=packed, headers=csv).json()["probabilities"] == expected
    assert service.predict(dataset, {"records": records})["probabilities"] == expected[:6]
