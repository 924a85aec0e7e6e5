"""`python -m api`: serve HTTP with gunicorn's threads."""

from __future__ import annotations

from typing import Any

from flask import Flask
from gunicorn.app.base import BaseApplication

from api.app import create_app
from api.events import EventStreams
from api.services import Services
from common import logs
from common.process import die_with_parent, parse_bind
from common.settings import Settings


class ApiServer(BaseApplication):  # type: ignore[misc]  # gunicorn has no types
    """gunicorn, configured from our settings alone; the services start in the worker process, after the fork."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._services: Services | None = None
        super().__init__()

    def load_config(self) -> None:
        """Called by gunicorn."""
        settings = self._settings
        options: dict[str, Any] = {
            "bind": str(parse_bind(settings.api_bind)),
            "workers": settings.api_processes,
            "worker_class": "gthread",
            "threads": settings.api_threads,
            "timeout": 120,
            "graceful_timeout": 5,
            "keepalive": 75,
            "worker_tmp_dir": "/dev/shm",  # noqa: S108  (a heartbeat file; on disk it can stall)
            "limit_request_line": 4094,
            "limit_request_fields": 64,
            "limit_request_field_size": 8190,
            "loglevel": "warning",
            "post_worker_init": self._worker_ready,
            "worker_exit": self._worker_exit,
            "control_socket_disable": True,
        }
        for name, value in options.items():
            if name in self.cfg.settings:
                self.cfg.set(name, value)

    def load(self) -> Flask:
        """The application of one worker process."""
        die_with_parent()
        self._services = Services.build(self._settings)
        return create_app(self._services)

    def _worker_ready(self, worker: Any) -> None:
        """Event streams end as soon as the worker is told to; its grace is for requests that are being answered."""
        streams: EventStreams = worker.wsgi.extensions["event_streams"]
        streams.stopping = lambda: not worker.alive

    def _worker_exit(self, server: Any, worker: Any) -> None:
        if self._services is not None:
            self._services.close()


def main() -> None:
    """Read the settings and serve."""
    settings = Settings.load()
    logs.configure(settings, "api")
    die_with_parent()
    ApiServer(settings).run()


if __name__ == "__main__":
    main()
