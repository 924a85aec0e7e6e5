"""Datasets: list, show, delete, pin."""

from __future__ import annotations

from flask import Blueprint, Response, request

from api import schemas, views
from api.openapi import documented
from api.requests import answer, body_bytes, json_object, query_int, tenant
from api.services import services
from common.catalogue.records import Dataset
from common.errors import FieldError, InvalidRequest

blueprint = Blueprint("datasets", __name__, url_prefix="/v1")


@blueprint.get("/datasets")
@documented("datasets", {"200": schemas.Datasets}, ("422", "503"), query=schemas.PageQuery)
def datasets() -> Response:
    """Datasets with a published version, by name."""
    found, cursor = services().datasets.page(
        tenant(), after=request.args.get("cursor") or None, limit=query_int("limit", 50, 1, 500) or 50
    )
    return answer({"datasets": [views.dataset(entry) for entry in found], "next": cursor})


@blueprint.get("/datasets/<name>")
@documented("datasets", {"200": schemas.Dataset}, ("404", "422", "503"))
def dataset(name: str) -> Response:
    """One dataset: its versions, bytes, tiers, residency and schema."""
    return answer(_in_full(services().datasets.get(tenant(), name)))


@blueprint.delete("/datasets/<name>")
@documented("datasets", {"204": None}, ("404", "422", "503"))
def delete(name: str) -> Response:
    """Delete a dataset, its versions and its files in every tier."""
    services().datasets.delete(tenant(), name)
    return Response(status=204)


@blueprint.put("/datasets/<name>/pin")
@documented("datasets", {"200": schemas.Dataset}, ("400", "404", "422", "503"), json=schemas.Pin)
def pin(name: str) -> Response:
    """Keep every version of a dataset: `{"pinned": true}`, or no longer: `{"pinned": false}`."""
    body = body_bytes(1024)
    pinned = json_object(body).get("pinned", True) if body else True
    if not isinstance(pinned, bool):
        raise InvalidRequest(
            "pinned must be true or false", errors=[FieldError("pinned", "must be true or false")]
        )
    return answer(_in_full(services().datasets.pin(tenant(), name, pinned)))


def _in_full(entry: Dataset) -> dict[str, object]:
    folder = services().folder
    tiers = {}
    for version in entry.versions.values():
        places = folder.tiers(entry.tenant, "context", version.context)
        tiers[version.context] = [
            tier for tier, path in zip(("disk", "host"), places, strict=False) if path.exists()
        ]
    pending = services().catalogue.jobs.pending(entry.tenant, entry.name) if entry.pending else []
    return views.dataset_in_full(entry, services().snapshot.workers, tiers, pending)
