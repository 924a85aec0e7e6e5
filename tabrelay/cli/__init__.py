"""The command `tabrelay`."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, 2 for a usage error, 130 for Ctrl-C, 1 otherwise."""
    from tabrelay.cli.app import run

    return run(argv)
