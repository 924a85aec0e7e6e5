"""`python -m tabrelay.up`: the stack alone, without the rest of the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tabrelay.up.stack import StackOptions, run_up


def parse(arguments: Sequence[str] | None = None) -> StackOptions:
    """The options that the arguments ask for."""
    parser = argparse.ArgumentParser(
        prog="python -m tabrelay.up", description=run_up.__doc__, allow_abbrev=False
    )
    default = StackOptions()
    parser.add_argument(
        "--port", type=int, default=default.port, help="0 picks a free one (default %(default)s)"
    )
    parser.add_argument("--host", default=default.host)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--fit-workers", type=int, help="default: one a fit device")
    parser.add_argument("--predict-workers", type=int, help="default: one a predict device")
    parser.add_argument("--fit-devices", default=default.fit_devices, metavar="cpu|cuda:0,cuda:1")
    parser.add_argument("--predict-devices", default=default.predict_devices, metavar="cpu|cuda:0,cuda:1")
    parser.add_argument("--model", action="append", default=[], dest="models", metavar="NAME[:TASK][=PATH]")
    parser.add_argument(
        "--queues",
        action="append",
        default=[],
        metavar="fit.small,fit.large",
        help="of each fit worker in turn",
    )
    parser.add_argument("--threads", type=int, help="compute threads of a worker")
    parser.add_argument("--redis-url", help="use this Redis in place of an embedded one")
    found = vars(parser.parse_args(arguments))
    return StackOptions(**{**found, "models": tuple(found["models"]), "queues": tuple(found["queues"])})


if __name__ == "__main__":
    sys.exit(run_up(parse()))
