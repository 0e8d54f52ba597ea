"""Commands that run a model: run, compare, trace."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from brainpatch.cli.options import (
    BACKEND,
    DEVICE,
    DTYPE,
    JSON,
    MAX_TOKENS,
    MODE,
    MODEL,
    MODEL_ID,
    PATCHES,
    PLAIN,
    SEED,
    SYSTEM,
    TEMPERATURE,
)
from brainpatch.cli.output import (
    engine_prints_to_stderr,
    note,
    say,
    say_json,
    say_text,
    stdout_is_a_terminal,
    table,
)
from brainpatch.errors import RequestError
from brainpatch.patch.file import LoadedPatch, load_patch
from brainpatch.patch.names import split_strength
from brainpatch.patch.registry import default_registry

if TYPE_CHECKING:
    from brainpatch.runtime.model import BrainPatchedModel
    from brainpatch.runtime.requests import TraceRow

Wanted: TypeAlias = "tuple[LoadedPatch | str, float | None]"
"""A patch, or a hub's name for one, and the strength that was given with it."""

STRENGTH = Annotated[float | None, typer.Option("--strength", "-s", help="The strength of all patches.")]


def register(app: typer.Typer) -> None:
    """Add these commands to the program."""
    for command in (run, compare, trace):
        app.command()(command)


@contextmanager
def loaded_model(
    model: str, backend: str, device: str, dtype: str, mode: str, model_id: str | None
) -> Iterator[BrainPatchedModel]:
    from brainpatch.runtime.model import BrainPatchedModel

    note(f"loading {model}")
    named: dict[str, Any] = {"model_id": model_id} if model_id else {}
    with (
        engine_prints_to_stderr(),
        BrainPatchedModel.from_pretrained(
            model, backend=backend, device=device, dtype=dtype, compatibility_mode=mode, **named
        ) as loaded,
    ):
        yield loaded


def find_patches(patches: Iterable[str], strengths: Iterable[float | None]) -> list[Wanted]:
    """The patches of a command line with the strengths that they carry.

    What can be refused before a model is loaded is refused here, the `strengths` of the command too. A hub's
    patch that is not here is left as it is named: the model fetches it.
    """
    from brainpatch.runtime.meaning import finite_strength

    wanted: list[Wanted] = []
    for text in patches:
        ref, strength = split_strength(text)
        path = default_registry().find(ref)
        wanted.append((ref if path is None else load_patch(path), strength))
    for number in (*strengths, *(strength for _, strength in wanted)):
        if number is not None:
            finite_strength(number, "strength")
    _refuse_twins([patch.name for patch, _ in wanted if isinstance(patch, LoadedPatch)])
    return wanted


def _install(model: BrainPatchedModel, wanted: Iterable[Wanted], strength: float | None) -> list[str]:
    names: list[str] = []
    for patch, own in wanted:
        names.append(model.install(patch, strength=own if strength is None else strength).name)
        _refuse_twins(names)
    return names


def _refuse_twins(names: list[str]) -> None:
    # The second would silently replace the first.
    for name in names:
        if names.count(name) > 1:
            raise RequestError("BP403", f"two patches are called {name}", "Give one of them.")


def _config(max_tokens: int, temperature: float, seed: int) -> Any:
    from brainpatch.runtime.config import GenerationConfig

    config = GenerationConfig(max_new_tokens=max_tokens, temperature=temperature, seed=seed)
    config.validate()
    return config


def _prompt(text: str, system: str | None) -> str:
    """The prompt, read from stdin for `-`."""
    if text == "-" and sys.stdin is None:
        raise RequestError("BP405", "stdin is closed")
    try:
        prompt = sys.stdin.read() if text == "-" else text
        # A byte that is not UTF-8 arrives as a lone surrogate.
        (prompt + (system or "")).encode()
    except UnicodeError:
        raise RequestError("BP405", "the prompt or the system message is not UTF-8") from None
    if not prompt:
        raise RequestError("BP405", "the prompt is empty")
    return prompt


def run(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    model: MODEL,
    patch: PATCHES = [],  # noqa: B006 - read by typer only
    backend: BACKEND = "auto",
    device: DEVICE = "auto",
    dtype: DTYPE = "auto",
    strength: STRENGTH = None,
    max_tokens: MAX_TOKENS = 128,
    temperature: TEMPERATURE = 0.0,
    seed: SEED = 0,
    system: SYSTEM = None,
    no_chat_template: PLAIN = False,
    compatibility: MODE = "strict",
    model_id: MODEL_ID = None,
    as_json: JSON = False,
) -> None:
    """Answer a prompt, with patches.

    Example: brainpatch run "How was your day?" -m MODEL -p formal@0.8
    """
    text = _prompt(prompt, system)
    config = _config(max_tokens, temperature, seed)
    wanted = find_patches(patch, [strength])
    chat: dict[str, Any] = {"use_chat_template": not no_chat_template, "system": system}
    with loaded_model(model, backend, device, dtype, compatibility, model_id) as loaded:
        _install(loaded, wanted, strength)
        if as_json:
            answer = loaded.generate_detailed([text], config, **chat)[0]
            say_json(
                {
                    "text": answer.text,
                    "finish_reason": answer.finish_reason,
                    "prompt_tokens": answer.prompt_tokens,
                    "completion_tokens": len(answer.token_ids),
                    "patches": answer.patches,
                    "digest": answer.digest,
                    "backend": loaded.backend.name,
                }
            )
        elif stdout_is_a_terminal() and loaded.capabilities().streaming:
            for piece in loaded.stream(text, config, **chat):
                say_text(piece, end="")
            say("")
        else:
            say_text(loaded.generate(text, config, **chat))


