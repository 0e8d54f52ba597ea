"""Adding to decoder blocks inside a vLLM worker: hooks on the edited blocks, and on no others.

A block returns the residual stream in one of five forms:

- SUM: `(h, residual)`; the stream is h + residual.
- DONE: `(h, residual)`; h is the stream, the second element is stale.
- NONE: `(h, None)`, or a tuple of h alone; h is the stream.
- ONE: one tensor, the stream.
- HFB: what a Transformers block returns, with a leading batch axis of 1.

In every form, adding to the first element adds to the stream; only reading the stream needs the form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from brainpatch.errors import EngineError, RequestError

SUM, DONE, NONE, ONE, HFB = "SUM", "DONE", "NONE", "ONE", "HFB"


def first_element(output: Any) -> Tensor:
    """The tensor that an edit is added to."""
    first: Tensor = output if isinstance(output, Tensor) else output[0]
    return first


def with_first(output: Any, first: Tensor) -> Any:
    """`output` with its first element replaced; nothing is written in place."""
    return first if isinstance(output, Tensor) else (first, *output[1:])


def stream_of(output: Any, form: str) -> Tensor:
    """The residual stream after a block, in the stream's dtype."""
    return output[0] + output[1] if form == SUM else first_element(output)


@dataclass
class HookCount:
    """How often a block's hook ran since the last apply, and how many rows (tokens) it added to."""

    calls: int = 0
    rows: int = 0


@dataclass
class Trace:
    """What was measured at the edited blocks, one chunk for each forward pass."""

    positions: list[Tensor] = field(default_factory=list)
    norms: dict[int, list[Tensor]] = field(default_factory=dict)

    def add(self, layer: int, before: Tensor, after: Tensor) -> None:
        """Record the L2 norm, in float32, of the difference of two streams [..., hidden], per row."""
        moved = (after.float() - before.float()).reshape(-1, after.shape[-1])
        self.norms.setdefault(layer, []).append(torch.linalg.vector_norm(moved, dim=-1))


class BlockEditor:
    """The edits that one worker makes now. It holds one configuration, for all of its requests.

    `blocks` are the blocks of this rank by global number; `dtype` is the stream's.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Mapping[int, nn.Module],
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.model = model
        self.blocks = dict(blocks)
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.device = device
        self.forms: dict[int, str] = {}
        self.deltas: dict[int, Tensor] = {}
        self.counts: dict[int, HookCount] = {}
        self.trace: Trace | None = None
        self._handles: list[Any] = []
        self._broken = torch.zeros((), dtype=torch.bool, device=device)

    def apply(self, deltas: Mapping[int, Sequence[float]], num_layers: int) -> None:
        """Replace all edits: block number -> hidden_size numbers, cast once to the stream's dtype.

        All or nothing. Blocks of other ranks are left out. Errors: EngineError (BP508) for a layer or
        a length that the model does not have, RequestError (BP118) when a number is not finite in
        the stream's dtype.
        """
        cast: dict[int, Tensor] = {}
        for layer, values in deltas.items():
            if not 0 <= layer < num_layers:
                raise EngineError("BP508", f"an edit names block {layer}; the model has {num_layers}")
            if len(values) != self.hidden_size:
                raise EngineError(
                    "BP508", f"the edit at block {layer} has {len(values)} numbers, not {self.hidden_size}"
                )
            delta = torch.tensor(values, dtype=torch.float64).to(self.dtype)
            if not bool(torch.isfinite(delta).all()):
                raise RequestError(
                    "BP118", f"the edit at block {layer} is not finite in {dtype_name(self.dtype)}"
                )
            if layer in self.blocks:
                cast[layer] = delta.to(self.device)
        self.remove()
        self.deltas = cast
        for layer in sorted(cast):
            self.counts[layer] = HookCount()
            self._handles.append(self.blocks[layer].register_forward_hook(self._adder(layer)))
        self._broken.zero_()
        if deltas:
            self._handles.append(MethodTap(self.model, "compute_logits", self._watch_logits))

    def remove(self) -> None:
        """Take every hook off; the model is then the unpatched one."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.deltas, self.counts = [], {}, {}

    def norms(self) -> dict[int, float]:
        """L2 norms of the edits as cast, summed in float64."""
        return {
            layer: math.sqrt(float(delta.double().square().sum())) for layer, delta in self.deltas.items()
        }

    @property
    def broken(self) -> bool:
        """Whether logits were NaN or infinite since the last apply with edits."""
        return bool(self._broken)

    def _watch_logits(self, logits: Tensor | None, *_arguments: Any, **_named: Any) -> None:
        if logits is not None and logits.numel():  # other ranks have none
            # NaN fails the comparison, too; kept on the device, so that nothing waits here
            self._broken |= ~(logits.amax() < math.inf)

    def _adder(self, layer: int) -> Callable[[nn.Module, Any, Any], Any]:
        delta, count = self.deltas[layer], self.counts[layer]

        def add(_module: nn.Module, _arguments: Any, output: Any) -> Any:
            first = first_element(output)
            count.calls += 1
            count.rows += first.numel() // first.shape[-1]
            edited = with_first(output, first + delta)
            if self.trace is not None:
                form = self.forms[layer]
                self.trace.add(layer, stream_of(output, form), stream_of(edited, form))
            return edited

        return add


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


class MethodTap:
    """Sees the arguments and the result of every call of one of a model's methods, until `remove`.

    It replaces the method on the instance: vLLM's decorated models call `forward` itself, and not
    always through `__call__`, which is what runs hooks.
    """

    def __init__(self, model: nn.Module, name: str, seen: Callable[..., None]) -> None:
        """`seen(result, *arguments, **named)` is called after each call."""
        self._model = model
        self._name = name
        self._own = model.__dict__.get(name)
        plain = getattr(model, name)

        def tapped(*arguments: Any, **named: Any) -> Any:
            result = plain(*arguments, **named)
            seen(result, *arguments, **named)
            return result

        model.__dict__[name] = tapped

    def remove(self) -> None:
        """Give the model its own method back."""
        if self._own is None:
            self._model.__dict__.pop(self._name, None)
        else:
            self._model.__dict__[self._name] = self._own
