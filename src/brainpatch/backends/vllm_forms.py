"""What the decoder blocks of a loaded vLLM model return, found by trying.

A table of families can be out of date, and a wrong form makes a wrong reading or a silent no-op. So a
few one-token requests are run at load, plain and with a test edit on each element of a block's output,
and what reaches the next block decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from brainpatch.backends import families
from brainpatch.backends.vllm_hooks import DONE, HFB, NONE, ONE, SUM, MethodTap, dtype_name, with_first
from brainpatch.errors import EngineError

Case = tuple[int, int]
"""A test edit: block number and element of its output. (-1, 0) is the run without one."""

PLAIN: Case = (-1, 0)

_NO_EFFECT = 0.01  # of the effect of editing the first element
_SAME_EFFECT = 0.25  # half-precision streams round the two edits differently


@dataclass(frozen=True)
class LocatedBlocks:
    """The decoder blocks of a loaded model: where they are, how many the whole model has, and this rank's."""

    path: str
    total: int
    local: dict[int, nn.Module]
    expected_form: str | None
    """By the table of families; None for one that is not in it."""


def locate_blocks(model: nn.Module, config: Any) -> LocatedBlocks:
    """Find the blocks of a vLLM model; `config` is its Transformers config. EngineError (BP503)."""
    path, blocks = families.find_blocks(model, config, vllm=True)
    # Blocks of other pipeline stages have placeholders here.
    local = {i: block for i, block in enumerate(blocks) if type(block).__name__ != "PPMissingLayer"}
    form = next((family.vllm_form for family in reversed(families.families_of(config))), None)
    return LocatedBlocks(path, len(blocks), local, form)


@dataclass
class _Seen:
    """One run: tensors that entered each block, first elements that left it, and the model's result."""

    entered: dict[int, list[Tensor]] = field(default_factory=dict)
    left: dict[int, Tensor] = field(default_factory=dict)
    result: list[Tensor] = field(default_factory=list)


