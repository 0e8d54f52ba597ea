"""Seeds on a CPU, where vLLM's first model runner would end the engine.

A prompt that is computed in several steps is sampled after each, and all but the last token are thrown away.
The runner then turns the request's generator back by an offset, which generators on a CPU do not have: vLLM
0.24 to 0.32 raise there, and the engine dies of it, patches or not. Here such a step draws from a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class _Copy(torch.Generator):
    """A generator that is there to be drawn from in vain."""

    def get_offset(self) -> int:
        """A number for the runner to subtract from."""
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        """Nothing to turn back: the original was not drawn from."""
        return self


@contextmanager
def kept_seeds(runner: Any) -> Iterator[None]:
    """In here the runner samples; generators of requests whose token it will throw away stay as they are."""
    mask = getattr(runner, "discard_request_mask", None)
    if runner.device.type != "cpu" or mask is None:
        yield
        return
    generators = runner.input_batch.generators
    thrown_away = np.flatnonzero(mask.np[: runner.input_batch.num_reqs]).tolist()
    originals = {i: generators[i] for i in thrown_away if i in generators}
    copies = {i: _copy(original) for i, original in originals.items()}
    generators.update(copies)
    try:
        yield
    finally:
        for i, original in originals.items():
            if generators.get(i) is copies[i]:
                generators[i] = original


def _copy(original: torch.Generator) -> _Copy:
    copy = _Copy()
    copy.set_state(original.get_state())
    return copy
