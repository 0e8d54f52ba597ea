"""Options that several commands share, declared once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from brainpatch.errors import PatchCompatibilityError
from brainpatch.patch.compatibility import MODES
from brainpatch.patch.text import visible


def one_of(*allowed: str) -> Callable[[str | None], str | None]:
    """An option's callback that refuses any other value as wrong use."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in allowed:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(allowed)}")
        return value

    return check


def _known_mode(mode: str) -> str:
    # Here already, so that a slip of the pen does not wait for a model to load.
    if mode not in MODES:
        raise PatchCompatibilityError("BP202", f"{visible(repr(mode), 40)} is not a mode")
    return mode


JSON = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
MODEL = Annotated[str, typer.Option("--model", "-m", help="A model: hub id or folder.")]
MODEL_OPTIONAL = Annotated[
    str | None, typer.Option("--model", "-m", help="Also check against this model: hub id or folder.")
]
MODEL_ID = Annotated[
    str | None,
    typer.Option("--model-id", help="Which model a folder holds, as patches name it."),
]
BACKEND = Annotated[str, typer.Option("--backend", "-b", help="The engine: auto, transformers, vllm, ...")]
DEVICE = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, mps.")]
DTYPE = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16, float16.")]
MODE = Annotated[
    str,
    typer.Option(
        "--mode",
        "--compatibility",
        callback=_known_mode,
        help="How a patch must fit: strict, architecture, unsafe.",
    ),
]
PATCHES = Annotated[
    list[str],
    typer.Option(
        "--patch", "-p", help="A patch: name, path or owner/repo, with a strength as in formal@0.8."
    ),
]
MAX_TOKENS = Annotated[int, typer.Option("--max-tokens", help="At most this many new tokens.")]
TEMPERATURE = Annotated[float, typer.Option("--temperature", help="0 takes the likeliest token.")]
SEED = Annotated[int, typer.Option("--seed", help="For a temperature above 0.")]
SYSTEM = Annotated[str | None, typer.Option("--system", help="A system message.")]
PLAIN = Annotated[bool, typer.Option("--no-chat-template", help="Give the prompt to the model as it is.")]
