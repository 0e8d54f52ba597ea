"""Commands about this machine: doctor, backends."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from brainpatch.cli.options import JSON
from brainpatch.cli.output import say, say_json, table


def register(app: typer.Typer) -> None:
    """Add these commands to the program."""
    app.command()(doctor)
    app.command()(backends)


def doctor(
    parity: Annotated[
        bool,
        typer.Option("--parity", help="Load a model on every engine, and see whether they agree."),
    ] = False,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="For --parity: the model, a hub id or folder.")
    ] = None,
    gguf: Annotated[
        Path | None, typer.Option("--gguf", help="For --parity: the same weights for llama.cpp, in F32.")
    ] = None,
    engine: Annotated[
        list[str],
        typer.Option("--engine", help="For --parity: an engine (more than once); all that are installed."),
    ] = [],  # noqa: B006
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="For --parity: how many, 12 at most.")] = 3,
    steps: Annotated[int, typer.Option("--steps", min=1, help="For --parity: tokens of an answer.")] = 8,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="For --parity: a picture to write (.png, .svg, .pdf).")
    ] = None,
    as_json: JSON = False,
) -> None:
    """Say what is installed here and what is missing. Exit status 3 without any engine.

    With --parity, compare the engines on a model; exit status 1 when they do not agree.

    Example: brainpatch doctor --parity --model ./model --gguf model-f32.gguf
    """
    if parity:
        from brainpatch.cli.parity import compare_engines

        if model is None:
            raise typer.BadParameter("--parity needs a model", param_hint="--model")
        agree = compare_engines(model, gguf, engine, prompts=prompts, steps=steps, plot=plot, as_json=as_json)
        raise typer.Exit(0 if agree else 1)
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
