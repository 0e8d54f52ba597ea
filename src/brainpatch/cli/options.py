"""Options that several commands share, declared once."""

from __future__ import annotations

from typing import Annotated

import typer

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
    str, typer.Option("--mode", "--compatibility", help="How a patch must fit: strict, architecture, unsafe.")
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


def split_strength(text: str) -> tuple[str, float | None]:
    """`formal@0.8` as ("formal", 0.8); a path may hold an @ of its own."""
    name, at, number = text.rpartition("@")
    try:
        strength = float(number)
    except ValueError:
        return text, None
    return (name, strength) if at and name else (text, None)
