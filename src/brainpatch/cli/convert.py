"""The command that writes a patch for other tools: convert."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from brainpatch.cli.options import JSON
from brainpatch.cli.output import say, say_json
from brainpatch.convert import convert as convert_file
from brainpatch.convert import readable, writable
from brainpatch.patch.registry import default_registry


def register(app: typer.Typer) -> None:
    """Add this command to the program."""
    app.command()(convert)


def convert(
    source: Annotated[str, typer.Argument(help="An installed name or a path.")],
    output: Annotated[Path, typer.Argument(help="The file to write.")],
    source_format: Annotated[
        str | None,
        typer.Option("--from", help=f"What it is: {', '.join(readable())}. Left out: told by the file."),
    ] = None,
    output_format: Annotated[
        str | None,
        typer.Option(
            "--to", help=f"What to write: {', '.join(writable())}. Left out: told by the output's suffix."
        ),
    ] = None,
    strength: Annotated[
        float | None,
        typer.Option("--strength", "-s", help="The strength that is put in; left out: the patch's default."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")] = False,
    as_json: JSON = False,
) -> None:
    """Write a patch as a file of another tool. What that tool cannot say is refused (exit status 1).

    Example: brainpatch convert formal.brainpatch formal.gguf --strength 0.8
    """
    written = convert_file(
        default_registry().resolve(source),
        output,
        source_format=source_format,
        output_format=output_format,
        strength=strength,
        overwrite=force,
    )
    if as_json:
        say_json({"path": str(written.path), **written.facts})
    else:
        say(f"wrote {written.path}", *written.lines)
