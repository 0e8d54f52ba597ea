"""The plane of a worker whose blocks run on a GPU, where a graph is captured once and replayed ever after.

A replay runs no Python. So what a step adds lies on the device before the step is launched, where a captured
launch of the kernel (`vllm_kernel`) finds it:

- head, int32, which never moves: the descriptor (as int64), then `starts` and `counts` of every layer;
- cells, int32: the step's `index`, then its `coefficient`, each [columns, rows up to the last steered one];
- vectors, float32 [slots, hidden_size].

Cells and vectors are allocated anew when they grow, and the head says where they are. Between steps `counts`
is all 0, and a block costs a launch that ends at once.

All of this is enqueued on the current stream, which has to be the forward pass's. So the copies for a step
come after the kernels of the last one, and memory of a table that was replaced goes to nobody before the
kernels that read it have run. The host waits only before it overwrites what a copy is made from, and that
copy is two changed steps old; and when the table of vectors doubles.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brainpatch.backends import vllm_plane
from brainpatch.backends.edit_table import Step
from brainpatch.backends.vllm_kernel import ALIGNMENT, DESCRIPTOR_SIZE, describe, steer_rows

_DESCRIPTOR: Final = slice(0, 2 * DESCRIPTOR_SIZE)
"""Its place in the head."""

_NO_STEP: Final = Step(None, np.zeros((0, 0), dtype=np.int32), np.zeros((0, 0), dtype=np.float32), {})


class DevicePlane(vllm_plane.Plane):
    """What one worker adds, on `device`: CUDA, or the CPU where Triton interprets kernels.

    Once it is made, `brainpatch::steer` finds it even when no step is on, since that is when graphs are
    captured; so a process has one. The device counts `blocks_edited` and `blocks_missed`; `settle` fetches them.
    """

    def __init__(
        self, layers: Iterable[int], hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(layers, hidden_size, dtype)
        total = max(self.table.layers) + 1
        starts = _aligned(_DESCRIPTOR.stop)
        counts = starts + _aligned(total)
        self._parts = slice(starts, starts + total), slice(counts, counts + total)
        self._head = torch.zeros(counts + _aligned(total), dtype=torch.int32, device=device)
        self._descriptor = self._head[_DESCRIPTOR].view(torch.int64)
        self._starts, self._counts = (self._head[part] for part in self._parts)
        self._cells = torch.empty(0, dtype=torch.int32, device=device)
        self._vectors = torch.empty(0, hidden_size, device=device)
        self._visits = torch.zeros(total, dtype=torch.int64, device=device)
        self._visits_seen = np.zeros(total, dtype=np.int64)
        self._visits_due = np.zeros(total, dtype=np.int64)
        self._step_memory, self._vector_memory = _HostMemory(device), _HostMemory(device)
        self._load(_NO_STEP)
        # The first launch compiles, which must not be while a graph is captured.
        steer_rows(torch.zeros(1, hidden_size, dtype=dtype, device=device), self._descriptor, 0)
        vllm_plane.stand_by(self)

    # --- a step --------------------------------------------------------------------------------

    def _load(self, step: Step) -> None:
        self._load_vectors()
        if step is self._step:  # all is there but `counts`, set to 0 when the last step ended
            self._step_memory.copy((self._head, 0))
        else:
            self._write(step)
            self._step = step
        self._visits_due[list(step.columns)] += 1
        self.counters["rows_edited"] += step.index.shape[1] * len(step.columns)

    def _write(self, step: Step) -> None:
        """Lay the step out in the host's memory, and have it copied to the head and the cells."""
        columns, rows = step.index.shape
        if step.rows is not None:
            rows = int(step.rows[-1]) + 1
        size = columns * rows
        parts = slice(0, size), slice(_aligned(size), _aligned(size) + size)
        if len(self._cells) < parts[1].stop:
            self._cells = torch.empty(_room(parts[1].stop), dtype=torch.int32, device=self._head.device)
        cells = self._cells[: parts[1].stop]
        index, coefficient = (cells[part].view(columns, rows) for part in parts)

        staged = self._step_memory.take(len(self._head) + len(cells))
        words = staged.numpy()
        head, numbers = words[: len(self._head)], words[len(self._head) :]
        head[_DESCRIPTOR].view(np.int64)[:] = describe(
            self._vectors, index, coefficient.view(torch.float32), self._starts, self._counts, self._visits
        )
        starts, counts = (head[part] for part in self._parts)
        counts[:] = 0
        for layer, (first, last) in step.columns.items():
            starts[layer], counts[layer] = first, last - first
        index_there, coefficient_there = (numbers[part].reshape(columns, rows) for part in parts)
        _spread(index_there, step.index, step.rows, 0)
        _spread(coefficient_there.view(np.float32), step.coefficient, step.rows, 1.0)
        self._step_memory.copy((self._head, 0), (cells, len(head)))

    def _load_vectors(self) -> None:
        table = self.table
        if not table.changed_slots:
            return
        slots = np.unique(table.changed_slots)
        table.changed_slots = []
        if len(self._vectors) != len(table.vectors):
            self._vectors = torch.from_numpy(table.vectors).to(self._vectors.device, copy=True)
            self._step = None  # its descriptor names the old table
            return
        width = table.hidden_size
        staged = self._vector_memory.take(len(slots) * width)
        staged.numpy().view(np.float32).reshape(-1, width)[:] = table.vectors[slots]
        flat = self._vectors.view(torch.int32).view(-1)
        # One copy for slots that follow each other, as fresh ones do.
        breaks = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
        runs = [(int(slots[a]), a, b - a) for a, b in pairwise(breaks)]
        self._vector_memory.copy(*((flat[s * width : (s + n) * width], a * width) for s, a, n in runs))

    def _leave(self) -> None:
        self._counts.zero_()
        if self.proving:
            self.settle()

    def settle(self) -> None:
        """Fetch what the device has counted; waits for it. Between steps."""
        visits = self._visits.cpu().numpy()
        edited = visits - self._visits_seen
        self.counters["blocks_edited"] += int(edited.sum())
        self.counters["blocks_missed"] += int(np.maximum(self._visits_due - edited, 0).sum())
        self._visits_seen = visits.copy()
        self._visits_due[:] = 0

    # --- a block -------------------------------------------------------------------------------

    def edit(self, hidden: Tensor, residual: Tensor | None, layer: int) -> None:
        """As in `Plane`. With no step on, or under capture, a launch that may add something when it is replayed."""
        if layer in self.columns:
            super().edit(hidden, residual, layer)
        elif vllm_plane.in_step() is not self or _is_captured(hidden):
            self._add(hidden.view(-1, hidden.shape[-1]), layer)

    def _add(self, hidden: Tensor, layer: int) -> None:
        steer_rows(hidden, self._descriptor, layer)


