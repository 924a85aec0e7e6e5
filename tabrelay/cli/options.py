"""The options that every command shares, and the client made from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tabrelay.client import Client

Url = Annotated[
    str | None,
    typer.Option(
        "--url", metavar="URL", help="The service; TABRELAY_URL or http://127.0.0.1:8000 when not given."
    ),
]
Key = Annotated[
    str | None,
    typer.Option("--api-key", metavar="KEY", help="The API key; better kept in TABRELAY_API_KEY."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON to standard output and nothing else.")]


@dataclass(frozen=True)
class Session:
    """What stood before the command's name."""

    url: str | None = None
    api_key: str | None = None


def connect(ctx: typer.Context, url: str | None, api_key: str | None) -> Client:
    """A client; an option after the command's name wins over one before it."""
    from tabrelay.client import Client

    session: Session = ctx.obj
    return Client(url or session.url, api_key or session.api_key)
