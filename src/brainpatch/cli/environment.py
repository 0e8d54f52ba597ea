"""Commands about this machine: doctor, backends."""

from __future__ import annotations

from typing import Any

import typer

from brainpatch.cli.options import JSON
from brainpatch.cli.output import say, say_json, table


def register(app: typer.Typer) -> None:
    """Add these commands to the program."""
    app.command()(doctor)
    app.command()(backends)


def doctor(as_json: JSON = False) -> None:
    """Say what is installed here and what is missing. Exit status 3 without any engine.

    Example: brainpatch doctor
    """
    from brainpatch.runtime.discovery import environment_report

    report = environment_report()
    usable = any(state["available"] for state in report["backends"])
    if as_json:
        say_json(report)
    else:
        say(f"brainpatch {report['brainpatch_version']}, Python {report['python']}, {report['platform']}")
        installed = ", ".join(report["installed_patches"]) or "none"
        say(f"registry {report['registry_home']}; installed patches: {installed}", "")
        say(*_states(report["backends"]))
        if not usable:
            say(
                "",
                "no engine is available: pip install 'brainpatch[transformers]' is the shortest way to one",
            )
    raise typer.Exit(0 if usable else 3)


def backends(as_json: JSON = False) -> None:
    """List the engines and what each can do.

    Example: brainpatch backends --json
    """
    from brainpatch.runtime.capabilities import ALL_FLAGS
    from brainpatch.runtime.discovery import available_backends

    states = available_backends()
    if as_json:
        say_json([state.to_dict() for state in states])
        return
    say(*_states([state.to_dict() for state in states]))
    able = [state.capabilities for state in states if state.capabilities]
    rows = [(flag, *("yes" if engine.supports(flag) else "-" for engine in able)) for flag in ALL_FLAGS]
    say("", *table(("can", *(engine.name for engine in able)), rows))
    for engine in able:
        for flag, text in engine.notes.items():
            say(f"{engine.name} {flag}: {text}")


def _states(states: list[dict[str, Any]]) -> list[str]:
    rows = [(s["backend"], "yes" if s["available"] else "no", s["detail"]) for s in states]
    width = max(len(row[0]) for row in rows)
    return [f"{name:<{width}}  {usable:<3}  {detail}" for name, usable, detail in rows]
