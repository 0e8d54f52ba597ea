"""Adding to the residual stream inside vLLM's forward pass, for each row its own.

Every decoder block of a worker is wrapped before vLLM compiles the model. The wrapper ends in one opaque
operation, `brainpatch::steer`, which a compiler keeps as it is: what is added is data that the operation
looks up when it runs, so it changes from step to step under one and the same compiled graph. An eager model
needs no operation and calls the plane itself, and only when some request is patched.

State and who owns it: a worker process has one plane for each model that it runs; its runner's thread calls
`begin`, the forward pass and `end`, in this order. The operation finds the plane that is in a step by a
variable of this module, since a compiled graph can carry no Python object. With no step on it finds the one
that stands by, if any: graphs are captured outside steps, and what they capture is that plane's launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from brainpatch.backends.edit_table import EditTable, Step
from brainpatch.backends.vllm_hooks import SUM, first_element

_LIBRARY: Any = torch.library.Library("brainpatch", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("steer(Tensor(a!) hidden, Tensor? residual, int layer) -> ()")

_in_step: Plane | None = None
_standing_by: Plane | None = None


def in_step() -> Plane | None:
    """The plane between its `begin` and its `end`."""
    return _in_step


def stand_by(plane: Plane) -> None:
    """Have `brainpatch::steer` call this plane when none is in a step, from now on."""
    global _standing_by
    _standing_by = plane


def _steer(hidden: Tensor, residual: Tensor | None, layer: int) -> None:
    plane = _in_step or _standing_by
    if plane is not None:
        plane.edit(hidden, residual, layer)


def _steer_shapes(hidden: Tensor, residual: Tensor | None, layer: int) -> None:
    """What a compiler needs to know: nothing is returned, and `hidden` is written to."""


_LIBRARY.impl("steer", _steer, "CPU")
_LIBRARY.impl("steer", _steer, "CUDA")
_LIBRARY.impl("steer", _steer_shapes, "Meta")


class Plane:
    """What one worker adds, on the CPU, in plain PyTorch.

    `layers` are the blocks of this rank; `dtype` is the residual stream's. `counters` are totals since the
    worker started: steps with edits, rows edited (summed over blocks), blocks edited, and blocks that a step
    should have edited and did not.
    """

    def __init__(self, layers: Iterable[int], hidden_size: int, dtype: torch.dtype) -> None:
        self.table = EditTable(layers, hidden_size)
        self.dtype = dtype
        self.forms: dict[int, str] = {}
        self.counters = {"steps": 0, "rows_edited": 0, "blocks_edited": 0, "blocks_missed": 0}
        self.trace: PlaneTrace | None = None
        self.proving = False
        """Set while made-up requests are computed, whose edits are given beforehand."""
        self.columns: dict[int, tuple[int, int]] = {}
        """The layers that this step edits, with their columns; empty between steps."""
        self._edited: set[int] = set()
        self._vectors = torch.empty(0, hidden_size)
        self._index = torch.empty(0, 0, dtype=torch.int32)
        self._coefficient = torch.empty(0, 0, 1)
        self._rows: Tensor | None = None
        self._where = slice(0, 0)
        self._step: Step | None = None
        self._scratch = [torch.empty(0, hidden_size), torch.empty(0, hidden_size)]
        self._cast = torch.empty(0, hidden_size, dtype=dtype)

    # --- a step --------------------------------------------------------------------------------

    def begin(
        self, requests: Sequence[str], counts: NDArray[np.integer], positions: NDArray[np.integer]
    ) -> None:
        """Get ready for a forward pass of these rows; see `EditTable.step`."""
        global _in_step
        _in_step = self
        step = self.table.step(requests, counts, positions)
        if self.trace is not None:
            self.trace.begin(requests, counts, positions)
        if step is None:
            self.columns = {}
            return
        self._edited.clear()
        self.counters["steps"] += 1
        self._load(step)
        self.columns = step.columns

    def end(self) -> None:
        """The forward pass is over: nothing is added until the next `begin`."""
        global _in_step
        _in_step = None
        if self.columns:
            self._leave()
            self.columns = {}

    def settle(self) -> None:
        """Bring `counters` up to date, where a device counts. Between steps."""

    def _leave(self) -> None:
        self.counters["blocks_missed"] += len(self.columns.keys() - self._edited)

    def _load(self, step: Step) -> None:
        table = self.table
        if table.changed_slots:
            self._vectors = torch.from_numpy(table.vectors)  # shares the memory; anew after a growth
            table.changed_slots = []
        if step is self._step:
            return
        self._step = step
        count = step.index.shape[1]
        self._index = torch.from_numpy(step.index)
        self._coefficient = torch.from_numpy(step.coefficient).unsqueeze(-1)
        first = 0 if step.rows is None else int(step.rows[0])
        together = step.rows is None or int(step.rows[-1]) - first + 1 == count
        self._where = slice(first, first + count)
        self._rows = None if together else torch.from_numpy(step.rows)
        if len(self._scratch[0]) < count:
            room = 1 << (count - 1).bit_length()
            self._scratch = [torch.empty(room, table.hidden_size) for _ in range(2)]
            self._cast = torch.empty(room, table.hidden_size, dtype=self.dtype)

    # --- a block -------------------------------------------------------------------------------

    def edit(self, hidden: Tensor, residual: Tensor | None, layer: int) -> None:
        """Add to `hidden` [rows, hidden_size] (or [1, rows, hidden_size]) in place what this step has for the layer."""
        if layer not in self.columns:
            return
        rows = hidden.view(-1, hidden.shape[-1])
        traced = self.trace
        if traced is not None:
            other = residual.view(rows.shape) if residual is not None and self.forms[layer] == SUM else None
            before = traced.read(rows, other)
            self._add(rows, layer)
            traced.keep(layer, before, traced.read(rows, other))
        else:
            self._add(rows, layer)

    def _add(self, hidden: Tensor, layer: int) -> None:
        first, last = self.columns[layer]
        count = self._index.shape[1]
        self._edited.add(layer)
        self.counters["blocks_edited"] += 1
        self.counters["rows_edited"] += count
        total = self._scratch[0][:count]
        torch.index_select(self._vectors, 0, self._index[first], out=total)
        if last - first == 1 and self._rows is None and self.dtype == torch.float32:
            hidden[self._where].addcmul_(total, self._coefficient[first])
            return
        total.mul_(self._coefficient[first])
        for column in range(first + 1, last):
            term = self._scratch[1][:count]
            torch.index_select(self._vectors, 0, self._index[column], out=term)
            total.addcmul_(term, self._coefficient[column])
        if self.dtype != torch.float32:
            total = self._cast[:count].copy_(total)
        if self._rows is None:
            hidden[self._where].add_(total)
        else:
            hidden.index_add_(0, self._rows, total)


class PlaneTrace:
    """What was measured at the edited blocks, for the requests that are traced."""

    def __init__(self) -> None:
        self._norms: dict[str, dict[tuple[int, int], float]] = {}
        self._tags: dict[str, str] = {}
        self._rows = torch.empty(0, dtype=torch.int64)
        self._keys: list[tuple[str, int]] = []

    def watch(self, request: str, tag: str) -> None:
        """Trace a request; `tag` is the name by which it is asked for."""
        self._tags[request] = tag
        self._norms.setdefault(tag, {})

    def take(self, tag: str) -> dict[tuple[int, int], float]:
        """(layer, position) -> L2 norm, in float32, of what moved the stream; then forget the request."""
        self._tags = {request: other for request, other in self._tags.items() if other != tag}
        return self._norms.pop(tag, {})

    @property
    def is_empty(self) -> bool:
        """Whether no request is traced."""
        return not self._norms

    def begin(
        self, requests: Sequence[str], counts: NDArray[np.integer], positions: NDArray[np.integer]
    ) -> None:
        """Find the rows of the traced requests."""
        traced = np.array([request in self._tags for request in requests], dtype=bool)
        rows = np.flatnonzero(np.repeat(traced, counts))
        owner = np.repeat(np.arange(len(requests)), counts)[rows].tolist()
        places = positions[rows].tolist()
        self._keys = [(self._tags[requests[i]], int(p)) for i, p in zip(owner, places, strict=True)]
        self._rows = torch.from_numpy(rows)

    def read(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        """The stream of the traced rows."""
        self._rows = self._rows.to(hidden.device)
        stream = hidden.index_select(0, self._rows)
        return stream if residual is None else stream + residual.index_select(0, self._rows)

    def keep(self, layer: int, before: Tensor, after: Tensor) -> None:
        """Record a block's edit."""
        norms = torch.linalg.vector_norm(after.float() - before.float(), dim=-1)
        for (tag, position), norm in zip(self._keys, norms.tolist(), strict=True):
            self._norms[tag][layer, position] = norm


def wrap(block: nn.Module, layer: int, plane: Plane, *, compiled: bool) -> None:
    """Let the plane edit what `block` returns. Before compilation, or in an eager model."""
    original: Callable[..., Any] = block.forward

    def traced_forward(*arguments: Any, **named: Any) -> Any:
        output = original(*arguments, **named)
        torch.ops.brainpatch.steer(first_element(output), _second(output), layer)
        return output

    def forward(*arguments: Any, **named: Any) -> Any:
        output = original(*arguments, **named)
        if plane.columns:
            plane.edit(first_element(output), _second(output), layer)
        return output

    block.forward = traced_forward if compiled else forward


def _second(output: Any) -> Tensor | None:
    """The residual of a block that returns a pair."""
    if isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], Tensor):
        return output[1]
    return None
