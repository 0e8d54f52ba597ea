"""Proof, when a model is loaded, that edits act: before the first request, and not at the first wrong answer.

Two things are shown with passes over a few made-up tokens:

- what the blocks return (`vllm_forms`), by the model's own eager code, so that modules can be watched;
- that an edit at each block of this rank changes what the model returns, on the road that requests take:
  through the compiled graphs where there are any.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from brainpatch.backends.vllm_forms import FormFinder
from brainpatch.backends.vllm_plane import Plane
from brainpatch.errors import EngineError
from brainpatch.runtime.meaning import PreparedIntervention, ResolvedPatch, ResolvedSet

_ROWS: Final = 8
_REQUEST: Final = "brainpatch-proof"


def find_forms(
    runner: Any, kind: str, plane: Plane, blocks: dict[int, nn.Module]
) -> tuple[dict[int, str], np.ndarray]:
    """Block number -> form, and a test edit of the stream's size (float32 [hidden_size]).

    Errors: EngineError (BP504, BP506).
    """
    model = runner.get_model()
    finder = FormFinder(model, blocks, plane.table.hidden_size, plane.dtype)
    with _eager(model):
        cases = [(-1, 0)]
        while cases:
            finder.start(cases.pop(0))
            try:
                _pass(runner, kind)
            finally:
                cases += finder.stop()
    assert finder.edit is not None  # noqa: S101 - set by the plain pass
    return finder.forms(), finder.edit.float().cpu().numpy()


def prove_edits(runner: Any, kind: str, plane: Plane, vector: np.ndarray) -> None:
    """An edit at each local block changes the model's result. EngineError (BP506) where it does not."""
    before = plane.counters["blocks_missed"]
    plain = _result(_pass(runner, kind))
    for layer in sorted(plane.table.layers):
        plane.table.admit(_REQUEST, _one_edit(layer, vector), 0)
        plane.proving = True
        plane.begin([_REQUEST], np.array([_ROWS]), np.zeros(_ROWS, dtype=np.int64))
        try:
            edited = _result(_pass(runner, kind))
        finally:
            plane.end()
            plane.proving = False
            plane.table.release(_REQUEST)
        if plane.counters["blocks_missed"] != before:
            raise EngineError("BP506", f"a forward pass did not go through the edit at block {layer}")
        if plain is not None and edited is not None and torch.equal(plain, edited):
            raise EngineError("BP506", f"a test edit at block {layer} changed nothing in the model's result")
    for name in plane.counters:
        plane.counters[name] = 0


def _one_edit(layer: int, vector: np.ndarray) -> ResolvedSet:
    digest = hashlib.sha256(vector.astype("<f4").tobytes()).digest()
    edit = PreparedIntervention(layer, "all", 1.0, vector.astype(np.float32), digest)
    return ResolvedSet([ResolvedPatch("proof", 1.0, None, (edit,))])


def _pass(runner: Any, kind: str) -> Any:
    """One forward pass over made-up tokens, as vLLM itself does when it warms up."""
    # Without attention's metadata V1's kernels leave their output as it was, and no two passes are alike.
    return runner._dummy_run(_ROWS, force_attention=True) if kind == "V1" else runner._dummy_run(_ROWS)


def _result(answer: Any) -> Tensor | None:
    """The last hidden states; None on a pipeline stage that has none."""
    hidden = answer[0] if isinstance(answer, tuple) else answer
    return hidden[:_ROWS].clone() if isinstance(hidden, Tensor) else None


@contextmanager
def _eager(model: nn.Module) -> Iterator[None]:
    """The model's own code runs in here, and not what was compiled from it."""
    compiled = [module for module in model.modules() if getattr(module, "do_not_compile", True) is False]
    for module in compiled:
        module.do_not_compile = True  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in compiled:
            module.do_not_compile = False  # type: ignore[assignment]
