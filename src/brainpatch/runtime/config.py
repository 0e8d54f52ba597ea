"""How a request is generated: the parameters that every engine understands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import msgspec

from brainpatch.errors import RequestError

_Probability = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
_COLDEST = 0.001
_Penalty = Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)]


@dataclass
class GenerationConfig:
    """Parameters of one request.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. `n` answers are drawn from one prompt,
    the i-th with seed `seed + i`; `seed` None draws from fresh entropy. `logprobs` k returns, for each
    generated token, the natural log-probabilities of the k likeliest tokens and of the chosen one, as
    the model gives them (before temperature and penalties). An answer ends before the first of the
    `stop` strings. `extra` is handed to the engine as it is.
    """

    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)] = 128
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=100.0)] = 0.0
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=100.0)] = 1.0
    seed: int | None = 0
    stop: Sequence[str] = field(default_factory=list)
    n: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    ignore_eos: bool = False
    min_p: _Probability = 0.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def do_sample(self) -> bool:
        """True when tokens are drawn, False when the likeliest one is taken."""
        return self.temperature > 0

    def to_dict(self) -> dict[str, Any]:
        """All parameters as plain Python values."""
        return asdict(self)

    def validate(self) -> None:
        """Raise RequestError (BP404) naming the first parameter of the wrong type or range."""
        if isinstance(self.stop, str):
            raise RequestError("BP404", "stop is a list of strings, not one string", "Write stop=[...].")
        try:
            msgspec.convert(asdict(self), GenerationConfig, strict=True)
        except msgspec.ValidationError as error:
            raise RequestError("BP404", f"{error}".replace("$.", "")) from None
        if 0 < self.temperature < _COLDEST:
            raise RequestError("BP404", f"temperature is 0 or at least {_COLDEST}, not {self.temperature:g}")
        if any(not text for text in self.stop):
            raise RequestError("BP404", "a stop string is empty")