class FormFinder:
    """Finds the form of each local block. `start` a case, run a request, `stop`; then `forms`.

    Errors, from `stop` and `forms`: EngineError BP504 (not understood), BP506 (no effect).
    """

    def __init__(
        self, model: nn.Module, blocks: Mapping[int, nn.Module], hidden_size: int, dtype: torch.dtype
    ) -> None:
        self._model = model
        self._blocks = dict(blocks)
        self._hidden = hidden_size
        self._dtype = dtype
        self._runs: dict[Case, _Seen] = {}
        self._shapes: dict[int, str] = {}
        self.edit: Tensor | None = None
        """The test edit, [hidden_size] in the stream's dtype; there after the plain run."""
        self._handles: list[Any] = []
        self._case = PLAIN

    def start(self, case: Case) -> None:
        """Watch the next forward pass, with the case's edit on it."""
        self.stop_watching()
        self._case = case
        run = self._runs[case] = _Seen()
        for layer, block in self._blocks.items():
            self._handles.append(
                block.register_forward_pre_hook(self._entering(run, layer), with_kwargs=True)
            )
            self._handles.append(block.register_forward_hook(self._leaving(run, layer, case)))

        def seen(result: Any, *_arguments: Any, **_named: Any) -> None:
            if not run.result:
                run.result = [tensor.clone() for tensor in tensors_in(result)]

        self._handles.append(MethodTap(self._model, "forward", seen))

    def stop(self) -> list[Case]:
        """Take the watchers off. After the plain run: the cases that have to be tried."""
        self.stop_watching()
        run = self._runs[self._case]
        silent = [layer for layer in self._blocks if layer not in run.left]
        if silent:
            raise EngineError("BP506", f"hooks on the blocks {silent} did not run in a forward pass")
        if self._case != PLAIN:
            return []
        width = sum(float(run.left[layer].float().square().mean()) for layer in run.left) / len(run.left)
        pattern = torch.sin(torch.arange(1, self._hidden + 1, dtype=torch.float64))
        self.edit = (pattern * max(width, 1e-6) ** 0.5).to(self._dtype)
        return [
            (layer, element)
            for layer in self._tried()
            for element in range(2 if self._shapes[layer] == "pair" else 1)
        ]

    def stop_watching(self) -> None:
        """Take every watcher off; the model is as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def forms(self) -> dict[int, str]:
        """Block number -> form, for all local blocks."""
        found = {self._kind(layer): self._form(layer) for layer in self._tried()}
        return {layer: found[self._kind(layer)] for layer in self._blocks}

    # --- one run -------------------------------------------------------------------------------

    def _entering(self, run: _Seen, layer: int) -> Any:
        def watch(_module: nn.Module, arguments: Any, named: Any) -> None:
            if layer not in run.entered:
                run.entered[layer] = [
                    tensor.clone()
                    for tensor in tensors_in([*arguments, *named.values()])
                    if tensor.is_floating_point() and tensor.shape[-1] == self._hidden
                ]

        return watch

    def _leaving(self, run: _Seen, layer: int, case: Case) -> Any:
        def watch(_module: nn.Module, _arguments: Any, output: Any) -> Any:
            if layer in run.left:
                return None
            self._shapes[layer] = self._shape(layer, output)
            first = output if isinstance(output, Tensor) else output[0]
            run.left[layer] = first.clone()
            if layer != case[0] or self.edit is None:
                return None
            self.edit = self.edit.to(first.device)
            if case[1] == 0:
                return with_first(output, first + self.edit)
            return (first, output[1] + self.edit, *output[2:])

        return watch

    def _shape(self, layer: int, output: Any) -> str:
        """`tensor`, `alone` or `pair`; EngineError (BP504) for anything else."""
        first, rest = (output, ()) if isinstance(output, Tensor) else _split(layer, output)
        batched = first.dim() == 3 and first.shape[0] == 1
        if first.shape[-1] != self._hidden or not (first.dim() == 2 or batched):
            raise EngineError(
                "BP504", f"block {layer} returns a tensor of shape {list(first.shape)}, not [tokens, hidden]"
            )
        if first.dtype != self._dtype:
            found, wanted = dtype_name(first.dtype), dtype_name(self._dtype)
            raise EngineError("BP504", f"block {layer} returns {found}, and the model runs in {wanted}")
        if batched:
            return "batched"
        if not isinstance(output, Tensor) and rest and rest[0] is not None:
            if len(rest) == 1 and isinstance(rest[0], Tensor) and rest[0].shape == first.shape:
                return "pair"
            raise EngineError("BP504", f"block {layer} returns {1 + len(rest)} values of an unknown meaning")
        return "tensor" if isinstance(output, Tensor) else "alone"

    # --- judgement -----------------------------------------------------------------------------

    def _kind(self, layer: int) -> tuple[type[nn.Module], str]:
        return type(self._blocks[layer]), self._shapes[layer]

    def _tried(self) -> list[int]:
        """The first block of each kind, and the last local one, whose reader is another module."""
        first_of: dict[Any, int] = {}
        for layer in self._blocks:
            first_of.setdefault(self._kind(layer), layer)
        return sorted({*first_of.values(), max(self._blocks)})

    def _form(self, layer: int) -> str:
        shape = self._shapes[layer]
        self._check_arrival(layer)
        plain, moved = self._witness(PLAIN, layer), self._witness((layer, 0), layer)
        effect = _distance(moved, plain)
        if not effect > 0:  # also when it is NaN
            raise EngineError("BP506", f"a test edit at block {layer} changed nothing after it")
        if shape != "pair":
            return {"tensor": ONE, "alone": NONE, "batched": HFB}[shape]
        other = self._witness((layer, 1), layer)
        if _distance(other, plain) <= _NO_EFFECT * effect:
            return DONE
        if _distance(other, moved) <= _SAME_EFFECT * effect:
            return SUM
        raise EngineError(
            "BP504", f"block {layer} returns a pair, and editing its two elements has different effects"
        )

    def _check_arrival(self, layer: int) -> None:
        """What the next block receives has moved by the edit, in one tensor."""
        if layer + 1 not in self._blocks:
            return
        before, after = self._runs[PLAIN].entered[layer + 1], self._runs[layer, 0].entered[layer + 1]
        moved = [(a, b) for a, b in zip(before, after, strict=True) if not torch.equal(a, b)]
        if not moved:
            raise EngineError("BP506", f"a test edit at block {layer} did not reach block {layer + 1}")
        assert self.edit is not None  # noqa: S101 - set by stop() after the plain run
        wanted = self.edit.double()
        for a, b in moved:
            slack = 4 * torch.finfo(self._dtype).eps * (a.double().abs() + wanted.abs()) + 1e-12
            if bool(((b.double() - a.double() - wanted).abs() > slack).any()):
                raise EngineError(
                    "BP504", f"a test edit at block {layer} reached block {layer + 1} as another one"
                )
        if len(moved) > 1:
            raise EngineError("BP504", f"a test edit at block {layer} entered block {layer + 1} twice")

    def _witness(self, case: Case, layer: int) -> list[Tensor]:
        """What tells that the edit acted: the next block's first element, or the model's result."""
        run = self._runs[case]
        return [run.left[layer + 1]] if layer + 1 in self._blocks else run.result


def _split(layer: int, output: Any) -> tuple[Tensor, tuple[Any, ...]]:
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
        return output[0], output[1:]
    raise EngineError("BP504", f"block {layer} returns {type(output).__name__}, not a tensor or a tuple")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in a tensor, a nested sequence of them, or vLLM's IntermediateTensors."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(inner := getattr(value, "tensors", None), dict):
        yield from tensors_in(list(inner.values()))


def _distance(a: list[Tensor], b: list[Tensor]) -> float:
    return math.sqrt(sum(float((x.double() - y.double()).square().sum()) for x, y in zip(a, b, strict=True)))
