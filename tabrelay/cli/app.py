"""The commands put together, and the one place where an error becomes a line on standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from tabrelay.cli import catalogue, fits, predicts, rebuild, stacks
from tabrelay.cli.options import Key, Session, Url

app = typer.Typer(
    name="tabrelay",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
for part in (stacks, fits, predicts, catalogue, rebuild):
    part.register(app)


def _version(asked: bool) -> None:
    if asked:
        import tabrelay

        typer.echo(tabrelay.__version__)
        raise typer.Exit


@app.callback(epilog="Example: tabrelay fit churn.csv --target churned --dataset churn")
def top(
    ctx: typer.Context,
    url: Url = None,
    api_key: Key = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """Fit a table once, then ask it for predictions at once.

    `tabrelay demo` shows everything in a minute; `tabrelay up` starts the service.
    """
    ctx.obj = Session(url=url, api_key=api_key)


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names and return its exit status."""
    try:
        status: Any = app(
            args=None if argv is None else list(argv), prog_name="tabrelay", standalone_mode=False
        )
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except KeyboardInterrupt:
        return 130
    except typer.Abort:
        return complain("stopped", 1)
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough; keep the interpreter from complaining at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except Exception as error:
        return complain(*explained(error))


def explained(error: Exception) -> tuple[str, int]:
    """What to say about an error, and the exit status."""
    from tabrelay.client import TabrelayHTTPError

    usage = getattr(error, "format_message", None)
    if callable(usage):  # a usage error of the command line's parser
        return f"{usage()} (see --help)", getattr(error, "exit_code", 2)
    if isinstance(error, TabrelayHTTPError):
        hint = _hint(error)
        return f"{error}{hint}", 1
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror, 1
    text = str(error) or type(error).__name__
    known = isinstance(error, ValueError | TypeError | ImportError)
    return text if known else f"{type(error).__name__}: {text}", 1


def complain(text: str, status: int) -> int:
    """Write one line to standard error."""
    print(f"tabrelay: {' '.join(text.split())}", file=sys.stderr)
    return status


def _hint(error: Any) -> str:
    from tabrelay.client import ConnectionFailed, JobEnded, NotAuthorized

    if isinstance(error, ConnectionFailed) and error.code == "connection_failed":
        return "; start it with `tabrelay up`, or name another with --url or TABRELAY_URL"
    if isinstance(error, NotAuthorized):
        return "; give a key with TABRELAY_API_KEY or --api-key"
    if not isinstance(error, JobEnded) and error.retry_after_s:
        return f"; try again in {error.retry_after_s:g} s"
    return ""
