"""The bodies of OpenAI's API that our own server takes, and what they mean to an engine.

null stands for a field that is left out, as clients send it. A field that is known to the API and not to our
engines is refused by name unless it asks for nothing; so is one that nobody knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from brainpatch.errors import CapabilityError, RequestError
from brainpatch.runtime.config import GenerationConfig
from brainpatch.runtime.requests import Prompt
from brainpatch.server.asked import FIELD

DEFAULT_MAX_TOKENS: Final = 256

_HARMLESS: Final = frozenset(
    (
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    )
)
"""Fields that change no answer."""
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
"""Field -> values with which it asks for nothing."""

_Temperature = Annotated[float, Field(ge=0, le=2)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(BaseModel):
    """What a stream says besides its text."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool | None = None


class _Body(BaseModel):
    """What both routes take."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = Field(None, description="A served name, with patches as in M+formal@0.5.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: _Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    seed: int | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    brainpatch: dict[str, Any] | None = Field(None, description="name -> strength, or strength and schedule.")
    # of common servers beyond OpenAI's
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    ignore_eos: bool | None = None

    def for_reading(self) -> dict[str, Any]:
        """The part that `asked` reads."""
        return {"model": self.model, FIELD: self.brainpatch}

    def refuse_what_is_not_done(self, engine: str) -> None:
        """CapabilityError (BP502) or RequestError (BP404) naming the first field that would be ignored."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in _HARMLESS or value in _NEUTRAL.get(name, ()):
                continue
            if name in _NEUTRAL:
                raise CapabilityError(
                    "BP502", f"{name} is not done by the engine {engine}", "Leave it out, or use vLLM."
                )
            raise RequestError("BP404", f"there is no parameter {name!r}")

    def _config(self, max_tokens: int | None, logprobs: int | None) -> GenerationConfig:
        stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        config = GenerationConfig(
            max_new_tokens=max_tokens or DEFAULT_MAX_TOKENS,
            temperature=self.temperature or 0.0,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            seed=self.seed,
            stop=stop,
            n=self.n or 1,
            logprobs=logprobs,
            ignore_eos=bool(self.ignore_eos),
        )
        config.validate()
        if self.stream and logprobs is not None:
            raise CapabilityError("BP502", "log-probabilities in a stream are not done by this engine",
                                  "Ask without stream, or use vLLM.")  # fmt: skip
        return config


class Part(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a chat."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]

    def plain(self) -> dict[str, str]:
        """As chat templates know it."""
        for name, value in (self.model_extra or {}).items():
            if value is not None and value != []:
                raise RequestError("BP405", f"a message's field {name!r} is not understood")
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatBody(_Body):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def config(self) -> GenerationConfig:
        """Errors: RequestError (BP404), CapabilityError (BP502)."""
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            raise RequestError("BP404", "max_tokens and max_completion_tokens say different things")
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("BP404", "top_logprobs needs logprobs: true")
        return self._config(
            self.max_completion_tokens or self.max_tokens, (self.top_logprobs or 0) if self.logprobs else None
        )

    def prompts(self) -> list[Prompt]:
        """The one prompt."""
        return [[message.plain() for message in self.messages]]


class TextBody(_Body):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def config(self) -> GenerationConfig:
        """Errors: RequestError (BP404), CapabilityError (BP502)."""
        return self._config(self.max_tokens, self.logprobs)

    def prompts(self) -> list[Prompt]:
        """One prompt or several."""
        given: Any = self.prompt  # its kinds were checked; which one it is shows in its first item
        if isinstance(given, str):
            return [given]
        if not given:
            raise RequestError("BP405", "the prompt is empty")
        return [given] if isinstance(given[0], int) else list(given)
