"""Edits inside llama.cpp: in the callback that it calls for each node of a graph, or by its control vector.

llama.cpp names the residual stream after block L `l_out-L`. It asks for each node whether somebody wants to see it,
and where somebody does, it computes up to there, hands the node over, and goes on with what it finds in it.

State and who owns it: all of it belongs to the engine's thread; llama.cpp calls back in the thread that decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from brainpatch.backends.llamacpp_library import Library
from brainpatch.errors import EngineError
from brainpatch.runtime.meaning import ResolvedSet
from brainpatch.runtime.requests import TraceRow

Vector = NDArray[np.float32]
_STREAM = b"l_out-"
_KEPT_SHAPES = 256
_KEPT_VECTORS = 1024


class Stretch(NamedTuple):
    """Rows first..first+length-1 of a step: positions start.. of one request."""

    patches: ResolvedSet
    prompt_length: int
    first: int
    start: int
    length: int


class Piece(NamedTuple):
    """Rows first..last-1 of a step get `vector`."""

    first: int
    last: int
    vector: Vector


class Vectors:
    """Summed edits, float32 [width], kept for as long as their set is in use."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int, tuple[float, ...]], Vector] = {}

    def plan(self, stretches: Sequence[Stretch]) -> dict[int, list[Piece]]:
        """What is added in a step, by layer."""
        plan: dict[int, list[Piece]] = {}
        for patches, prompt_length, first, start, length in stretches:
            for layer in patches.layers:
                for segment in patches.segments(layer, start, length, prompt_length):
                    shift = first - start
                    vector = self._vector(patches, layer, segment.coefficients)
                    plan.setdefault(layer, []).append(
                        Piece(segment.first + shift, segment.last + shift, vector)
                    )
        return plan

    def _vector(self, patches: ResolvedSet, layer: int, coefficients: tuple[float, ...]) -> Vector:
        key = (patches.digest, layer, coefficients)
        if key not in self._kept:
            if len(self._kept) >= _KEPT_VECTORS:  # an interpolated schedule has a new one every step
                self._kept.clear()
            self._kept[key] = patches.sum(layer, coefficients)
        return self._kept[key]


