"""Requests whose activations stop being numbers, and the blocks of the KV cache that they leave behind.

A strength that is far too large can drive a model to NaN or infinity. Two things must then hold: the caller
learns it (BP509), and nobody else does. A NaN that is left in a freed block reaches whoever gets the block
next: attention kernels multiply what lies beyond a request's end by 0, and 0 times NaN is NaN. So blocks of
such a request are set to zero when they are handed out again; until then, requests with equal patches may
still share them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brainpatch.backends.vllm_forms import tensors_in
from brainpatch.errors import CapabilityError

_REMEMBERED: Final = 4096


@dataclass(eq=False)
class _Watched:
    tag: str
    blocks: set[int] = field(default_factory=set)
    """All that the request was ever given."""
    broken: bool = False


class Health:
    """What one worker knows about the patched requests it runs. Owned by the runner's thread."""

    def __init__(self) -> None:
        self.broken: OrderedDict[str, None] = OrderedDict()
        """Tags of requests that broke, the latest last; at most 4096 are remembered."""
        self.total = 0
        """How many requests broke since the start."""
        self._watched: dict[str, _Watched] = {}
        self._dirty: set[int] = set()
        self._pending: list[tuple[Any, Tensor, list[_Watched | None], NDArray[np.integer]]] = []

    def admit(self, request: str, tag: str) -> None:
        """Watch a patched request."""
        self._watched.setdefault(request, _Watched(tag))

    def release(self, request: str) -> None:
        """Watch a request no more. Its last steps may still be judged later."""
        self._watched.pop(request, None)

    def note_blocks(self, scheduled: Any) -> None:
        """Remember which blocks patched requests hold. `scheduled` is vLLM's SchedulerOutput."""
        for request, _, blocks in _handed_out(scheduled):
            watched = self._watched.get(request)
            if watched is not None:
                given = {block for _, block, _ in _numbered(blocks)}
                watched.blocks |= given
                if watched.broken:
                    self._dirty |= given

    def clean(self, scheduled: Any, runner: Any) -> None:
        """Set dirty blocks that are handed out in this step to zero."""
        if not self._dirty:
            return
        sizes = [group.kv_cache_spec.block_size for group in runner.kv_cache_config.kv_cache_groups]
        for _, computed, blocks in _handed_out(scheduled):
            for group, block, place in _numbered(blocks):
                if block in self._dirty and place >= computed // sizes[group]:
                    self._dirty.discard(block)
                    _zero(runner, block)

    def look(self, hidden: Tensor, requests: Sequence[str], counts: NDArray[np.integer]) -> None:
        """Find the patched requests with a row of `hidden` [rows, hidden_size] that is not finite."""
        if not self._watched:
            return
        owners = [self._watched.get(request) for request in requests]
        total = int(counts.sum())
        sums = hidden[:total].sum(dim=-1, dtype=torch.float32)
        if sums.device.type == "cpu":
            self._judge(sums, owners, np.asarray(counts))
            return
        # The host must not wait for the device: what a step computed is judged when a later one begins.
        copy = torch.empty(total, dtype=torch.float32, pin_memory=True).copy_(sums, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._pending.append((event, copy, owners, np.asarray(counts)))

    def catch_up(self, *, wait: bool = False) -> None:
        """Judge the steps that a device has finished; `wait`: all, once it has finished them."""
        while self._pending and (wait or self._pending[0][0].query()):
            event, sums, owners, counts = self._pending.pop(0)
            if wait:
                event.synchronize()
            self._judge(sums, owners, counts)

    def _judge(self, sums: Tensor, owners: list[_Watched | None], counts: NDArray[np.integer]) -> None:
        bad = ~np.isfinite(sums.numpy())
        if not bad.any():
            return
        for i in np.unique(np.repeat(np.arange(len(owners)), counts)[bad]).tolist():
            watched = owners[i]
            if watched is None or watched.broken:
                continue
            watched.broken = True
            self.total += 1
            # Not only when it is released: a request that is preempted loses its blocks before.
            self._dirty |= watched.blocks
            if watched.tag:
                self.broken[watched.tag] = None
                while len(self.broken) > _REMEMBERED:
                    self.broken.popitem(last=False)


def _handed_out(scheduled: Any) -> Iterator[tuple[str, int, Any]]:
    """(request, computed tokens, blocks by group) of requests that are new to the step or got new blocks.

    For a request that goes on, all its blocks are new, and 0 is said to be computed.
    """
    for new in scheduled.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, new.block_ids
    going_on = scheduled.scheduled_cached_reqs
    resumed = getattr(going_on, "resumed_req_ids", ())
    for i, (request, blocks) in enumerate(zip(going_on.req_ids, going_on.new_block_ids, strict=True)):
        if blocks is not None:
            yield request, going_on.num_computed_tokens[i] if request in resumed else 0, blocks


def _numbered(blocks: Any) -> Iterator[tuple[int, int, int]]:
    """(group, block, place in the request's list) of all blocks."""
    for group, numbers in enumerate(blocks):
        for place, block in enumerate(numbers):
            yield group, int(block), place


def check_layout(runner: Any) -> None:
    """CapabilityError (BP502) for a KV cache whose blocks could not be found again, to set them to zero."""
    for tensor in tensors_in(runner.kv_caches):
        _block_axis(tensor, runner.kv_cache_config.num_blocks)


def _block_axis(tensor: Tensor, total: int) -> int:
    """The axis along which a cache's blocks lie; several kernel blocks may make one of the scheduler's."""
    for axis in (0, 1):
        if tensor.dim() > axis and tensor.shape[axis] and tensor.shape[axis] % total == 0:
            return axis
    raise CapabilityError(
        "BP502", f"a KV cache of shape {tuple(tensor.shape)} for {total} blocks is not understood"
    )


def _zero(runner: Any, block: int) -> None:
    total = runner.kv_cache_config.num_blocks
    for tensor in tensors_in(runner.kv_caches):
        axis = _block_axis(tensor, total)
        parts = tensor.shape[axis] // total
        tensor.narrow(axis, block * parts, parts).zero_()
