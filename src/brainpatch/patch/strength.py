"""Strengths: which numbers they may be, and which of them count as nothing."""

from __future__ import annotations

import math
from typing import Any, Final

from brainpatch.errors import RequestError

EPSILON: Final = 1e-12
"""A multiplier or coefficient below this in absolute value counts as 0."""


def finite_strength(value: Any, where: str) -> float:
    """`value` as a float, or RequestError (BP402) naming `where`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError("BP402", f"{where} is {type(value).__name__}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RequestError("BP402", f"{where} is not a finite number")
    return number
