"""Proving that edits reach the residual stream of a loaded MLX model, and whether its batches can be padded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from brainpatch.backends.mlx_edits import Hook, hooked
from brainpatch.backends.mlx_passes import CHUNK, Passes
from brainpatch.errors import EngineError

_SAME = 0.03
"""Rows together and rows alone differ by less, relative to the logits: bfloat16 rounds by up to about 0.01."""


def prove(model: Any, blocks: list[Any]) -> int:
    """The width of the residual stream, after a proof on three tokens.

    A first pass shows that each block runs once and returns one stream [rows, columns, width], and that this is
    what the next block gets: else BP504. A second one shows that an edit as large as the stream enters the next
    block as it is, and moves the logits: else BP506.
    """
    import mlx.core as mx

    entering, leaving, plain = _pass(model, blocks, {})
    for layer, outputs in enumerate(leaving):
        if len(outputs) != 1:
            raise EngineError("BP504", f"block {layer} ran {len(outputs)} times in one forward pass")
        stream = outputs[0]
        if not isinstance(stream, mx.array) or stream.ndim != 3 or stream.shape[:2] != (1, 3):
            found = list(stream.shape) if isinstance(stream, mx.array) else type(stream).__name__
            raise EngineError(
                "BP504", f"block {layer} returns {found}, not one stream [rows, columns, width]"
            )
        if layer and not _among(leaving[layer - 1][0], entering[layer]):
            raise EngineError("BP504", f"what block {layer - 1} returns is not what block {layer} gets")
    layer = (len(blocks) - 1) // 2  # one that has a next, where there are two
    stream = leaving[layer][0].astype(mx.float32)
    edit = mx.random.normal(stream.shape[-1:], key=mx.random.key(0))
    edit = (edit * (mx.linalg.norm(stream[0, -1]) / mx.linalg.norm(edit))).astype(leaving[layer][0].dtype)
    entering, _, edited = _pass(model, blocks, {layer: edit})
    if len(blocks) > 1 and not _among(leaving[layer][0] + edit, entering[layer + 1]):
        raise EngineError("BP506", f"an edit at block {layer} does not reach block {layer + 1} as it is")
    if mx.array_equal(plain, edited).item():
        raise EngineError("BP506", f"an edit at block {layer} as large as the stream changes no logit")
    return int(stream.shape[-1])


def _pass(
    model: Any, blocks: list[Any], edits: Mapping[int, Any]
) -> tuple[list[list[Any]], list[list[Any]], Any]:
    """One forward pass: the arrays given to each block, each block's streams before `edits`, and the logits."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    entering: list[list[Any]] = [[] for _ in blocks]
    leaving: list[list[Any]] = [[] for _ in blocks]

    def watch(layer: int) -> Hook:
        def hook(given: tuple[Any, ...], stream: Any) -> Any:
            entering[layer] += [value for value in given if isinstance(value, mx.array)]
            leaving[layer].append(stream)
            return stream + edits[layer] if layer in edits else stream

        return hook

    with hooked(blocks, {layer: watch(layer) for layer in range(len(blocks))}):
        try:
            logits = model(mx.array([[1, 2, 3]]), cache=make_prompt_cache(model))
            mx.eval(logits)
        except Exception as error:  # a model that mlx-lm does not compute fails in any way
            raise EngineError("BP507", f"three tokens give {type(error).__name__}: {error}") from error
    return entering, leaving, logits


def _among(stream: Any, arrays: list[Any]) -> bool:
    """Whether `stream` is one of the arrays, number for number."""
    import mlx.core as mx

    return any(
        bool(mx.array_equal(one, stream, equal_nan=True).item())
        for one in arrays
        if one.shape == stream.shape and one.dtype == stream.dtype
    )


def can_be_padded(model: Any) -> bool:
    """Whether rows of different lengths may share a batch.

    Only where keys and values are all that is cached (a recurrent state sees the padding), and a short and a long
    row together gave what they gave alone.
    """
    import numpy as np
    from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

    if any(type(cache) not in (KVCache, RotatingKVCache) for cache in make_prompt_cache(model)):
        return False
    rows = [(1, 2, 3), (3, 1)]
    try:
        together = _two_steps(model, rows)
        alone = [_two_steps(model, [row])[0] for row in rows]
    except Exception:  # a family that cannot compute its positions by row says so in any way
        return False
    for one, other in zip(together, alone, strict=True):
        centred = other - other.mean(axis=-1, keepdims=True)
        if not np.linalg.norm(one - other) <= _SAME * np.linalg.norm(centred):
            return False
    return True


def _two_steps(model: Any, rows: list[tuple[int, ...]]) -> Any:
    """The logits after each row and after one more token: float32 [rows, 2, vocabulary]."""
    import numpy as np

    passes = Passes(model, rows)
    passes.prefill(CHUNK, lambda: False)
    return np.stack([passes.step([row[-1] for row in rows]), passes.step([2] * len(rows))], axis=1)
