"""Adding edits to the residual stream of a Transformers model, and measuring what was added.

State and who owns it: an `Edits` object belongs to one call of `generate` in one thread. Its hooks are on the
model only while that call runs, and ignore forward passes of other threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from brainpatch.runtime.meaning import ResolvedSet
from brainpatch.runtime.requests import TraceRow

_CACHED_VECTORS = 1024


class Row(NamedTuple):
    """One row of a batch: `pad` columns of padding stand before its `prompt_length` prompt tokens."""

    patches: ResolvedSet
    prompt_length: int
    pad: int


class Edits:
    """The edits of one batch.

    `columns` is how many token columns of the batch are known: the caller sets it to the prompts' width and
    adds one for each token that it appends. A block's output of T columns then holds the last T of them,
    whatever the cache; column c of a row is position c - pad.
    """

    def __init__(self, blocks: Sequence[Any], rows: Sequence[Row], columns: int) -> None:
        self.columns = columns
        self.trace: dict[tuple[int, int], TraceRow] = {}
        self.first_row: list[tuple[int, float]] = []
        self._blocks = blocks
        self._rows = rows
        self._thread = threading.get_ident()
        self._layers = sorted({layer for row in rows for layer in row.patches.layers})
        self._vectors: dict[tuple[int, int, tuple[float, ...]], tuple[Any, float]] = {}

    @contextmanager
    def applied(self, *, measured: bool = False) -> Iterator[None]:
        """The hooks are on the model inside this context. Without edits there are none at all.

        `measured` records in `trace` what the first row's stream really gained, by (layer, position).
        """
        handles = []
        try:
            for layer in self._layers:
                before: dict[str, Any] = {}
                hooks = [self._edit(layer)]
                if measured:
                    hooks = [self._keep(before), *hooks, self._measure(layer, before)]
                handles += [self._blocks[layer].register_forward_hook(hook) for hook in hooks]
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _edit(self, layer: int) -> Callable[..., Any]:
        def hook(module: Any, arguments: Any, output: Any) -> Any:
            if threading.get_ident() != self._thread:
                return None
            stream = output[0] if isinstance(output, tuple) else output
            start = self.columns - stream.shape[-2]
            pieces = [
                (
                    number,
                    segment.first + row.pad - start,
                    segment.last + row.pad - start,
                    segment.coefficients,
                )
                for number, row in enumerate(self._rows)
                if layer in row.patches.layers
                for segment in row.patches.segments(
                    layer, start - row.pad, stream.shape[-2], row.prompt_length
                )
            ]
            if layer == self._layers[0]:
                self._note(layer, pieces, stream)
            if not pieces:
                return None  # nothing to add here: the output stays the object that it is
            edited = stream.clone()
            for number, first, last, coefficients in pieces:
                edited[number, first:last] += self._vector(number, layer, coefficients, stream)[0]
            return (edited, *output[1:]) if isinstance(output, tuple) else edited

        return hook

    def _vector(
        self, number: int, layer: int, coefficients: tuple[float, ...], stream: Any
    ) -> tuple[Any, float]:
        """The summed edit in the stream's dtype [hidden], cast once, and its norm."""
        import torch

        patches = self._rows[number].patches
        key = (id(patches), layer, coefficients)
        if key not in self._vectors:
            if len(self._vectors) >= _CACHED_VECTORS:  # an interpolated schedule has a new one every step
                self._vectors.clear()
            vector = torch.from_numpy(patches.sum(layer, coefficients)).to(stream.device, stream.dtype)
            self._vectors[key] = vector, float(vector.float().norm())
        return self._vectors[key]

    def _note(
        self, layer: int, pieces: Sequence[tuple[int, int, int, tuple[float, ...]]], stream: Any
    ) -> None:
        """Keep (generated-token index, norm) of the first row's newest position at the lowest edited block."""
        row = self._rows[0]
        norm = 0.0
        for number, _, last, coefficients in pieces:
            if number == 0 and last == stream.shape[-2]:
                norm = self._vector(0, layer, coefficients, stream)[1]
        self.first_row.append((max(0, self.columns - 1 - row.pad - row.prompt_length), norm))

    def _keep(self, before: dict[str, Any]) -> Callable[..., None]:
        def hook(module: Any, arguments: Any, output: Any) -> None:
            if threading.get_ident() == self._thread:
                before["stream"] = output[0] if isinstance(output, tuple) else output

        return hook

    def _measure(self, layer: int, before: dict[str, Any]) -> Callable[..., None]:
        def hook(module: Any, arguments: Any, output: Any) -> None:
            if threading.get_ident() != self._thread:
                return
            stream = output[0] if isinstance(output, tuple) else output
            row = self._rows[0]
            width = stream.shape[-2]
            start = self.columns - width - row.pad
            norms = (stream[0].float() - before.pop("stream")[0].float()).norm(dim=-1).tolist()
            expected = [0.0] * width
            for first, last, coefficients in row.patches.segments(layer, start, width, row.prompt_length):
                norm = row.patches.expected_norm(layer, coefficients)
                expected[first - start : last - start] = [norm] * (last - first)
            for offset in range(width):
                if norms[offset] or expected[offset]:
                    position = start + offset
                    self.trace[layer, position] = TraceRow(
                        layer,
                        position,
                        norms[offset],
                        expected[offset],
                        str(stream.dtype).removeprefix("torch."),
                    )

        return hook