def _is_captured(hidden: Tensor) -> bool:
    return hidden.is_cuda and torch.cuda.is_current_stream_capturing()


class _HostMemory:
    """What copies to the device are made from: int32, in two buffers by turns.

    On CUDA it is pinned, a copy runs beside the host, and a buffer is taken again only when the copies out of
    it are done.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.int32) for _ in range(2)]
        self._copied: list[Any] = [torch.cuda.Event() for _ in self._buffers] if self._pinned else []  # type: ignore[no-untyped-call]
        self._turn = 0

    def take(self, size: int) -> Tensor:
        """The next buffer's first `size` numbers, to be written."""
        self._turn = 1 - self._turn
        if self._pinned:
            self._copied[self._turn].synchronize()
        if len(self._buffers[self._turn]) < size:
            self._buffers[self._turn] = torch.empty(_room(size), dtype=torch.int32, pin_memory=self._pinned)
        return self._buffers[self._turn][:size]

    def copy(self, *targets: tuple[Tensor, int]) -> None:
        """Enqueue copies into int32 [n] targets on the device, each from where in the buffer it says."""
        for target, start in targets:
            target.copy_(self._buffers[self._turn][start : start + len(target)], non_blocking=True)
        if self._pinned:
            self._copied[self._turn].record()


def _spread(target: NDArray[Any], values: NDArray[Any], rows: NDArray[np.int64] | None, rest: float) -> None:
    """Set the columns of `target` [columns, rows] to `values` at `rows`, or at all, and to `rest` elsewhere."""
    if rows is None:
        target[:] = values
    else:
        target.fill(rest)
        target[:, rows] = values


def _aligned(size: int) -> int:
    """The next place, in numbers of four bytes, where a table may begin."""
    words = ALIGNMENT // 4
    return -(-size // words) * words


def _room(size: int) -> int:
    """Room to grow into."""
    return 1 << max(0, size - 1).bit_length()
