"""The forward passes of one batch on MLX, in the order of mlx-lm's own generation.

The prompts but for their last tokens are computed in chunks; then each pass takes one token a row. So a row alone,
without patches, gets the very numbers that `mlx_lm.generate` works with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from brainpatch.backends.mlx_edits import Edits

CHUNK = 2048
"""How many columns of prompts one pass computes, at most: mlx-lm's own step."""

_TIDY_EVERY = 256  # passes after which MLX gives back buffers that it keeps, as in mlx-lm


class Passes:
    """One batch. Rows of different lengths are padded on the right, and the caches then move the padding away, as
    mlx-lm does it; `edits` hears before each pass what it computes."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], edits: Edits | None = None) -> None:
        from mlx_lm.models.cache import make_prompt_cache

        self._model = model
        self._prompts = prompts
        self._edits = edits
        self._positions = [len(prompt) - 1 for prompt in prompts]
        self._padded = len(set(self._positions)) > 1
        self._count = 0
        self._cache = make_prompt_cache(model)
        if self._padded:
            own = [make_prompt_cache(model) for _ in prompts]
            self._cache = [row[0].merge(list(row)) for row in zip(*own, strict=True)]

    def prefill(self, chunk: int, gone: Callable[[], bool]) -> None:
        """Compute the prompts but for their last tokens. Ends early when `gone`."""
        import mlx.core as mx
        import numpy as np

        lengths = self._positions
        width = max(lengths)
        # Caches of windows take a pass of one column for an answer's token, which has no padding.
        if self._padded and width % chunk == 1:
            width += 1
        ids = np.zeros((len(lengths), width), dtype=np.int32)
        for number, prompt in enumerate(self._prompts):
            ids[number, : len(prompt) - 1] = prompt[:-1]
        if self._padded:
            for cache in self._cache:
                cache.prepare(lengths=lengths, right_padding=[width - length for length in lengths])
        for start in range(0, width, chunk):
            if gone():
                return
            columns = ids[:, start : start + chunk]
            self._expect([(start, min(columns.shape[1], length - start)) for length in lengths])
            self._model(mx.array(columns), cache=self._cache)  # its logits are not used, so never computed
            self._settle()
        if self._padded:
            for cache in self._cache:
                cache.finalize()
            self._settle()

    def step(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Compute each row's next token, and return the logits after it: float32 [rows, vocabulary]."""
        import mlx.core as mx
        import numpy as np

        self._expect([(position, 1) for position in self._positions])
        logits = self._model(mx.array(list(tokens), dtype=mx.int32)[:, None], cache=self._cache)[:, -1]
        self._positions = [position + 1 for position in self._positions]
        self._count += 1
        if self._count % _TIDY_EVERY == 0:
            mx.clear_cache()
        return np.array(logits.astype(mx.float32))

    def _expect(self, spans: list[tuple[int, int]]) -> None:
        if self._edits is not None:
            self._edits.spans = spans

    def _settle(self) -> None:
        """Compute what the caches hold, and give back the buffers that this took."""
        import mlx.core as mx

        mx.eval([cache.state for cache in self._cache])
        mx.clear_cache()
