"""The OpenAPI document and its page, which loads nothing from elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from flask import Blueprint, Flask, Response, current_app
from offapi import OpenAPITemplate
from spectree import Response as Documented
from spectree import SpecTree

from api.requests import answer
from api.schemas import Problem

spec = SpecTree(
    "flask",
    title="Tabrelay",
    version="1",
    description="Fit a table once, predict at once. Errors are problem+json with a stable `code`.",
    mode="strict",
)

Route = TypeVar("Route", bound=Callable[..., Any])

blueprint = Blueprint("openapi", __name__)

JSON = "application/json"
_PROBLEMS = ("400", "404", "409", "410", "413", "415", "422", "429", "500", "503", "504", "507")


def documented(
    tag: str,
    ok: dict[str, Any],
    problems: tuple[str, ...] = (),
    media_type: str = JSON,
    **parts: Any,
) -> Callable[[Route], Route]:
    """Describe a route; the routes check what comes in themselves, so that every error is a problem."""
    bodies: dict[str, Any] = {f"HTTP_{status}": model for status, model in ok.items()}
    bodies |= {f"HTTP_{status}": Problem for status in _PROBLEMS if status in problems}
    describe = spec.validate(resp=Answers(media_type, **bodies), tags=[tag], skip_validation=True, **parts)

    def described(route: Route) -> Route:
        # spectree's wrapper reads every answer to its end, also a stream's, and makes another one of it.
        @functools.wraps(describe(route))
        def undisturbed(*args: Any, **kwargs: Any) -> Any:
            return route(*args, **kwargs)

        return cast(Route, undisturbed)

    return described


class Answers(Documented):  # type: ignore[misc]  # spectree has no types
    """What a route answers; a 200 may be of another media type than JSON."""

    def __init__(self, media_type: str, **bodies: Any) -> None:
        super().__init__(**bodies)
        self._media_type = media_type

    def generate_spec(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Called by spectree."""
        described: dict[str, Any] = super().generate_spec(*args, **kwargs)
        content = described.get("200", {}).get("content", {})
        if JSON in content:
            content[self._media_type] = content.pop(JSON)
        return described


@blueprint.get("/openapi.json")
def document() -> Response:
    """The OpenAPI document."""
    return answer(current_app.extensions["openapi"])


@blueprint.get("/docs")
def page() -> Response:
    """A page to read and try the calls."""
    html = OpenAPITemplate.SWAGGER.value.format(spec_url="/openapi.json")
    return Response(html, content_type="text/html; charset=utf-8")


def install(app: Flask) -> None:
    """Build the document from the routes, once all of them are registered."""
    with app.app_context():
        spec.app = app
        app.extensions["openapi"] = spec.spec
    app.register_blueprint(blueprint)