def compare(
    model: MODEL,
    patch: PATCHES,
    prompt: Annotated[str, typer.Option("--prompt", help="The prompt; - reads it from stdin.")],
    backend: BACKEND = "auto",
    device: DEVICE = "auto",
    dtype: DTYPE = "auto",
    strength: Annotated[
        list[float], typer.Option("--strength", "-s", help="A strength of all patches; may be repeated.")
    ] = [],  # noqa: B006 - read by typer only
    max_tokens: MAX_TOKENS = 128,
    temperature: TEMPERATURE = 0.0,
    seed: SEED = 0,
    system: SYSTEM = None,
    no_chat_template: PLAIN = False,
    compatibility: MODE = "strict",
    model_id: MODEL_ID = None,
    as_json: JSON = False,
) -> None:
    """Answer a prompt without patches and with them, at one or several strengths.

    Example: brainpatch compare -m MODEL -p formal --prompt "How was your day?" -s 0.5 -s 1
    """
    text = _prompt(prompt, system)
    config = _config(max_tokens, temperature, seed)
    wanted = find_patches(patch, strength)
    with loaded_model(model, backend, device, dtype, compatibility, model_id) as loaded:
        names = _install(loaded, wanted, None)
        arms: list[dict[str, Any]] = [{}]
        arms += [dict.fromkeys(names, value) for value in strength] or [{name: {} for name in names}]
        answers = loaded.generate_detailed(
            [text] * len(arms),
            config,
            patches=arms,
            use_chat_template=not no_chat_template,
            system=system,
        )
    if as_json:
        say_json(
            {
                "prompt": text,
                "answers": [{"patches": a.patches, "digest": a.digest, "text": a.text} for a in answers],
            }
        )
        return
    for answer in answers:
        label = ", ".join(f"{name} {_strength(value):+g}" for name, value in answer.patches.items())
        say(f"--- {label or 'baseline'}")
        say_text(f"{answer.text}\n")


def _strength(value: Any) -> float:
    return float(value["strength"] if isinstance(value, dict) else value)


def trace(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    model: MODEL,
    patch: PATCHES,
    backend: BACKEND = "auto",
    device: DEVICE = "auto",
    dtype: DTYPE = "auto",
    strength: STRENGTH = None,
    max_tokens: MAX_TOKENS = 16,
    system: SYSTEM = None,
    no_chat_template: PLAIN = False,
    compatibility: MODE = "strict",
    model_id: MODEL_ID = None,
    as_json: JSON = False,
) -> None:
    """Show what patches really add, by layer and position.

    Example: brainpatch trace "How was your day?" -m MODEL -p formal
    """
    text = _prompt(prompt, system)
    config = _config(max_tokens, 0.0, 0)
    wanted = find_patches(patch, [strength])
    with loaded_model(model, backend, device, dtype, compatibility, model_id) as loaded:
        _install(loaded, wanted, strength)
        rows = loaded.trace(text, config, use_chat_template=not no_chat_template, system=system)
    if as_json:
        say_json([_numbers(row) for row in rows])
    elif not rows:
        say("nothing was added")
    else:
        say(*table(("layer", "positions", "norm", "expected", "ratio"), _stretches(rows)))


def _numbers(row: TraceRow) -> dict[str, Any]:
    """A row as plain values; JSON has no NaN and no infinity, so None stands for them."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row._asdict().items()
    }


def _stretches(rows: list[TraceRow]) -> list[tuple[Any, ...]]:
    """Neighbouring positions of a layer with one expected norm as one line, with the norm farthest from it."""
    groups: list[list[TraceRow]] = []
    for row in rows:
        last = groups[-1][-1] if groups else None
        if last and (last.layer, last.position + 1, last.expected) == (row.layer, row.position, row.expected):
            groups[-1].append(row)
        else:
            groups.append([row])
    lines = []
    for group in groups:
        worst = max(group, key=lambda row: abs(row.norm - row.expected))
        ends = f"{group[0].position}..{group[-1].position}" if len(group) > 1 else str(group[0].position)
        ratio = f"{worst.norm / worst.expected:.6f}" if worst.expected else "-"
        lines.append((worst.layer, ends, f"{worst.norm:.4f}", f"{worst.expected:.4f}", ratio))
    return lines
