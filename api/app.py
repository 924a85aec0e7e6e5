"""The Flask application."""

from __future__ import annotations

from flask import Flask

from api import datasets, events, fits, one_shot, openapi, predict, problems, requests, system
from api.services import Services
from common import logs

#: Of the small fields beside a file. werkzeug counts its read buffer of 64 KiB and more against it.
FORM_MEMORY_BYTES = 1024**2
FORM_PARTS = 32


def create_app(services: Services) -> Flask:
    """An application over these services."""
    app = Flask(__name__, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = services.settings.max_upload_bytes + FORM_MEMORY_BYTES
    app.config["MAX_FORM_MEMORY_SIZE"] = FORM_MEMORY_BYTES
    app.config["MAX_FORM_PARTS"] = FORM_PARTS
    app.extensions["tabrelay"] = services
    app.extensions["log"] = logs.get("api")
    requests.install(app)
    problems.install(app)
    events.install(app, services.settings)
    for module in (fits, events, datasets, predict, one_shot, system):
        app.register_blueprint(module.blueprint)
    openapi.install(app)
    return app
