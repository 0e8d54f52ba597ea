"""The entry point: commands, exit statuses, and errors that never show a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from brainpatch import __version__
from brainpatch.cli import environment, files, generate, learning
from brainpatch.cli.output import close_stdout_quietly, note, say, show_error, show_warnings_as_notes
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
for module in (files, generate, learning, environment):
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
    command: Any = typer.main.get_command(app)
    try:
        result = command.main(list(arguments), prog_name="brainpatch", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except BrainPatchError as error:
        if os.environ.get("BRAINPATCH_DEBUG"):
            raise
        show_error(error, as_json="--json" in arguments)
        return exit_status(error)
    except (KeyboardInterrupt, typer.Abort):
        note("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        close_stdout_quietly()
        return 0
    except Exception as error:  # a person must never see a traceback
        if hasattr(error, "exit_code") and hasattr(error, "format_message"):  # wrong use, found by the parser
            note(f"error: {error.format_message()}\nwhat to do: brainpatch --help")
            return int(error.exit_code)
        if os.environ.get("BRAINPATCH_DEBUG"):
            raise
        note(
            f"error: {type(error).__name__}: {error}\nwhat to do: set BRAINPATCH_DEBUG=1 to see where, and report it"
        )
        return NO
