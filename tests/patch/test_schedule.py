"""Schedules. The published package's own cases are in test_valid_files."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest

from brainpatch.errors import PatchFormatError
from brainpatch.patch import StrengthSchedule


def test_keys_and_values_are_normalised() -> None:
    schedule = StrengthSchedule({"020": 1, 3: 0.5, "0": 2})
    assert schedule.keyframes == {0: 2.0, 3: 0.5, 20: 1.0}
    assert list(schedule.keyframes) == schedule.steps == [0, 3, 20]
    assert all(type(value) is float for value in schedule.keyframes.values())
    assert type(StrengthSchedule({0: 1}, default=2).default) is float


def test_is_a_frozen_value() -> None:
    schedule = StrengthSchedule({0: 1.0, 5: 0.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.default = 2.0  # type: ignore[misc]
    same = StrengthSchedule({"5": 0, "0": 1})
    assert schedule == same
    assert hash(schedule) == hash(same)
    assert schedule != StrengthSchedule({0: 1.0, 5: 0.0}, interpolate=True)
    assert copy.deepcopy(schedule) == schedule


def test_flat_form_keeps_the_spelling_of_numbers() -> None:
    flat = StrengthSchedule.from_dict({"10": 2, "9": 0.5}).to_flat()
    assert repr(flat) == "{'10': 2, '9': 0.5}"


@pytest.mark.parametrize("other", [{"interpolate": True}, {"default": 0.0}])
def test_a_manifest_cannot_say_every_schedule(other: dict[str, Any]) -> None:
    with pytest.raises(PatchFormatError, match="BP114"):
        StrengthSchedule({0: 1.0}, **other).to_flat()


def test_constant() -> None:
    assert StrengthSchedule.constant() == StrengthSchedule({0: 1.0})
    assert StrengthSchedule.constant(0.5).is_constant()
    assert not StrengthSchedule({3: 0.5}).is_constant()
    assert StrengthSchedule({3: 0.5}, default=0.5).is_constant()
    assert not StrengthSchedule({0: 1.0, 3: 0.5}).is_constant()


def test_a_negative_index_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 or more"):
        StrengthSchedule({0: 1.0}).strength_at(-1)


def test_limits_are_inclusive() -> None:
    schedule = StrengthSchedule({2**31 - 1: 1024, 0: -1024.0})
    assert schedule.strength_at(2**40) == 1024.0
    assert len(StrengthSchedule(dict.fromkeys(range(4096), 1.0)).steps) == 4096


@pytest.mark.parametrize(
    "keyframes",
    [
        {},
        None,
        [1],
        {-1: 1.0},
        {True: 1.0},
        {1.0: 1.0},
        {2**31: 1.0},
        {"2147483648": 1.0},
        {"9" * 5000: 1.0},
        {"": 1.0},
        {"a": 1.0},
        {" 5": 1.0},
        {"+5": 1.0},
        {"-0": 1.0},
        {"1_0": 1.0},
        {"1e3": 1.0},
        {"\u0665": 1.0},
        {"²": 1.0},
        {"1": 1.0, "01": 1.0},
        {"1": 1.0, 1: 1.0},
        {0: True},
        {0: "1"},
        {0: None},
        {0: math.nan},
        {0: math.inf},
        {0: 1024.0001},
        {0: 10**400},
        dict.fromkeys(range(4097), 1.0),
    ],
)
def test_refuses(keyframes: Any) -> None:
    with pytest.raises(PatchFormatError) as caught:
        StrengthSchedule(keyframes)
    assert caught.value.code == "BP114"
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "data",
    [
        {"keyframes": {"0": 1.0}, "mode": "x"},
        {"keyframes": {"0": 1.0}, "interpolate": 1},
        {"keyframes": {"0": 1.0}, "default": math.nan},
        {"keyframes": {"0": 1.0}, "default": "1"},
        {"keyframes": 1.0},
        3,
    ],
)
def test_refuses_a_wrong_long_form(data: Any) -> None:
    with pytest.raises(PatchFormatError) as caught:
        StrengthSchedule.from_dict(data)
    assert caught.value.code == "BP114"


def test_long_and_flat_form() -> None:
    assert StrengthSchedule.from_dict({"keyframes": {"0": 1}}) == StrengthSchedule({0: 1.0})
    assert StrengthSchedule.from_dict({0: 1, "4": 2}) == StrengthSchedule({0: 1.0, 4: 2.0})
