"""Choosing tokens, row by row, inside the library's own `generate`.

A `Sampler` is handed to `generate` both as a logits processor and as a stopping criterion: it applies each
row's own parameters, draws with the row's own generator, and leaves the chosen token as the only possible
one.
So rows with different parameters share a batch, and a draw does not depend on the batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from brainpatch.errors import EngineError
from brainpatch.runtime.requests import Listener, Request

if TYPE_CHECKING:
    from brainpatch.backends.transformers_edits import Edits

_UNFINISHED_CHARACTER = "\ufffd"


class Answer:
    """One row's answer as it grows."""

    def __init__(
        self,
        request: Request,
        tokenizer: Any,
        end_ids: frozenset[int],
        listener: Listener | None = None,
    ) -> None:
        import torch

        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, float]] = []
        self.text = ""
        self.finish_reason = ""
        self.error: EngineError | None = None
        """Why there is no answer."""
        self.counts: Counter[int] = Counter()
        self._tokenizer = tokenizer
        self._end_ids = frozenset() if request.config.ignore_eos else end_ids
        self._listener = listener
        self._emitted = 0
        self._decoded_from = 0
        self._decoded_to = 0
        self._stopped = False
        self.generator = torch.Generator()
        if request.config.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(request.config.seed % 2**63)

    @property
    def done(self) -> bool:
        """Whether the row needs no more tokens."""
        return bool(self.finish_reason)

    def add(self, token: int) -> None:
        """Take one token, and find out whether the answer ends with it."""
        self.token_ids.append(token)
        self.counts[token] += 1
        if token in self._end_ids:
            self._finish("stop")
            return
        self._decode(final=False)
        if self._cut_at_stop():
            self._finish("stop")
        elif len(self.token_ids) >= self.request.config.max_new_tokens:
            self._finish("length")
        else:
            self._send(len(self.text) - self._held_back())

    def hear(self) -> None:
        """End the answer when nobody waits for it any more."""
        if self._listener is not None and self._listener.cancelled and not self.done:
            self.finish_reason = "cancelled"

    def fail(self, error: EngineError) -> None:
        """End the answer without one."""
        self.error = error
        self.finish_reason = "error"

    def _finish(self, reason: str) -> None:
        self.finish_reason = reason
        if not self._stopped:
            self._decode(final=True)
            self._cut_at_stop()
        self._send(len(self.text))

    def _decode(self, *, final: bool) -> None:
        """Append the text of new tokens.

        Decoding starts a few tokens back, since a token's text depends on its neighbours; text that ends
        in half a character waits for the next token.
        """
        ids = self.token_ids[:-1] if self.token_ids[-1] in self._end_ids else self.token_ids
        known = self._read(ids[self._decoded_from : self._decoded_to])
        whole = self._read(ids[self._decoded_from :])
        if len(whole) > len(known) and (final or not whole.endswith(_UNFINISHED_CHARACTER)):
            self.text += whole[len(known) :]
            self._decoded_from, self._decoded_to = self._decoded_to, len(ids)

    def _read(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _cut_at_stop(self) -> bool:
        """Cut the text before the first stop string; whether there was one."""
        found = [at for stop in self.request.config.stop if (at := self.text.find(stop)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self._stopped = True
        return bool(found)

    def _held_back(self) -> int:
        """How many characters at the end may yet turn out to be the beginning of a stop string."""
        return max((len(stop) - 1 for stop in self.request.config.stop), default=0)

    def _send(self, end: int) -> None:
        if self._listener is not None and end > self._emitted:
            self._listener.piece(self.text[self._emitted : end])
            self._emitted = end


class Sampler:
    """Logits processor and stopping criterion of one batch."""

    def __init__(self, answers: Sequence[Answer], edits: Edits) -> None:
        self.answers = answers
        self._edits = edits

    def choose(self, input_ids: Any, scores: Any) -> Any:
        """Scores [rows, vocabulary] in which each row's chosen token alone is possible."""
        import torch

        forced = torch.full_like(scores, -math.inf)
        for number, answer in enumerate(self.answers):
            answer.hear()
            token = 0
            if not answer.done:
                try:
                    token = self._token(answer, scores[number].float())
                    answer.add(token)
                except EngineError as error:  # the row's own
                    answer.fail(error)
            forced[number, token] = 0.0
        self._edits.columns += 1
        return forced

    def stop(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """Which rows are finished: bool [rows]."""
        import torch

        return torch.tensor([answer.done for answer in self.answers], device=input_ids.device)

    def _token(self, answer: Answer, logits: Any) -> int:
        import torch

        config = answer.request.config
        if not bool(torch.isfinite(logits.max())):  # NaN spreads to the maximum
            raise _not_finite(answer.request)
        if config.logprobs is not None:
            raw = torch.log_softmax(logits, dim=-1)
        changed = _penalised(answer, logits)
        token = _draw(answer, changed) if config.do_sample else int(changed.argmax())
        if config.logprobs is not None:
            best = raw.topk(config.logprobs)
            row = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            row.setdefault(token, float(raw[token]))
            answer.logprobs.append(row)
        return token


def _penalised(answer: Answer, logits: Any) -> Any:
    import torch
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    config = answer.request.config
    if config.repetition_penalty != 1.0:
        seen = torch.tensor([[*answer.request.prompt_ids, *answer.token_ids]], device=logits.device)
        logits = RepetitionPenaltyLogitsProcessor(float(config.repetition_penalty))(
            seen, logits[None].clone()
        )[0]
    if answer.counts and (config.presence_penalty or config.frequency_penalty):
        logits = logits.clone()
        ids = torch.tensor(list(answer.counts), device=logits.device)
        counts = torch.tensor(list(answer.counts.values()), device=logits.device)
        logits[ids] -= config.presence_penalty + config.frequency_penalty * counts
    return logits


def _draw(answer: Answer, logits: Any) -> int:
    import torch
    from transformers.generation import logits_process as library

    config = answer.request.config
    scores = logits[None]
    warpers: list[Any] = [library.TemperatureLogitsWarper(float(config.temperature))]
    if config.top_k:
        warpers.append(library.TopKLogitsWarper(config.top_k))
    if config.top_p < 1.0:
        warpers.append(library.TopPLogitsWarper(config.top_p))
    if config.min_p > 0.0:
        warpers.append(library.MinPLogitsWarper(config.min_p))
    for warper in warpers:
        scores = warper(None, scores)
    # On the CPU, so that a seed gives the same draw whatever the device.
    probabilities = torch.softmax(scores[0], dim=-1).cpu()
    return int(torch.multinomial(probabilities, 1, generator=answer.generator))


def _not_finite(request: Request) -> EngineError:
    strengths = ", ".join(f"{patch.name}@{patch.strength:g}" for patch in request.patches.patches)
    return EngineError("BP509", f"with {strengths or 'no patch'}, the model gives NaN or infinite logits")