class NodeEdits:
    """Edits in the callback, a step at a time: each row its own.

    Asking for each of a graph's thousand nodes what its name is would cost a tenth of a step. A graph of one shape
    (rows, rows with logits) has its nodes at the same addresses each time, so names are read once for a shape. That is
    what llama.cpp does and not what it promises: each hit is compared by its name, and `missed` tells when a
    block was not seen, so that the step can be done again.
    """

    def __init__(self, library: Library) -> None:
        self._ffi, self._c = library
        self._plan: dict[int, list[Piece]] = {}
        self._names: dict[bytes, int] = {}
        self._known: dict[tuple[int, int], dict[int, int]] = {}
        self._hot: dict[int, int] | None = None
        self._found: dict[int, int] = {}
        self._edited: set[int] = set()
        self._rows: tuple[int, list[int]] = 0, []
        self._buffer: NDArray[np.float32] = np.empty(0, dtype=np.float32)
        self._error: Exception | None = None
        self._measured: dict[tuple[int, int], float] | None = None
        self._layers = 0
        self._width = 0

    def shape(self, layers: int, width: int) -> None:
        """Take the model's number of blocks and the width of its stream."""
        self._layers, self._width = layers, width

    def on_node(self, address: int, ask: bool, _: Any = None) -> bool:
        """llama.cpp's question for a node (whether it is wanted), and then the node."""
        try:
            if ask:
                return address in self._hot if self._hot is not None else self._asked_by_name(address)
            return self._edit(address)
        except Exception as error:  # it must not pass through C
            self._error = error
            return False

    def begin(
        self,
        plan: dict[int, list[Piece]],
        rows: int,
        with_logits: list[int],
        *,
        measured: bool = False,
    ) -> None:
        """Before a step of `rows` rows, of which those `with_logits` are all that the last block computes."""
        last = self._layers - 1
        if last in plan and not with_logits:  # nothing is computed after it
            plan = {layer: pieces for layer, pieces in plan.items() if layer != last}
        self._plan, self._rows = plan, (rows, with_logits)
        self._edited, self._error = set(), None
        self._measured = {} if measured else None
        self._found = {}
        if not plan:
            self._hot = {}
            return
        known = self._known.get((rows, len(with_logits)))
        self._hot = None
        if known is not None and plan.keys() <= set(known.values()):
            self._hot = {address: layer for address, layer in known.items() if layer in plan}

    def end(self) -> bool:
        """After a step: whether each edit was made. Raises what went wrong."""
        hot, self._hot, plan, self._plan = self._hot, {}, self._plan, {}
        if isinstance(self._error, EngineError):
            raise self._error
        if self._error is not None:
            raise EngineError("BP508", f"editing in llama.cpp failed: {self._error}") from self._error
        shape = self._rows[0], len(self._rows[1])
        if self._edited != plan.keys():
            self._known.pop(shape, None)
            if hot is None:
                missed = sorted(plan.keys() - self._edited)
                raise EngineError("BP503", f"llama.cpp computes no node l_out-{missed[0]}")
            return False
        if hot is None and plan:
            if len(self._known) >= _KEPT_SHAPES:
                self._known.clear()
            self._known.setdefault(shape, {}).update(self._found)
        return True

    def trace(self, stretch: Stretch) -> list[TraceRow]:
        """What was measured in a step that had this one stretch."""
        rows = []
        for (layer, row), norm in sorted((self._measured or {}).items()):
            position = stretch.start + row - stretch.first
            segments = stretch.patches.segments(layer, position, 1, stretch.prompt_length)
            expected = stretch.patches.expected_norm(layer, segments[0].coefficients) if segments else 0.0
            rows.append(TraceRow(layer, position, norm, expected, "float32"))
        return rows

    def _asked_by_name(self, address: int) -> bool:
        layer = self._layer(address)
        if layer is None:
            return False
        self._found[address] = layer
        return layer in self._plan

    def _layer(self, address: int) -> int | None:
        name = self._ffi.string(self._c.ggml_get_name(address))
        if name.startswith(_STREAM) and name[len(_STREAM) :].isdigit():
            return int(name[len(_STREAM) :])
        return None

    def _edit(self, address: int) -> bool:
        layer = self._layer(address)
        if layer is None or layer not in self._plan:
            return True  # another node at an address that is known from before: `end` will tell
        size = self._c.ggml_nbytes(address)
        rows, with_logits = self._rows
        pieces = self._plan[layer]
        count = rows
        if layer == self._layers - 1 and size == 4 * self._width * len(with_logits):
            count = len(with_logits)
            pieces = _compacted(pieces, with_logits)
        if size != 4 * self._width * count:
            raise EngineError(
                "BP504", f"l_out-{layer} has {size} bytes, not {count} rows of {self._width} numbers"
            )
        if layer in self._edited:
            raise EngineError("BP504", f"l_out-{layer} comes twice in one step")
        if pieces:
            first = min(piece.first for piece in pieces)
            stream = self._read(address, first, max(piece.last for piece in pieces))
            before = stream.copy() if self._measured is not None else None
            for piece in pieces:
                stream[piece.first - first : piece.last - first] += piece.vector
            self._c.ggml_backend_tensor_set(
                address, self._ffi.from_buffer(stream), 4 * self._width * first, stream.nbytes
            )
            if before is not None and self._measured is not None:
                gained = np.linalg.norm(self._read(address, first, first + len(before)) - before, axis=1)
                for piece in pieces:
                    for row in range(piece.first, piece.last):
                        self._measured[layer, with_logits[row] if count < rows else row] = float(
                            gained[row - first]
                        )
        self._edited.add(layer)
        return True

    def _read(self, address: int, first: int, last: int) -> NDArray[np.float32]:
        size = (last - first) * self._width
        if self._buffer.size < size:
            self._buffer = np.empty(size, dtype=np.float32)
        stream = self._buffer[:size].reshape(-1, self._width)
        self._c.ggml_backend_tensor_get(
            address, self._ffi.from_buffer(stream), 4 * self._width * first, stream.nbytes
        )
        return stream


def _compacted(pieces: Sequence[Piece], with_logits: Sequence[int]) -> list[Piece]:
    """Pieces by row among all rows as pieces by row among those with logits."""
    compacted = []
    for first, last, vector in pieces:
        kept = [i for i, row in enumerate(with_logits) if first <= row < last]
        if kept:
            compacted.append(Piece(kept[0], kept[-1] + 1, vector))
    return compacted


def control_vector(plan: dict[int, list[Piece]], layers: int, width: int) -> Vector | None:
    """A step's edits as rows for llama.cpp's control vector, where all rows of the step have the same."""
    if not plan:
        return None
    rows = np.zeros((layers - 1, width), dtype=np.float32)
    for layer, pieces in plan.items():
        rows[layer - 1] = pieces[0].vector
    return rows
