"""What a request carries into vLLM, and what keeps its blocks of the KV cache apart from others'.

`SamplingParams.extra_args["brainpatch"]` holds `{"set": bytes, "tag": str, "trace": bool}`: the resolved set
in full (`runtime.wire`), a name by which the caller may ask the workers about the request, and whether what
is added shall be measured. Everything is checked where vLLM takes a request in, and again nowhere: bytes
cannot be written in JSON, so no HTTP client can smuggle a set in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from brainpatch.errors import RequestError
from brainpatch.runtime import wire
from brainpatch.runtime.meaning import ResolvedSet

KEY: Final = "brainpatch"
_MAX_TAG: Final = 64
_SALT: Final = "brainpatch:"


@dataclass(frozen=True)
class Carried:
    """The patches of one request, as the workers get them."""

    patches: ResolvedSet
    tag: str
    trace: bool


def carry(patches: ResolvedSet, *, tag: str = "", trace: bool = False) -> dict[str, Any] | None:
    """What belongs under `KEY` in a request's `extra_args`; None for a set without effect."""
    if patches.is_empty:
        return None
    return {"set": wire.encode(patches), "tag": tag, "trace": trace}


def carried(parameters: Any) -> Carried | None:
    """What a request's SamplingParams carry. RequestError (BP410) when it is not what `carry` makes."""
    extra = getattr(parameters, "extra_args", None)
    if extra is None:
        return None
    if not isinstance(extra, Mapping):
        raise RequestError("BP410", f"extra_args is a {type(extra).__name__}, and no mapping")
    if KEY not in extra:
        return None
    given = extra[KEY]
    if not isinstance(given, Mapping) or not set(given) <= {"set", "tag", "trace"}:
        raise RequestError("BP410", f"extra_args[{KEY!r}] is not what sampling_params(patches=...) makes")
    data, tag, trace = given.get("set"), given.get("tag", ""), given.get("trace", False)
    if not isinstance(data, bytes) or not isinstance(trace, bool):
        raise RequestError("BP410", f"extra_args[{KEY!r}] is not what sampling_params(patches=...) makes")
    if not isinstance(tag, str) or len(tag) > _MAX_TAG:
        raise RequestError("BP410", f"the tag of a request is a text of at most {_MAX_TAG} characters")
    return Carried(wire.decode(data), tag, trace)


def check_fits(patches: ResolvedSet, num_layers: int, hidden_size: int) -> None:
    """RequestError (BP410) for a set that does not fit a model of this shape."""
    for layer, terms in patches.terms.items():
        if layer >= num_layers:
            raise RequestError("BP410", f"an edit is for block {layer}; the model has {num_layers}")
        for term in terms:
            if len(term.item.vector) != hidden_size:
                raise RequestError(
                    "BP410",
                    f"an edit at block {layer} has {len(term.item.vector)} numbers; the model's width is {hidden_size}",
                )


def cache_salt(patches: ResolvedSet, prompt_length: int | None, own: str | None) -> str | None:
    """What keeps the KV blocks of different states apart: the digest, and the caller's own salt after it.

    A set that depends on the position is joined by the prompt's length (None: not known yet), since the same
    tokens are then edited otherwise in another request. None for no patch and no salt, so that plain
    requests share with plain ones. The digest stands first and is empty for no patch: no salt of a caller's
    can name another state. One that was made by this function for the same set is taken as it was meant.
    """
    if patches.is_empty:
        return None if own is None else f"{_SALT}:{own.removeprefix(f'{_SALT}:')}"
    start = f"{_SALT}{patches.digest}:"
    if own is not None and own.startswith(start):
        made = re.fullmatch(r"[0-9]*:(.*)", own.removeprefix(start), re.DOTALL)
        own = own if made is None else made[1]
    length = str(prompt_length) if patches.depends_on_position and prompt_length is not None else ""
    return f"{start}{length}:{'' if own is None else own}"
