"""Patch names: they become file names, model names and log lines, so they are plain everywhere."""

from __future__ import annotations

import re
from typing import Any, Final

from brainpatch.errors import PatchFormatError
from brainpatch.patch.text import visible

NAME_PATTERN: Final = "^[a-z0-9][a-z0-9._-]{0,63}$"
# Windows opens the device for these, with any extension.
_DEVICES: Final = frozenset(
    ("con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10)))
)


def check_patch_name(name: Any) -> str:
    """`name`, when it is a legal patch name; PatchFormatError BP113 otherwise."""
    # fullmatch: `$` alone would let a line break pass at the end.
    if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN.strip("^$"), name):
        raise PatchFormatError("BP113", f"{visible(repr(name), 80)} is not a patch name")
    if name.partition(".")[0] in _DEVICES:
        raise PatchFormatError("BP113", f"{name!r} is the name of a device on Windows")
    return name


def split_strength(text: str) -> tuple[str, float | None]:
    """`formal@0.8` as ("formal", 0.8); a path may hold an @ of its own."""
    name, at, number = text.rpartition("@")
    try:
        strength = float(number)
    except ValueError:
        return text, None
    return (name, strength) if at and name else (text, None)
