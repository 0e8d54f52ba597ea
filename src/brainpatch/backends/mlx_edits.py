"""Adding edits to the residual stream of an MLX model, and measuring what was added.

MLX has no hooks. While a call runs, an edited block is an object of a subclass of its own class, whose `__call__`
hands the block's output to that call; the block itself stays the object that it is, with its attributes, names and
parameters. A block that nobody edits is left alone.

State and who owns it: an `Edits` object belongs to one batch in one thread. Which blocks have the other class is
counted for the process under a lock; what happens there is each thread's own.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

from brainpatch.runtime.meaning import ResolvedSet
from brainpatch.runtime.requests import TraceRow

_CACHED_ADDITIONS = 1024

Hook = Callable[[tuple[Any, ...], Any], Any]
"""What is done with a block's output: gets what went into the block and the stream, and returns the stream."""

_here = threading.local()
_runs: Counter[int] = Counter()
"""How many calls have hooks on a block, by its id: a model may be in several backends at once."""
_runs_lock = threading.Lock()


@contextmanager
def hooked(blocks: Sequence[Any], hooks: Mapping[int, Hook]) -> Iterator[None]:
    """Inside, `hooks` (by layer) get what this thread's forward passes put out. Without any, nothing is touched."""
    chosen = [blocks[layer] for layer in hooks]
    with _runs_lock:
        for block in chosen:
            _runs[id(block)] += 1
            if _runs[id(block)] == 1:
                own: type = type(block)
                block.__class__ = _watched(own)
    _here.hooks = {id(blocks[layer]): hook for layer, hook in hooks.items()}
    try:
        yield
    finally:
        _here.hooks = {}
        with _runs_lock:
            for block in chosen:
                _runs[id(block)] -= 1
                if not _runs[id(block)]:
                    del _runs[id(block)]
                    block.__class__ = type(block).__base__


@functools.cache
def _watched(own: type) -> type:
    """A class of blocks that are `own` in everything but this: hooks see their output."""

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        output = own.__call__(self, *arguments, **keywords)
        hook = getattr(_here, "hooks", {}).get(id(self))
        if hook is None:  # another thread's pass
            return output
        stream = output[0] if isinstance(output, tuple) else output
        changed = hook((*arguments, *keywords.values()), stream)
        if changed is stream:
            return output
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    return type(own.__name__, (own,), {**names, "__call__": call})


class Row(NamedTuple):
    """One row of a batch."""

    patches: ResolvedSet
    prompt_length: int


class _Piece(NamedTuple):
    """Columns first..last-1 of a row that get one and the same edit."""

    row: int
    first: int
    last: int
    coefficients: tuple[float, ...]


class Edits:
    """The edits of one batch.

    `spans` says what the next forward pass computes: for each row its first column's position, and how many of its
    columns are there; those behind them are padding.
    """

    def __init__(self, blocks: Sequence[Any], rows: Sequence[Row]) -> None:
        self.spans: Sequence[tuple[int, int]] = []
        self.trace: dict[tuple[int, int], TraceRow] = {}
        self._blocks = blocks
        self._rows = rows
        self._layers = sorted({layer for row in rows for layer in row.patches.layers})
        self._additions: dict[Any, tuple[Any, Any]] = {}

    @contextmanager
    def applied(self, *, measured: bool = False) -> Iterator[None]:
        """The edits act inside this context.

        `measured` records in `trace` what the first row's stream really gained, by (layer, position).
        """
        hook = self._measured if measured else self._edited
        with hooked(self._blocks, {layer: functools.partial(hook, layer) for layer in self._layers}):
            yield

    def _edited(self, layer: int, given: tuple[Any, ...], stream: Any) -> Any:
        import mlx.core as mx

        pieces = self._pieces(layer)
        if not pieces:
            return stream  # nothing to add here: the output stays the object that it is
        addition, edited = self._addition(layer, pieces, stream)
        # Elsewhere the stream is chosen, not added to: even x + 0.0 is another number where x is -0.0.
        return stream + addition if edited is None else mx.where(edited, stream + addition, stream)

    def _pieces(self, layer: int) -> tuple[_Piece, ...]:
        return tuple(
            _Piece(number, segment.first - start, segment.last - start, segment.coefficients)
            for number, (row, (start, count)) in enumerate(zip(self._rows, self.spans, strict=True))
            if count > 0 and layer in row.patches.layers
            for segment in row.patches.segments(layer, start, count, row.prompt_length)
        )

    def _addition(self, layer: int, pieces: tuple[_Piece, ...], stream: Any) -> tuple[Any, Any]:
        """What is added, and at which columns (bool [rows, columns, 1]); None is all of them.

        Each edit is summed in float32 and cast to the stream's dtype once, so that the stream keeps it.
        """
        import mlx.core as mx
        import numpy as np

        rows, columns = stream.shape[:2]
        key = (layer, columns, pieces)
        if key not in self._additions:
            if len(self._additions) >= _CACHED_ADDITIONS:  # an interpolated schedule has a new one every step
                self._additions.clear()
            edits = np.stack([self._rows[one.row].patches.sum(layer, one.coefficients) for one in pieces])
            table = mx.array(edits).astype(stream.dtype)
            whole = len(pieces) == rows and all(one.last - one.first == columns for one in pieces)
            index = np.zeros((rows, columns), dtype=np.uint32)
            edited = np.zeros((rows, columns, 1), dtype=np.bool_)
            for number, one in enumerate(pieces):
                index[one.row, one.first : one.last] = number
                edited[one.row, one.first : one.last] = True
            self._additions[key] = (
                (table[:, None], None) if whole else (table, (mx.array(index), mx.array(edited)))
            )
        table, places = self._additions[key]
        return (table, None) if places is None else (table[places[0]], places[1])

    def _measured(self, layer: int, given: tuple[Any, ...], stream: Any) -> Any:
        import mlx.core as mx

        edited = self._edited(layer, given, stream)
        gained = edited[0].astype(mx.float32) - stream[0].astype(mx.float32)
        norms = cast("list[float]", mx.sqrt(mx.sum(gained * gained, axis=-1)).tolist())
        row, (start, count) = self._rows[0], self.spans[0]
        expected = [0.0] * count
        for first, last, coefficients in row.patches.segments(layer, start, count, row.prompt_length):
            norm = row.patches.expected_norm(layer, coefficients)
            expected[first - start : last - start] = [norm] * (last - first)
        dtype = str(edited.dtype).removeprefix("mlx.core.")
        for offset in range(count):
            if norms[offset] or expected[offset]:
                self.trace[layer, start + offset] = TraceRow(
                    layer, start + offset, norms[offset], expected[offset], dtype
                )
        return edited
