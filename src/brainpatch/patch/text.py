"""Untrusted text made safe to show on a terminal or in a log."""

from __future__ import annotations

import unicodedata
from typing import Final

_INVISIBLE_CATEGORIES: Final = frozenset({"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"})
# Letters and marks that are drawn as nothing, so that text could hide in them.
_INVISIBLE: Final = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0")
_SHORT: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_MAX_STACKED_MARKS: Final = 3


def visible(text: str, limit: int = 200) -> str:
    """One line of printable text: whatever could act on a terminal, reorder or hide is shown escaped.

    Escaped are C0 and C1 controls (ESC as `\\x1b`), bidirectional and zero-width characters (`\\u202e`),
    tags, variation selectors, private and unassigned characters, lone surrogates, line breaks, and the
    fourth and further combining marks in a row. Everything else, brackets and angle brackets too, stays
    as it is: markup is for the renderer to escape.

    `limit` is the number of characters of `text` that are shown; what is cut is counted at the end.
    """
    shown = []
    marks = 0
    for char in text[:limit]:
        marks = marks + 1 if unicodedata.combining(char) else 0
        shown.append(_escaped(char) if marks > _MAX_STACKED_MARKS or _is_unsafe(char) else char)
    if len(text) > limit:
        shown.append(f"… (+{len(text) - limit} characters)")
    return "".join(shown)


def _is_unsafe(char: str) -> bool:
    return (
        unicodedata.category(char) in _INVISIBLE_CATEGORIES
        or char in _INVISIBLE
        or "\ufe00" <= char <= "\ufe0f"
        or "\U000e0100" <= char <= "\U000e01ef"
    )


def _escaped(char: str) -> str:
    code = ord(char)
    if char in _SHORT:
        return _SHORT[char]
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
