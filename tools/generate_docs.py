#!/usr/bin/env python3
"""Write the pages that repeat code: docs/errors.md, docs/cli.md, docs/engines/families.md and
capabilities.md.

`generate_docs.py` writes them; a test compares them with what this module returns.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from brainpatch.errors import ERRORS

ROOT = Path(__file__).resolve().parent.parent

GROUPS = {
    "1": "The file",
    "2": "Patch and model",
    "3": "Registry and hub",
    "4": "The request",
    "5": "The engine",
    "6": "Tools",
    "7": "The server",
}


def errors_page() -> str:
    """The index of error codes."""
    lines = [
        "# Errors",
        "",
        "<!-- made by tools/generate_docs.py from brainpatch.errors: do not edit -->",
        "",
        "Every error is a `BrainPatchError` with a stable `.code`, the `.reason` in the case at hand and a",
        "`.remedy`. A code never changes its meaning.",
    ]
    group = ""
    for code, kind in ERRORS.items():
        if code[2] != group:
            group = code[2]
            lines += ["", f"## {GROUPS[group]}"]
        lines += ["", f"### {code} {kind.title}", "", kind.meaning, "", f"*What to do:* {kind.remedy}"]
    return "\n".join(lines) + "\n"


def cli_page() -> str:
    """The command line's reference."""
    from brainpatch.cli.reference import markdown

    return markdown()


def families_page() -> str:
    """The model families."""
    from brainpatch.backends.families import markdown_table

    return markdown_table()


def capabilities_page() -> str:
    """What each engine can do."""
    from brainpatch.runtime.capabilities import ALL_FLAGS
    from brainpatch.runtime.discovery import ENGINES, backend_class

    engines = [backend_class(name).capabilities() for name in ENGINES]
    names = [engine.name for engine in engines]
    lines = [
        "# What each engine can do",
        "",
        "<!-- made by tools/generate_docs.py from the engines' capabilities: do not edit -->",
        "",
        "`brainpatch backends` shows the same. What an engine lacks is refused by name, before anything is",
        "generated. A number in brackets is a note below the table.",
        "",
        f"| | {' | '.join(f'[{name}]({name}.md)' for name in names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    notes: list[str] = []
    for flag in ALL_FLAGS:
        cells = []
        for engine in engines:
            cell = "yes" if engine.supports(flag) else "no"
            if note := engine.notes.get(flag):
                notes.append(f"{engine.name}: {note}")
                cell += f" [{len(notes)}]"
            cells.append(cell)
        lines.append(f"| {flag.replace('_', ' ')} | {' | '.join(cells)} |")
    lines += ["", *(f"{number}. {note}." for number, note in enumerate(notes, 1))]
    return "\n".join(lines) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "docs/errors.md": errors_page,
    "docs/cli.md": cli_page,
    "docs/engines/families.md": families_page,
    "docs/engines/capabilities.md": capabilities_page,
}


def main() -> None:
    """Write all pages."""
    for name, page in PAGES.items():
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(), encoding="utf-8")
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
