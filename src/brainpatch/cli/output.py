"""What reaches a person's terminal and what reaches a program, and nothing else.

Results go to stdout, everything else to stderr. Text that came from a file or a model is printed with what
could act on a terminal made visible; `--json` output is ASCII.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO

import typer

from brainpatch.cli.status import READER_GONE
from brainpatch.errors import ERRORS, BrainPatchError
from brainpatch.patch.text import visible

_NO_LIMIT = 1 << 30
_MAX_REASON = 4000

_results: TextIO | None = None
"""Where results go while `sys.stdout` stands for something else."""


def shown(text: str) -> str:
    """Text of several lines made safe to print: line breaks and tabs stay."""
    return "\n".join(
        "\t".join(visible(part, _NO_LIMIT) for part in line.split("\t")) for line in text.split("\n")
    )


def say(*lines: str) -> None:
    """Print results to stdout. Each is one line, whatever it holds."""
    _print("\n".join(visible(line, _NO_LIMIT) for line in lines))


def say_text(text: str, *, end: str = "\n") -> None:
    """Print a model's or an author's text, with its line breaks and tabs."""
    _print(shown(text), end)


def say_json(value: Any) -> None:
    """Print a result as one JSON document. ValueError for a number that JSON does not have."""
    _print(json.dumps(value, indent=2, allow_nan=False))


def note(*lines: str) -> None:
    """Tell a person something that is not the result. Each is one line, whatever it holds."""
    typer.echo("\n".join(visible(line, _NO_LIMIT) for line in lines), err=True)


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """The lines of plain columns, as wide as their contents."""
    lines = [[visible(str(cell), 60) for cell in row] for row in (head, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


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


def show_error(code: str, title: str, reason: str, remedy: str, *, as_json: bool) -> None:
    """An error for a person on stderr, or for a program on stdout."""
    if as_json:
        say_json({"error": {"code": code, "title": title, "reason": reason, "remedy": remedy}})
        return
    head = f"{code} {title}" if code in ERRORS else title
    note(f"error: {head}: {visible(reason, _MAX_REASON)}", f"what to do: {remedy}")


def show_brainpatch_error(error: BrainPatchError, *, as_json: bool) -> None:
    """As `show_error`, for an error with a code of the table."""
    show_error(error.code, ERRORS[error.code].title, error.reason, error.remedy, as_json=as_json)


# --- stdout is for results alone --------------------------------------------------------------


def claim_stdout() -> None:
    """Take stdout for results: what native libraries and child processes write to it goes to stderr.

    What the terminal's encoding lacks is shown escaped. Does nothing when stdout or stderr is closed.
    """
    with contextlib.suppress(AttributeError, OSError):
        number = sys.stdout.fileno()
        kept = os.dup(number)
        os.dup2(sys.stderr.fileno(), number)
        sys.stdout = os.fdopen(kept, "w", encoding=sys.stdout.encoding, errors="backslashreplace")


@contextlib.contextmanager
def engine_prints_to_stderr() -> Iterator[None]:
    """What Python code prints meanwhile goes to stderr; `say` and its like still write to stdout."""
    global _results
    _results = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _results = None


def stdout_is_a_terminal() -> bool:
    """Whether a person sees results as they are printed."""
    stream = _results or sys.stdout
    return stream is not None and stream.isatty()


def settle_stdout() -> None:
    """Write out what is buffered; where that is not possible, make sure that Python does not try again."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print(text: str, end: str = "\n") -> None:
    try:
        typer.echo(text + end, file=_results, nl=False)
    except BrokenPipeError:
        settle_stdout()
        raise SystemExit(READER_GONE) from None
