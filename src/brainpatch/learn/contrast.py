"""From contrasting examples to a patch: difference of means."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from brainpatch import __version__
from brainpatch.backends.prompts import prompt_ids
from brainpatch.errors import LearnError, PatchFormatError
from brainpatch.learn.activations import Reading, read_activations
from brainpatch.patch.file import LoadedPatch, load_patch, save_patch
from brainpatch.patch.manifest import BaseModelSpec, Intervention, Manifest, Site
from brainpatch.patch.strict_json import parse

if TYPE_CHECKING:
    from brainpatch.backends.transformers_backend import TransformersBackend
    from brainpatch.runtime.requests import Prompt

POSITIONS = {"last": "last_prompt", "mean": "all_tokens", "completion": "cont_mean"}
"""Which tokens are read -> what provenance calls it."""

_MINIMUM = 2


class Pair(NamedTuple):
    """One contrast. With a `prompt`, the two sides are answers to it; without, whole texts or chats."""

    prompt: Prompt | None
    positive: Prompt
    negative: Prompt


@dataclass(frozen=True)
class Pairs:
    """Contrast pairs and the SHA-256 (hex) of the file they came from."""

    items: tuple[Pair, ...]
    digest: str


class Learned(NamedTuple):
    """A patch that was made, and what was measured on the way, by layer."""

    patch: LoadedPatch
    layers: tuple[int, ...]
    direction_norms: tuple[float, ...]
    stream_norms: tuple[float, ...]


def read_pairs(path: str | Path) -> Pairs:
    """Read contrast pairs from JSON Lines.

    A line is {"positive": ..., "negative": ...}, each a string or chat messages, or
    {"prompt": ..., "positive": "...", "negative": "..."} for two answers to one prompt.
    Errors: LearnError (BP601) naming the line.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise LearnError("BP101", f"{path}: {error.strerror or error}") from None
    items = []
    for number, line in enumerate(data.splitlines(), start=1):
        if line.strip():
            items.append(_pair(line, f"{path} line {number}"))
    if len(items) < _MINIMUM:
        raise LearnError("BP601", f"{path} has {len(items)} pairs; at least {_MINIMUM} are needed")
    return Pairs(tuple(items), hashlib.sha256(data).hexdigest())


def _pair(line: bytes, where: str) -> Pair:
    try:
        value = parse(line, where)
    except PatchFormatError as error:
        raise LearnError("BP601", error.reason) from None
    if not isinstance(value, Mapping):
        raise LearnError("BP601", f"{where} is not an object")
    unknown = set(value) - {"prompt", "positive", "negative"}
    if unknown:
        raise LearnError("BP601", f"{where} has the unknown key {min(unknown)!r}")
    for side in ("positive", "negative"):
        text = value.get(side)
        if not text or not isinstance(text, (str, list)):
            raise LearnError("BP601", f"{where}: {side} is missing, empty, or neither text nor messages")
        if "prompt" in value and not isinstance(text, str):
            raise LearnError("BP601", f"{where}: beside a prompt, {side} is a string")
    prompt = value.get("prompt")
    if prompt is not None and (not prompt or not isinstance(prompt, (str, list))):
        raise LearnError("BP601", f"{where}: prompt is empty, or neither text nor messages")
    return Pair(prompt, value["positive"], value["negative"])


def learn_patch(
    backend: TransformersBackend,
    pairs: Pairs,
    name: str,
    output: str | Path,
    *,
    layers: Sequence[int] | None = None,
    position: str | None = None,
    site: Site = "all",
    coefficient: float = 1.0,
    description: str = "",
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Learned:
    """Make a patch from contrast pairs: at each layer, mean(positive) - mean(negative).

    `layers` None takes the middle block. `position`: `last` token, `mean` of all tokens but the first
    (which holds the attention sink, hundreds of times larger than the rest), or `completion`, the mean
    over an answer's tokens; None takes completion for pairs with a prompt, mean for others. The
    direction is stored in float32 as it is, not normalised; `coefficient` is baked in. Equal inputs on
    one machine give equal bytes. Errors: LearnError (BP601, BP602), PatchFormatError, PatchExistsError.
    """
    import numpy as np

    model = backend.describe_model()
    chosen = tuple(layers) if layers else (model.num_layers // 2,)
    for layer in chosen:
        if not 0 <= layer < model.num_layers:
            raise LearnError("BP602", f"layer {layer} is not in 0..{model.num_layers - 1}")
    where = position or ("completion" if pairs.items[0].prompt is not None else "mean")
    if where not in POSITIONS:
        raise LearnError("BP602", f"position {where!r} is not one of {', '.join(POSITIONS)}")
    manifest = Manifest(
        name,
        BaseModelSpec(
            model.model_id, model.architecture, model.hidden_size, model.num_layers, model.revision
        ),
        [Intervention(layer, f"layer_{layer}", coefficient, site=site) for layer in chosen],
        description=description,
        evidence_level="none",
    )
    manifest.validate()
    readings = [_reading(backend.tokenizer, pair, side, where) for pair in pairs.items for side in (1, 2)]
    activations = read_activations(backend, readings, chosen, progress=progress)
    directions = activations.means[0::2].mean(axis=0) - activations.means[1::2].mean(axis=0)
    norms = np.linalg.norm(directions, axis=1)
    for layer, norm in zip(chosen, norms, strict=True):
        if not np.isfinite(norm) or norm == 0:
            raise LearnError("BP602", f"at layer {layer} the two classes have the same mean")
    manifest.provenance = {
        "discovery_method": "caa",
        "discovery_layer": chosen[0],
        "extraction_position": POSITIONS[where],
        "injection_site": site,
        "training_dataset_hash": pairs.digest,
        "strength_calibration": {
            str(layer): {
                "direction_norm": round(float(norm), 4),
                "stream_norm": round(float(stream), 4),
                "relative_dose_at_strength_1": round(float(abs(coefficient) * norm / stream), 4),
            }
            for layer, norm, stream in zip(chosen, norms, activations.norms, strict=True)
        },
        "pairs": len(pairs.items),
        "tool": f"brainpatch {__version__}",
    }
    vectors = {
        f"layer_{layer}": direction.astype(np.float32)
        for layer, direction in zip(chosen, directions, strict=True)
    }
    path = save_patch(manifest, vectors, output, overwrite=overwrite)
    return Learned(load_patch(path), chosen, tuple(map(float, norms)), tuple(map(float, activations.norms)))


def _reading(tokenizer: Any, pair: Pair, side: int, position: str) -> Reading:
    text: Any = pair[side]
    if pair.prompt is not None:
        head = prompt_ids(tokenizer, pair.prompt)
        answer = [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
        ids, first = [*head, *answer], len(head)
    else:
        ids, first = prompt_ids(tokenizer, text, use_chat_template=False), 0
        if position == "completion":
            raise LearnError("BP601", "position completion needs pairs with a prompt")
    if position == "last":
        first = len(ids) - 1
    elif position == "mean":
        first = min(1, len(ids) - 1)
    if first >= len(ids):
        raise LearnError("BP601", f"an answer has no tokens: {text!r:.60}")
    return Reading(tuple(ids), first, len(ids))
