"""What a request's body asks for: which served model, and which patches, by field or by model name.

`M` means the installed defaults, `M+` none, `M+formal@0.5+terse` exactly these, at 0.5 and at the strength that
stands. The field `brainpatch` is a request's mapping of patches (`runtime.meaning.resolve`). Pure functions.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

from brainpatch.errors import RequestError, ServerError
from brainpatch.patch.text import visible

FIELD: Final = "brainpatch"
SEPARATOR: Final = "+"
_LONGEST: Final = 1024
"""Characters of a name; looking for near ones in longer texts takes time."""


@dataclass(frozen=True)
class Asked:
    """`model`: the served name, None where the body names none. `patches`: a request's mapping, None for the
    installed defaults. `by_name`: whether the model name said so."""

    model: str | None
    patches: Mapping[str, Any] | None
    by_name: bool = False


def asked(body: Mapping[str, Any], served: Collection[str]) -> Asked:
    """Read a body. Errors: ServerError (BP702) for an unknown model, RequestError (BP402, BP403) for the rest."""
    _refuse_misspelt(body)
    model = body.get("model")
    field = body.get(FIELD)
    if field is not None and not isinstance(field, Mapping):
        raise RequestError("BP403", f"{FIELD} is {_kind(field)}, not a mapping of names to strengths")
    if isinstance(model, str) and len(model) > _LONGEST:
        raise ServerError("BP702", f"a name of {len(model)} characters is not served here")
    if isinstance(field, Mapping) and any(len(name) > _LONGEST for name in field if isinstance(name, str)):
        raise RequestError("BP403", f"a patch's name is longer than {_LONGEST} characters")
    if model is None:
        return Asked(None, field)
    if not isinstance(model, str):
        raise RequestError("BP404", f"model is {_kind(model)}, not a text")
    base = _served(model, served)
    if base is None:
        raise _unknown_model(model, served)
    named = named_patches(model[len(base) :])
    if named is None:
        return Asked(base, field)
    if field is not None:
        raise RequestError(
            "BP403", f"both the model name and the field {FIELD} name patches", "Use one of the two."
        )
    return Asked(base, named, by_name=True)


def named_patches(rest: str) -> dict[str, Any] | None:
    """The patches of what follows a served name: "+a@0.5+b" -> {"a": 0.5, "b": {}}; "+" -> {}; "" -> None."""
    if not rest:
        return None
    found: dict[str, Any] = {}
    parts = rest[1:].split(SEPARATOR) if rest != SEPARATOR else []
    for part in parts:
        name, at, number = part.partition("@")
        if not name:
            raise RequestError("BP403", f"a patch has no name in {visible(repr(rest), 80)}")
        if name in found:
            raise RequestError("BP403", f"{visible(name, 80)} is named twice")
        try:
            found[name] = float(number) if at else {}
        except ValueError:
            raise RequestError("BP402", f"{visible(repr(number), 40)} is not a strength") from None
    return found


def _refuse_misspelt(body: Mapping[str, Any]) -> None:
    """A server that ignores what it does not know would answer without patches, and nobody would notice."""
    like = [name for name in itertools.islice(body, 256) if 7 < len(name) < 14 and name != FIELD]
    near = [name for name in like if get_close_matches(name.lower(), [FIELD], cutoff=0.8)]
    inner = body.get("extra_body")
    if isinstance(inner, Mapping) and FIELD in inner:
        near.append("extra_body")
    if near:
        raise RequestError(
            "BP403",
            f"there is no field {visible(repr(near[0]), 80)}",
            f"The field is called {FIELD}, at the top.",
        )


def _served(model: str, served: Collection[str]) -> str | None:
    """The longest served name that `model` is, or begins with before a "+"."""
    fitting = [name for name in served if model == name or model.startswith(name + SEPARATOR)]
    return max(fitting, key=len, default=None)


def _unknown_model(model: str, served: Collection[str]) -> ServerError:
    near = get_close_matches(model.partition(SEPARATOR)[0], list(served), n=3) or sorted(served)
    return ServerError("BP702", f"{visible(repr(model), 120)} is not served here; served: {', '.join(near)}")


def _kind(value: Any) -> str:
    return {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a text",
            list: "a list", dict: "an object"}.get(type(value), type(value).__name__)  # fmt: skip
