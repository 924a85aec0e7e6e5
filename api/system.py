"""What the service can do and how it is: models, limits, workers, health."""

from __future__ import annotations

from flask import Blueprint, Response

from api import schemas, views
from api.openapi import documented
from api.requests import answer, tenant
from api.services import services
from common.errors import CatalogueEmptied, CatalogueUnavailable

blueprint = Blueprint("system", __name__)


@blueprint.get("/v1/models")
@documented("system", {"200": schemas.Models})
def models() -> Response:
    """The served models: what is ready, limits, licence, weights digest, options."""
    registry = services().registry
    return answer({"models": registry.describe(), "default": registry.default_model()})


@blueprint.get("/v1/limits")
@documented("system", {"200": schemas.Shown})
def limits() -> Response:
    """What is accepted."""
    settings = services().settings
    return answer(
        {
            "upload_bytes": settings.max_upload_bytes,
            "inline_bytes": settings.max_inline_parse_bytes,
            "rows": settings.max_rows,
            "columns": settings.max_columns,
            "cells": settings.max_cells,
            "predict_bytes": settings.max_predict_bytes,
            "predict_rows": settings.max_predict_rows,
            "predict_deadline_ms": int(settings.predict_deadline_s * 1000),
            "max_predict_deadline_ms": int(settings.max_predict_deadline_s * 1000),
            "one_shot": {
                "rows": settings.one_shot_max_rows,
                "columns": settings.one_shot_max_columns,
                "cells": settings.one_shot_max_cells,
                "n_estimators": settings.one_shot_estimators,
            },
            "queued_jobs": settings.max_queued_jobs,
            "versions_kept": settings.versions_kept,
            "models": {entry["name"]: entry["limits"] for entry in services().registry.describe()},
        }
    )


@blueprint.get("/v1/workers")
@documented("system", {"200": schemas.Shown}, ("503",))
def workers() -> Response:
    """Workers: what each holds, its headroom and activity."""
    listed = services().catalogue.workers
    return answer(
        {
            "predict": [views.predict_worker(worker, tenant()) for worker in listed.predict()],
            "fit": [views.fit_worker(worker) for worker in listed.fit()],
        }
    )


@blueprint.get("/livez")
@documented("system", {"200": schemas.Shown})
def livez() -> Response:
    """200 while the process answers at all."""
    return answer({"live": True})


@blueprint.get("/readyz")
@documented("system", {"200": schemas.Shown, "503": schemas.Shown})
def readyz() -> Response:
    """200 when fits and predicts would be taken, else 503 with what is missing.

    A configured model other than the default that lacks its weights is told and does not count.
    """
    missing = {}
    held = services()
    try:
        if not held.catalogue.workers.fit():
            missing["fit_workers"] = "no fit worker is registered"
        if not held.catalogue.workers.predict():
            missing["predict_workers"] = "no predict worker is registered"
        held.catalogue.epoch.require()
    except CatalogueEmptied as error:
        missing["epoch"] = error.detail
    except CatalogueUnavailable as error:
        missing["catalogue"] = error.detail
    if not missing and not held.snapshot.workers:
        missing["snapshot"] = "the routing snapshot knows no predict worker yet"
    default = held.registry.default_model()
    unready = held.registry.unready()
    if not any(held.registry.ready(default, task) for task in held.registry.spec(default).files):
        missing["model"] = unready[default]
    headers = {"Retry-After": "1"} if missing else None
    return answer(
        {"ready": not missing, "missing": missing, "default_model": default, "models_unready": unready},
        503 if missing else 200,
        headers,
    )
