"""Server-sent events as WHATWG HTML defines them (section 9.2.6), read from lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerEvent:
    """One event; `id` is None when it carries none of its own."""

    name: str
    data: str
    id: str | None = None


def parse(lines: Iterable[str]) -> Iterator[ServerEvent]:
    """Whole events only: one that the end cuts off is none. Comments and unknown fields are skipped."""
    name, id = "", None
    data: list[str] = []
    for line in lines:
        if not line:
            if data:
                yield ServerEvent(name or "message", "\n".join(data), id)
            name, data, id = "", [], None
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)
        elif field == "id" and "\0" not in value:
            id = value


def lines(chunks: Iterable[str]) -> Iterator[str]:
    """Lines of a stream, ended by CR LF, LF or CR alone, as soon as their end has come.

    `str.splitlines` and so `httpx.Response.iter_lines` would also split at U+2028 and others that JSON may hold.
    """
    held = ""
    for chunk in chunks:
        held += chunk
        half = "\r" if held.endswith("\r") else ""  # of a CR LF, perhaps
        *whole, held = held.removesuffix(half).replace("\r\n", "\n").replace("\r", "\n").split("\n")
        held += half
        yield from whole
