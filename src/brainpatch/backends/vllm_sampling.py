"""From a GenerationConfig to vLLM's SamplingParams, and from vLLM's output to a Generation."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from brainpatch.backends.vllm_requests import KEY
from brainpatch.errors import EngineError, RequestError
from brainpatch.runtime.config import GenerationConfig
from brainpatch.runtime.meaning import ResolvedSet
from brainpatch.runtime.requests import Generation, Scored

CACHE_SALT = "cache_salt"
"""The one key of `GenerationConfig.extra` that is no field of SamplingParams: the caller's own salt."""

_OURS = {
    "max_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "stop": "stop",
    "ignore_eos": "ignore_eos",
    "n": "n",
}
_CLOSED = {"output_kind", "stream_interval", "skip_clone", "output_text_buffer_length", "flat_logprobs"}
_COLDEST = 0.01  # vLLM raises a lower temperature to this
_SEED_BITS = (1 << 63) - 1  # vLLM reads -1 as "no seed", and its messages carry 64 bits


def sampling_params(config: GenerationConfig, *, max_logprobs: int) -> Any:
    """SamplingParams that say everything themselves: no default of the model's folder leaks in.

    `max_logprobs` is the engine's limit (-1: none).
    Errors: RequestError (BP404) naming the parameter.
    """
    from vllm import SamplingParams

    extra = dict(config.extra)
    salt = extra.pop(CACHE_SALT, None)
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RequestError("BP404", f"extra['{CACHE_SALT}'] is not a text, or empty")
    known = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")} - _CLOSED
    for name in extra:
        if name in _OURS:
            raise RequestError("BP404", f"extra[{name!r}] says what {_OURS[name]} says", "Set that field.")
        if name not in known:
            raise RequestError("BP404", f"extra[{name!r}] is not a sampling parameter of this vLLM")
    if 0 < config.temperature < _COLDEST:
        raise RequestError("BP404", f"temperature is {config.temperature:g}; vLLM draws from {_COLDEST} up",
                           "Use 0 for greedy.")  # fmt: skip
    seed = config.seed
    if config.do_sample:
        seed = secrets.randbits(63) if seed is None else seed & _SEED_BITS
    fields: dict[str, Any] = {
        "n": 1,
        "max_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "min_p": config.min_p,
        "repetition_penalty": config.repetition_penalty,
        "presence_penalty": config.presence_penalty,
        "frequency_penalty": config.frequency_penalty,
        "seed": seed if config.do_sample else None,
        "stop": list(config.stop),
        "ignore_eos": config.ignore_eos,
        "logprobs": config.logprobs,
        **extra,
    }
    for name in ("logprobs", "prompt_logprobs"):
        asked = fields.get(name)
        if isinstance(asked, int) and max_logprobs != -1 and not -1 < asked <= max_logprobs:
            raise RequestError(
                "BP404", f"{name} is {asked}, and this engine gives at most {max_logprobs}",
                "Load with max_logprobs=N; -1 allows all.",
            )  # fmt: skip
    try:
        parameters = SamplingParams(**fields)
        if KEY in (parameters.extra_args or {}):
            raise RequestError("BP404", f"extra['extra_args'][{KEY!r}] is what patches= makes")
        if extra:
            # What vLLM does not check here, its engine finds out when it decodes the request, and dies of it.
            from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

            MsgpackDecoder(SamplingParams).decode(MsgpackEncoder().encode(parameters))
        return parameters
    except RequestError:
        raise
    except Exception as error:  # construction only validates, with classes that differ between versions
        raise RequestError("BP404", f"vLLM refuses a parameter: {error}") from None


def own_salt(config: GenerationConfig) -> str | None:
    """The caller's own salt, which keeps the blocks of requests apart that say different ones."""
    salt: str | None = config.extra.get(CACHE_SALT)
    return salt


def generation(output: Any, config: GenerationConfig, patches: ResolvedSet) -> Generation:
    """A Generation from vLLM's RequestOutput. EngineError (BP508) when it was cut off."""
    answer = output.outputs[0]
    # "repetition": the caller's own `repetition_detection` stopped it.
    reason = "stop" if answer.finish_reason == "repetition" else answer.finish_reason
    if reason not in ("stop", "length"):
        raise EngineError("BP508", f"vLLM ended a request with {answer.finish_reason!r}")
    given = answer.logprobs
    return Generation(
        text=answer.text,
        token_ids=[int(token) for token in answer.token_ids],
        logprobs=None if given is None else [_plain(entry) for entry in given],
        finish_reason=reason,
        prompt_tokens=len(output.prompt_token_ids),
        patches=patches.to_mapping(),
        cached_tokens=output.num_cached_tokens or 0,
        digest=patches.digest,
    )


def scored(output: Any) -> Scored:
    """From vLLM's RequestOutput with the log-probabilities of the whole vocabulary as flat lists."""
    import numpy as np

    answer = output.outputs[0]
    flat = answer.logprobs
    rows = []
    for first, last in zip(flat.start_indices, flat.end_indices, strict=True):
        tokens = np.array(flat.token_ids[first:last])
        row = np.full(int(tokens.max()) + 1, -np.inf, dtype=np.float32)
        row[tokens] = flat.logprobs[first:last]
        rows.append(row)
    return Scored([int(token) for token in answer.token_ids], np.stack(rows))


def _plain(entry: Mapping[int, Any]) -> dict[int, float]:
    return {int(token): float(found.logprob) for token, found in entry.items()}
