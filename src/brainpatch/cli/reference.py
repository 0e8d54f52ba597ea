"""The page docs/cli.md, made from the program itself."""

from __future__ import annotations

from typing import Any

import typer

from brainpatch.cli.main import app
from brainpatch.cli.status import EXIT_STATUS


def markdown() -> str:
    """Every command with its arguments, options, defaults and example."""
    group: Any = typer.main.get_command(app)
    lines = [
        "# Command line",
        "",
        "<!-- made by tools/generate_docs.py from brainpatch.cli: do not edit -->",
        "",
        "Results go to stdout; progress, warnings and errors go to stderr. `--json` prints one JSON document and",
        'nothing else, for an error `{"error": {"code", "title", "reason", "remedy"}}`; its code is one of',
        "[docs/errors](errors.md), `usage` or `internal`. Text from a file or a model is shown with control characters",
        "made visible. `brainpatch --install-completion` sets up your shell.",
        "",
        "| exit status | means |",
        "|---|---|",
        "| 0 | yes |",
        "| 1 | the answer is no: invalid, incompatible, refused |",
        f"| 2 | wrong use, and {_codes(2)} |",
        f"| 3 | what is needed is not there: {_codes(3)} |",
        "| 130 | interrupted |",
        "| 141 | whatever read stdout ended first |",
    ]
    for name, command in sorted(group.commands.items()):
        lines += ["", f"## brainpatch {name}", ""]
        lines += [text.strip() + "\n" for text in (command.help or "").split("\n\n")]
        lines += ["| argument | default | |", "|---|---|---|"]
        lines += [_row(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)]
    return "\n".join(lines) + "\n"


def _codes(status: int) -> str:
    return ", ".join(code for code, number in EXIT_STATUS.items() if number == status)


def _row(parameter: Any) -> str:
    is_option = parameter.param_type_name == "option"
    name = ", ".join(parameter.opts) if is_option else str(parameter.name).upper()
    default = parameter.default
    if parameter.required:
        default = "required"
    elif default is None or default is False or default == [] or callable(default):
        default = ""
    return f"| `{name}` | {default} | {parameter.help or ''} |"
