"""The command that makes a patch from examples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from brainpatch.cli.options import DEVICE, DTYPE, JSON, MODEL, MODEL_ID, one_of
from brainpatch.cli.output import engine_prints_to_stderr, note, progress, say, say_json
from brainpatch.patch.file import free_target
from brainpatch.patch.limits import MAX_NUM_LAYERS
from brainpatch.patch.manifest import Intervention
from brainpatch.patch.names import check_patch_name

if TYPE_CHECKING:
    from brainpatch.backends.transformers_backend import TransformersBackend


def register(app: typer.Typer) -> None:
    """Add this command to the program."""
    app.command()(learn)


def learn(
    model: MODEL,
    pairs: Annotated[Path, typer.Option("--pairs", help="Contrast pairs, one JSON object a line.")],
    name: Annotated[str, typer.Option("--name", help="The patch's name.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The patch to write.")],
    method: Annotated[
        str, typer.Option("--method", callback=one_of("mean-difference"), help="mean-difference.")
    ] = "mean-difference",
    layers: Annotated[
        str, typer.Option("--layers", help="15, 10-20, 3,15 or auto: the middle block.")
    ] = "auto",
    position: Annotated[
        str | None,
        typer.Option(
            "--position",
            callback=one_of("last", "mean", "completion"),
            help="Which tokens are read: last, mean, completion.",
        ),
    ] = None,
    site: Annotated[
        str,
        typer.Option(
            "--site",
            callback=one_of("all", "prompt", "continuation"),
            help="Where it is added: all, prompt, continuation.",
        ),
    ] = "all",
    coefficient: Annotated[float, typer.Option("--coefficient", help="Baked-in factor.")] = 1.0,
    description: Annotated[str, typer.Option("--description", help="What it is for.")] = "",
    model_id: MODEL_ID = None,
    backend: Annotated[
        str,
        typer.Option(
            "--backend",
            "-b",
            callback=one_of("transformers", "hf", "torch", "pytorch"),
            help="The engine that reads: transformers.",
        ),
    ] = "transformers",
    device: DEVICE = "auto",
    dtype: DTYPE = "auto",
    force: Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")] = False,
    as_json: JSON = False,
) -> None:
    """Learn a direction from contrasting examples and write a patch.

    Example: brainpatch learn -m MODEL --pairs pairs.jsonl --name formal -o formal.brainpatch --layers 15
    """
    from brainpatch.learn.contrast import learn_patch, read_pairs
    from brainpatch.runtime.discovery import select_backend

    # All that can be refused before a model is loaded is refused here.
    wanted = _layers(layers)
    check_patch_name(name)
    Intervention(0, "v", coefficient).validate()
    free_target(output, overwrite=force)
    examples = read_pairs(pairs)
    note(f"loading {model}")
    with select_backend(backend) as engine, engine_prints_to_stderr():
        engine.load_model(model, device=device, dtype=dtype, model_id=model_id)
        learned = learn_patch(
            cast("TransformersBackend", engine),
            examples,
            name,
            output,
            layers=wanted,
            position=position,
            site=cast("Any", site),
            coefficient=coefficient,
            description=description,
            overwrite=force,
            progress=progress("reading"),
        )
    measured = [
        {"layer": layer, "direction_norm": direction, "stream_norm": stream}
        for layer, direction, stream in zip(
            learned.layers, learned.direction_norms, learned.stream_norms, strict=True
        )
    ]
    path = str(learned.patch.source)
    if as_json:
        say_json({"path": path, "name": name, "pairs": len(examples.items), "layers": measured})
        return
    for row in measured:
        say(
            f"block {row['layer']}: direction norm {row['direction_norm']:.2f}, "
            f"stream norm {row['stream_norm']:.2f}"
        )
    say(f"wrote {path} from {len(examples.items)} pairs")


def _layers(text: str) -> list[int] | None:
    """`15`, `10-20`, `3,15` or `auto` as block numbers."""
    if text == "auto":
        return None
    chosen: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < MAX_NUM_LAYERS:
            raise typer.BadParameter(f"{text!r} is not like 15, 10-20, 3,15 or auto", param_hint="--layers")
        chosen.update(range(first, last + 1))
    return sorted(chosen)
