"""What a body asks for, by field and by model name."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brainpatch.errors import BrainPatchError
from brainpatch.server.asked import Asked, asked, named_patches

SERVED = ["m", "m+n", "org/model"]


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, Asked(None, None)),
        ({"model": None, "brainpatch": None}, Asked(None, None)),
        ({"brainpatch": {"a": 1}}, Asked(None, {"a": 1})),
        ({"model": "m"}, Asked("m", None)),
        ({"model": "m", "brainpatch": {}}, Asked("m", {})),
        ({"model": "m+"}, Asked("m", {}, True)),
        ({"model": "m+a"}, Asked("m", {"a": {}}, True)),
        ({"model": "m+a@0.5+b@-1"}, Asked("m", {"a": 0.5, "b": -1.0}, True)),
        ({"model": "m+n"}, Asked("m+n", None)),  # the longest served name
        ({"model": "m+n+a"}, Asked("m+n", {"a": {}}, True)),
        ({"model": "m+nn"}, Asked("m", {"nn": {}}, True)),
        ({"model": "org/model+a", "brainpatch": None}, Asked("org/model", {"a": {}}, True)),
    ],
)
def test_bodies(body, wanted):
    assert asked(body, SERVED) == wanted


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"model": "x"}, "BP702"),
        ({"model": "mm"}, "BP702"),
        ({"model": ""}, "BP702"),
        ({"model": 1}, "BP404"),
        ({"model": "m", "brainpatch": 1}, "BP403"),
        ({"model": "m", "brainpatch": ["a"]}, "BP403"),
        ({"model": "m+a", "brainpatch": {"a": 1}}, "BP403"),
        ({"model": "m+", "brainpatch": {}}, "BP403"),
        ({"model": "m++a"}, "BP403"),
        ({"model": "m+a+a"}, "BP403"),
        ({"model": "m+@1"}, "BP403"),
        ({"model": "m+a@"}, "BP402"),
        ({"model": "m+a@x"}, "BP402"),
        ({"model": "m", "brainpach": {"a": 1}}, "BP403"),
        ({"model": "m", "BrainPatch": {"a": 1}}, "BP403"),
        ({"model": "m", "brain_patch": {"a": 1}}, "BP403"),
        ({"model": "m", "extra_body": {"brainpatch": {"a": 1}}}, "BP403"),
    ],
)
def test_what_is_refused(body, code):
    with pytest.raises(BrainPatchError) as error:
        asked(body, SERVED)
    assert error.value.code == code


def test_long_names_and_many_fields_cost_nothing():
    started = time.monotonic()
    for body in ({"model": "m" * 10**7}, {"model": "m", "brainpatch": {"n" * 10**7: 1}}):
        with pytest.raises(BrainPatchError) as error:
            asked(body, SERVED)
        assert len(str(error.value)) < 1000
    asked({"model": "m", **{f"name{i:06}": 1 for i in range(10**5)}}, SERVED)
    assert time.monotonic() - started < 5


def test_an_unknown_model_names_what_is_near():
    with pytest.raises(BrainPatchError, match="served: org/model"):
        asked({"model": "org/modle+a"}, SERVED)


@given(st.text(max_size=40))
def test_any_text_is_patches_or_an_error_of_ours(rest):
    try:
        found = named_patches("+" + rest)
    except BrainPatchError as error:
        assert error.code in ("BP402", "BP403")
    else:
        assert found == {} if not rest else all("+" not in name for name in found)
