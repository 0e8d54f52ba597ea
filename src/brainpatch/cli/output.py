"""What reaches a person's terminal and what reaches a program, and nothing else.

Results go to stdout, everything else to stderr. Text that came from a file or a model is printed with what
could act on a terminal made visible; `--json` output is ASCII.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import typer

from brainpatch.errors import ERRORS, BrainPatchError
from brainpatch.patch.text import visible

_NO_LIMIT = 1 << 30


def shown(text: str) -> str:
    """Text of several lines made safe to print: line breaks and tabs stay."""
    return "\n".join(
        "\t".join(visible(part, _NO_LIMIT) for part in line.split("\t")) for line in text.split("\n")
    )


def say(text: str) -> None:
    """Print a result to stdout."""
    typer.echo(shown(text))


def note(text: str) -> None:
    """Tell a person something that is not the result."""
    typer.echo(shown(text), err=True)


def say_json(value: Any) -> None:
    """Print a result as one JSON document."""
    typer.echo(json.dumps(value, indent=2, default=str))


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Plain columns, as wide as their contents."""
    lines = [[visible(str(cell), 60) for cell in row] for row in (head, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def progress(what: str) -> Callable[[int, int], None]:
    """A progress line on stderr: rewritten in place on a terminal, silent elsewhere until the end."""
    live = sys.stderr.isatty()

    def step(done: int, total: int) -> None:
        if live:
            end = "\n" if done == total else ""
            typer.echo(f"\r{what}: {done}/{total}{end}", err=True, nl=False)
        elif done == total:
            note(f"{what}: {total}/{total}")

    return step


def show_warnings_as_notes() -> None:
    """Python warnings as one line on stderr."""

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if category.__module__.startswith("brainpatch") or issubclass(category, UserWarning):
            note(f"warning: {message}")

    warnings.showwarning = show
    warnings.simplefilter("default", UserWarning)


def show_error(error: BrainPatchError, *, as_json: bool) -> None:
    """An error for a person on stderr, or for a program on stdout."""
    title = ERRORS[error.code].title
    if as_json:
        say_json(
            {"error": {"code": error.code, "title": title, "reason": error.reason, "remedy": error.remedy}}
        )
        return
    note(f"error: {error.code} {title}: {error.reason}\nwhat to do: {error.remedy}")


def close_stdout_quietly() -> None:
    """After a broken pipe: nothing more can be printed, and Python must not try at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
