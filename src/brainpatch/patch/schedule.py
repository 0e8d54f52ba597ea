"""Schedules: a patch's strength as a function of the generated token's index."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from brainpatch.errors import PatchFormatError
from brainpatch.patch.limits import MAX_ABS_SCHEDULE_VALUE, MAX_KEYFRAME_INDEX, MAX_KEYFRAMES
from brainpatch.patch.text import visible


@dataclass(frozen=True)
class StrengthSchedule:
    """A multiplier by generated-token index (0-based; the prompt has index 0).

    A step function that holds its last keyframe, or, with `interpolate`, straight lines between keyframes.
    Before the first keyframe `default` holds. Keys may be given as integers or as ASCII digits; they are
    kept as integers in ascending order, values as floats.

    Raises PatchFormatError BP114 for no keyframe, more than 4096, an index that is negative, beyond
    2**31 - 1 or there twice, and a value that is not a number of at most 1024 in absolute value.
    """

    keyframes: Mapping[int, float]
    interpolate: bool = False
    default: float = 1.0
    # The numbers as they were given: a manifest's `1` is written as `1` again, not as `1.0`.
    _given: dict[int, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.keyframes, Mapping):
            raise PatchFormatError("BP114", f"keyframes are a mapping, not {type(self.keyframes).__name__}")
        if not 0 < len(self.keyframes) <= MAX_KEYFRAMES:
            raise PatchFormatError(
                "BP114", f"{len(self.keyframes)} keyframes; 1 to {MAX_KEYFRAMES} are allowed"
            )
        if not isinstance(self.interpolate, bool):
            raise PatchFormatError("BP114", "interpolate is true or false")
        given: dict[int, float] = {}
        for key, value in self.keyframes.items():
            index = _index(key)
            if index in given:
                raise PatchFormatError("BP114", f"the index {index} is there twice")
            _check_value(value, f"the value at index {index}")
            given[index] = value
        _check_value(self.default, "default")
        object.__setattr__(self, "_given", given)
        object.__setattr__(self, "keyframes", {index: float(given[index]) for index in sorted(given)})
        object.__setattr__(self, "default", float(self.default))

    def __hash__(self) -> int:
        return hash((tuple(self.keyframes.items()), self.interpolate, self.default))

    @property
    def steps(self) -> list[int]:
        """The keyframes' indices, ascending."""
        return list(self.keyframes)

    def strength_at(self, n: int) -> float:
        """The multiplier at generated-token index `n` >= 0; ValueError when negative."""
        if n < 0:
            raise ValueError(f"a generated-token index is 0 or more, not {n}")
        steps = self.steps
        after = bisect_right(steps, n)
        if after == 0:
            return self.default
        start = steps[after - 1]
        low = self.keyframes[start]
        if not self.interpolate or after == len(steps):
            return low
        end = steps[after]
        return low + (self.keyframes[end] - low) * ((n - start) / (end - start))

    def is_constant(self) -> bool:
        """True when `strength_at` is the same for every index."""
        values = set(self.keyframes.values())
        return len(values) == 1 and (0 in self.keyframes or self.default in values)

    def to_dict(self) -> dict[str, Any]:
        """The long form: `keyframes` (with text keys), `interpolate`, `default`."""
        return {
            "keyframes": {str(index): value for index, value in self.keyframes.items()},
            "interpolate": self.interpolate,
            "default": self.default,
        }

    def to_flat(self) -> dict[str, float]:
        """The form that a manifest holds. BP114 when it cannot say this schedule: it is always a step
        function with default 1.0."""
        if self.interpolate or self.default != 1.0:
            raise PatchFormatError(
                "BP114",
                "a manifest holds step schedules with default 1.0 only",
                "Set an interpolating schedule at run time, or write its steps out as keyframes.",
            )
        return {str(index): value for index, value in self._given.items()}

    @classmethod
    def from_dict(cls, data: Mapping[Any, Any]) -> StrengthSchedule:
        """A schedule from the long form, or from the flat one (`{"0": 1.0, "20": 0.0}`)."""
        if not isinstance(data, Mapping):
            raise PatchFormatError("BP114", f"a schedule is a mapping, not {type(data).__name__}")
        if "keyframes" not in data:
            return cls(data)
        unknown = sorted(str(key) for key in data if key not in ("keyframes", "interpolate", "default"))
        if unknown:
            raise PatchFormatError("BP114", f"unknown key: {visible(', '.join(unknown))}")
        return cls(data["keyframes"], data.get("interpolate", False), data.get("default", 1.0))

    @classmethod
    def constant(cls, strength: float = 1.0) -> StrengthSchedule:
        """A schedule of one value from index 0 on."""
        return cls({0: strength})


def _index(key: Any) -> int:
    index = -1
    if isinstance(key, int) and not isinstance(key, bool):
        index = key
    # int() would take blanks, signs, underscores and the digits of other scripts as well. Ten digits are
    # enough for 2**31 - 1; leading zeros are allowed.
    elif isinstance(key, str) and key.isascii() and key.isdigit() and len(key.lstrip("0")) <= 10:
        index = int(key.lstrip("0") or "0")
    if not 0 <= index <= MAX_KEYFRAME_INDEX:
        raise PatchFormatError(
            "BP114", f"{visible(repr(key), 40)} is not an index from 0 to {MAX_KEYFRAME_INDEX}"
        )
    return index


def _check_value(value: Any, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise PatchFormatError("BP114", f"{what} is not a number")
    # Written so that NaN fails as well.
    if not -MAX_ABS_SCHEDULE_VALUE <= value <= MAX_ABS_SCHEDULE_VALUE:
        raise PatchFormatError("BP114", f"{what} is not within {MAX_ABS_SCHEDULE_VALUE:g}")
