"""What goes into an engine and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from brainpatch.runtime.config import GenerationConfig
from brainpatch.runtime.meaning import ResolvedSet

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Prompt: TypeAlias = "str | Sequence[Mapping[str, Any]] | Sequence[int]"
"""A string, chat messages with `role` and `content`, or token ids."""


@dataclass(frozen=True)
class Request:
    """One answer to be generated: `prompt_ids` are the model's token ids, special tokens included.

    For `score`: `forced` are the answer's tokens, which are not chosen then, and `rows` takes what each of
    them was chosen from.
    """

    prompt_ids: tuple[int, ...]
    config: GenerationConfig
    patches: ResolvedSet
    forced: tuple[int, ...] = ()
    rows: list[NDArray[np.float32]] | None = None


@dataclass
class Generation:
    """One answer.

    `token_ids` are the generated ones, a final end-of-sequence token included. `logprobs` has one
    mapping (token id -> natural log-probability) for each of them, or is None when not asked for.
    `finish_reason` is "stop" or "length". `patches` is the mapping that was applied, strengths
    clamped, and `digest` identifies its meaning. `cached_tokens` counts prompt tokens whose keys and
    values came from a cache.
    """

    text: str
    token_ids: list[int]
    logprobs: list[dict[int, float]] | None
    finish_reason: str
    prompt_tokens: int
    patches: dict[str, Any] = field(default_factory=dict)
    cached_tokens: int = 0
    digest: str = ""


class Scored(NamedTuple):
    """An answer's tokens, and the natural log-probabilities at each: float32 [tokens, vocabulary]."""

    token_ids: list[int]
    logprobs: NDArray[np.float32]


class Listener(Protocol):
    """Who waits for an answer while it is made. Called from the engine's thread."""

    def piece(self, text: str) -> None:
        """More of the answer's text."""

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits any more, so that the work may end."""


class TraceRow(NamedTuple):
    """What was added at one block's output and one position of one request.

    `norm` is the L2 norm of the difference that was measured on the residual stream in the model's
    dtype; `expected` that of the summed edits in float64; `applied_dtype` is the stream's dtype.
    """

    layer: int
    position: int
    norm: float
    expected: float
    applied_dtype: str = "float32"
