"""Choosing tokens, row by row, inside the library's own `generate`.

A `Sampler` is handed to `generate` both as a logits processor and as a stopping criterion: it applies each
row's own parameters, draws with the row's own generator, and leaves the chosen token as the only possible
one.
So rows with different parameters share a batch, and a draw does not depend on the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from brainpatch.backends.answers import Answer
from brainpatch.backends.sampling import advance

if TYPE_CHECKING:
    from brainpatch.backends.transformers_edits import Edits


class Sampler:
    """Logits processor and stopping criterion of one batch."""

    def __init__(self, answers: Sequence[Answer], edits: Edits) -> None:
        self.answers = answers
        self._edits = edits

    def choose(self, input_ids: Any, scores: Any) -> Any:
        """Scores [rows, vocabulary] in which each row's chosen token alone is possible."""
        import torch

        forced = torch.full_like(scores, -math.inf)
        for number, (answer, logits) in enumerate(
            zip(self.answers, scores.float().cpu().numpy(), strict=True)
        ):
            before = len(answer.token_ids)
            advance(answer, logits)
            # A row that has ended goes on with anything until the last one has.
            forced[number, answer.token_ids[-1] if len(answer.token_ids) > before else 0] = 0.0
        self._edits.columns += 1
        return forced

    def stop(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """Which rows are finished: bool [rows]."""
        import torch

        return torch.tensor([answer.done for answer in self.answers], device=input_ids.device)
