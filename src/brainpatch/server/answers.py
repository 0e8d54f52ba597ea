"""OpenAI's answers of our own server: whole ones and the events of a stream."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from brainpatch.runtime.requests import Generation
from brainpatch.server.asked import FIELD

_LOWEST: Final = -9999.0
"""Stands for a log-probability of minus infinity, which JSON does not have."""
Texts = Callable[[Sequence[int]], list[str]]
"""What each token reads by itself."""


@dataclass
class Shape:
    """One answer's head, and how its choices look. `chat` tells the two routes apart."""

    model: str
    echo: dict[str, Any]
    chat: bool
    texts: Texts
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{secrets.token_hex(12)}"

    def whole(self, answers: Sequence[Generation], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        choices = []
        for index, answer in enumerate(answers):
            choice: dict[str, Any] = {"index": index}
            if self.chat:
                choice["message"] = {"role": "assistant", "content": answer.text}
            else:
                choice["text"] = answer.text
            choice |= {
                "logprobs": self._logprobs(answer),
                "finish_reason": answer.finish_reason,
                FIELD: self.echo,
            }
            choices.append(choice)
        return {**self._head("chat.completion"), "choices": choices, "usage": usage}

    def begin(self, index: int) -> dict[str, Any]:
        """The first event of a choice."""
        return self._event(index, "", None, {FIELD: self.echo}, role=True)

    def piece(self, index: int, text: str) -> dict[str, Any]:
        """More text of a choice."""
        return self._event(index, text, None, {})

    def end(self, index: int, reason: str) -> dict[str, Any]:
        """The last event of a choice."""
        return self._event(index, "", reason, {FIELD: self.echo}, last=True)

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The event that has the usage and no choices."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage}

    def _head(self, kind: str) -> dict[str, Any]:
        name = kind if self.chat else "text_completion"
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}

    def _event(
        self,
        index: int,
        text: str,
        reason: str | None,
        more: dict[str, Any],
        *,
        role: bool = False,
        last: bool = False,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index}
        if self.chat:
            delta: dict[str, Any] = {} if last else {"content": text}
            choice["delta"] = {"role": "assistant", **delta} if role else delta
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": reason, **more}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _logprobs(self, answer: Generation) -> dict[str, Any] | None:
        if answer.logprobs is None:
            return None
        rows = []
        for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
            likely = sorted(entry.items(), key=lambda item: -item[1])
            rows.append((token, entry[token], likely))
        ids = sorted({token for _, _, likely in rows for token, _ in likely})
        text = dict(zip(ids, self.texts(ids), strict=True))
        if self.chat:
            return {
                "content": [
                    {**_scored(text[token], p), "top_logprobs": [_scored(text[t], q) for t, q in likely]}
                    for token, p, likely in rows
                ],
                "refusal": None,
            }
        offsets, at = [], 0
        for token, _, _ in rows:
            offsets.append(at)
            at += len(text[token])
        return {
            "tokens": [text[token] for token, _, _ in rows],
            "token_logprobs": [_finite(p) for _, p, _ in rows],
            "top_logprobs": [{text[t]: _finite(q) for t, q in likely} for _, _, likely in rows],
            "text_offset": offsets,
        }


def usage_of(answers: Sequence[Generation], n: int) -> dict[str, Any]:
    """Tokens of a request; a prompt counts once, however many answers it has."""
    prompt = sum(answer.prompt_tokens for answer in answers[::n])
    completion = sum(len(answer.token_ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _scored(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode("utf-8", "surrogatepass"))}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST
