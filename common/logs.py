"""Structured logs, the same for every process; they never contain cell values."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from common.settings import Settings


def configure(settings: Settings, process: str) -> None:
    """Send structlog and the standard library's logging to stderr, as text or JSON lines."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if settings.log_format == "json":
        shared.append(structlog.processors.format_exc_info)
        renderer: Any = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level.upper())
    for chatty in ("kombu", "celery", "uvicorn", "httpx", "urllib3", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    structlog.contextvars.bind_contextvars(process=process)


def get(name: str) -> Any:
    """A logger; bind `job`, `request_id`, `dataset` to it, never data."""
    return structlog.get_logger(name)
