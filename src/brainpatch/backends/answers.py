"""One row's answer as it grows: its text, where it ends, and who listens. For engines that hand out logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from brainpatch.errors import EngineError
from brainpatch.runtime.requests import Generation, Listener, Request

_UNFINISHED_CHARACTER = "\ufffd"


class Answer:
    """One row's answer.

    `decode` reads token ids as text without special tokens; `end_ids` are the tokens that end an answer.
    """

    def __init__(
        self,
        request: Request,
        decode: Callable[[Sequence[int]], str],
        end_ids: frozenset[int],
        listener: Listener | None = None,
    ) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, float]] = []
        self.text = ""
        self.finish_reason = ""
        self.error: EngineError | None = None
        """Why there is no answer."""
        self.counts: Counter[int] = Counter()
        import numpy as np

        seed = request.config.seed
        self.random = np.random.default_rng(None if seed is None else seed % 2**63)
        """The row's own draws, so that its neighbours do not matter."""
        self._decode_ids = decode
        self._end_ids = frozenset() if request.config.ignore_eos else end_ids
        self._listener = listener
        self._emitted = 0
        self._decoded_from = 0
        self._decoded_to = 0
        self._stopped = False

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

    def generation(self, cached_tokens: int = 0) -> Generation:
        """The whole answer."""
        request = self.request
        return Generation(
            text=self.text,
            token_ids=self.token_ids,
            logprobs=None if request.config.logprobs is None else self.logprobs,
            finish_reason=self.finish_reason,
            prompt_tokens=len(request.prompt_ids),
            patches=request.patches.to_mapping(),
            cached_tokens=cached_tokens,
            digest=request.patches.digest,
        )

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
        return self._decode_ids(ids) if ids else ""

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
