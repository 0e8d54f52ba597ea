"""Generation parameters and capabilities."""

from __future__ import annotations

import math

import pytest

from brainpatch.errors import CapabilityError, RequestError
from brainpatch.runtime.capabilities import ALL_FLAGS, CAPABILITY_FLAGS, Capabilities
from brainpatch.runtime.config import GenerationConfig


def test_defaults_are_the_published_ones():
    config = GenerationConfig()
    published = {
        "max_new_tokens": 128,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "repetition_penalty": 1.0,
        "seed": 0,
        "stop": [],
    }
    assert {key: config.to_dict()[key] for key in published} == published
    assert GenerationConfig(7, 0.5, 0.9, 3, 1.1, 4, ["x"]).stop == ["x"]
    config.validate()


def test_greedy_means_temperature_zero():
    assert not GenerationConfig().do_sample
    assert GenerationConfig(temperature=0.1).do_sample


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 1.0),
        ("max_new_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-40),
        ("temperature", 1e-40),
        ("seed", 1.5),
        ("n", 0),
        ("logprobs", -1),
        ("logprobs", 21),
        ("min_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("ignore_eos", 1),
        ("stop", "one string"),
        ("stop", [""]),
        ("stop", [1]),
        ("extra", [1]),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(field, value):
    with pytest.raises(RequestError, match="stop string" if value == [""] else field) as caught:
        GenerationConfig(**{field: value}).validate()
    assert caught.value.code == "BP404"


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 2), ("top_p", 1), ("seed", None), ("logprobs", 0), ("stop", ("a", "b")), ("n", 1024)],
)
def test_a_right_parameter_is_taken(field, value):
    GenerationConfig(**{field: value}).validate()


def test_capabilities_answer_by_flag():
    able = Capabilities("x", streaming=True, quantization=("int8",), notes={"server": "later"})
    assert able.supports("streaming")
    assert able.supports("quantization")
    assert not able.supports("server")
    able.require("streaming")
    with pytest.raises(CapabilityError, match="x does not offer server: later"):
        able.require("server")
    with pytest.raises(CapabilityError, match="x does not offer cuda"):
        able.require("cuda")
    with pytest.raises(ValueError, match="unknown capability 'flying'"):
        able.supports("flying")
    assert able.matrix_row()["streaming"] is True
    assert list(able.matrix_row()) == list(ALL_FLAGS)
    assert able.to_dict()["quantization"] == ("int8",)


def test_the_published_flags_keep_their_order():
    assert len(CAPABILITY_FLAGS) == 12
    assert CAPABILITY_FLAGS[-2:] == ("quantization", "per_request_strength")
    assert ALL_FLAGS[:12] == CAPABILITY_FLAGS
