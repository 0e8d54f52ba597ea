"""Where the decoder blocks of a loaded vLLM model are."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from brainpatch.errors import EngineError

PATHS = (
    "language_model.model.layers",  # wrappers first: a vision tower may hold a list called model.layers
    "model.language_model.layers",
    "model.text_model.layers",
    "model.layers",
    "model.decoder.layers",
    "transformer.h",
    "transformer.blocks",
    "transformer.encoder.layers",
    "backbone.layers",
    "model.h",
)
"""Where vLLM's models keep their block list, in the order tried."""


class Location(NamedTuple):
    """The block list: its path, the number of blocks of the whole model, and those of this rank."""

    path: str
    total: int
    local: dict[int, nn.Module]


def find_blocks(model: nn.Module, count: int) -> Location:
    """The blocks of a model with `count` of them, on this rank: placeholders of other ranks are left out.

    EngineError (BP503) names what was looked for and what was found.
    """
    modules = dict(model.named_modules())
    found = []
    for path in PATHS:
        blocks = modules.get(path)
        if not isinstance(blocks, nn.ModuleList):
            continue
        if len(blocks) == count:
            local = {i: block for i, block in enumerate(blocks) if type(block).__name__ != "PPMissingLayer"}
            return Location(path, count, local)
        found.append(f"{len(blocks)} at {path}")
    raise EngineError(
        "BP503",
        f"{type(model).__name__}: looked for {count} blocks at {', '.join(PATHS)}; "
        f"found {', '.join(found) or 'none'}",
    )


def block_count(text_config: Any) -> int:
    """How many decoder blocks the model's config names."""
    for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        if isinstance(value := getattr(text_config, name, None), int):
            return value
    raise EngineError("BP503", f"the config of {text_config.model_type} names no number of blocks")
