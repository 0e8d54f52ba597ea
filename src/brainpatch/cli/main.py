"""The entry point: commands, exit statuses, and errors that never show a traceback."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from brainpatch import __version__
from brainpatch.cli import convert, environment, files, generate, learning, serve
from brainpatch.cli.output import (
    note,
    say,
    settle_stdout,
    show_brainpatch_error,
    show_error,
    show_warnings_as_notes,
)
from brainpatch.cli.status import INTERRUPTED, NO, exit_status
from brainpatch.errors import BrainPatchError

app = typer.Typer(
    name="brainpatch",
    help="Small, inert files that steer a frozen language model.\n\n"
    "Example: brainpatch compare -m MODEL -p formal.brainpatch --prompt 'How was your day?'",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (files, convert, generate, serve, learning, environment):
    module.register(app)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"brainpatch {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that stand before a command."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit status. 130 means interrupted."""
    show_warnings_as_notes()
    as_json = "--json" in itertools.takewhile(lambda word: word != "--", arguments)
    debug = bool(os.environ.get("BRAINPATCH_DEBUG"))
    command: Any = typer.main.get_command(app)
    try:
        result = command.main(list(arguments), prog_name="brainpatch", standalone_mode=False)
        status = result if isinstance(result, int) else 0
        if status == INTERRUPTED:  # typer turns an interruption into this status, or into Abort
            note("interrupted")
    except BrainPatchError as error:
        if debug:
            raise
        show_brainpatch_error(error, as_json=as_json)
        status = exit_status(error)
    except (KeyboardInterrupt, typer.Abort):
        note("interrupted")
        status = INTERRUPTED
    except Exception as error:  # a person must never see a traceback
        # typer may bring a click of its own, so its errors are known by their form.
        if hasattr(error, "exit_code") and hasattr(error, "format_message"):
            where = getattr(getattr(error, "ctx", None), "command_path", "brainpatch")
            show_error("usage", "wrong use", error.format_message(), f"{where} --help", as_json=as_json)
            status = int(error.exit_code)
        else:
            if debug:
                raise
            reason = f"{type(error).__name__}: {error}"
            remedy = "Set BRAINPATCH_DEBUG=1 to see where, and report it."
            show_error("internal", "not expected", reason, remedy, as_json=as_json)
            status = NO
    settle_stdout()
    return status
