"""Where a model runner of vLLM says which requests a forward pass computes, row by row.

Two runners exist, and both are told apart by what they have, not by a version's number: a runner that lacks
one of the things used here is refused by name when the model is loaded.

- V1 calls its own `_model_forward` when its batch is laid out.
- V2 asks its `model_state` for inputs (`prepare_inputs`) just before the pass.

Positions come from the runner's own tensor where it lies in the host's memory: that is what the model is
given, whatever scheduling ahead or rejected drafts did to the host's bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from brainpatch.errors import CapabilityError


class Begin(Protocol):
    """Called before each forward pass: the batch's requests in row order, how many rows each has, and the
    position of every row."""

    def __call__(
        self, requests: Sequence[str], counts: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> None: ...


def watch(runner: Any, begin: Begin) -> str:
    """Have `begin` called before each forward pass of real requests; returns the runner's name, V1 or V2.

    After the model is loaded. Errors: CapabilityError (BP502) for a runner that is not known.
    """
    state = getattr(runner, "model_state", None)
    if state is not None and callable(getattr(state, "prepare_inputs", None)):
        _watch_v2(state, begin)
        return "V2"
    needed = ("_model_forward", "input_batch", "requests", "query_start_loc")
    missing = [name for name in needed if not hasattr(runner, name)]
    if missing:
        kind = f"{type(runner).__module__}.{type(runner).__qualname__}"
        raise CapabilityError(
            "BP502", f"the model runner {kind} is not known (it has no {', '.join(missing)})"
        )
    _watch_v1(runner, begin)
    return "V1"


def _watch_v1(runner: Any, begin: Begin) -> None:
    forward: Callable[..., Any] = runner._model_forward

    def with_edits(input_ids: Any = None, positions: Any = None, *rest: Any, **named: Any) -> Any:
        requests = list(runner.input_batch.req_ids)
        starts = runner.query_start_loc.np[: len(requests) + 1].astype(np.int64)
        computed = runner.input_batch.num_computed_tokens_cpu[: len(requests)]
        begin(requests, np.diff(starts), _positions(positions, starts, computed))
        return forward(input_ids, positions, *rest, **named)

    runner._model_forward = with_edits


def _watch_v2(state: Any, begin: Begin) -> None:
    prepare: Callable[..., Any] = state.prepare_inputs

    def with_edits(input_batch: Any, *rest: Any, **named: Any) -> Any:
        requests = list(input_batch.req_ids)
        starts = np.asarray(input_batch.query_start_loc_np[: len(requests) + 1], dtype=np.int64)
        computed = input_batch.num_computed_tokens_np[: len(requests)]
        begin(requests, np.diff(starts), _positions(input_batch.positions, starts, computed))
        return prepare(input_batch, *rest, **named)

    state.prepare_inputs = with_edits


def _positions(
    given: Tensor | None, starts: NDArray[np.int64], computed: NDArray[np.integer]
) -> NDArray[np.int64]:
    """The position of every row. `starts` [requests + 1] are row numbers, `computed` [requests] first positions."""
    total = int(starts[-1])
    if given is not None and given.device.type == "cpu" and given.dim() == 1:
        return given[:total].numpy().astype(np.int64)
    counts = np.diff(starts)
    return np.arange(total) - np.repeat(starts[:-1], counts) + np.repeat(computed.astype(np.int64), counts)
