"""What the rows of a dataset say, and what is refused before Ray starts anything. The pipeline itself runs in
tests/engines/vllm/test_ray.py."""

from __future__ import annotations

import numpy as np
import pytest

from brainpatch.backends.ray_data import _prompt, _wish, generate
from brainpatch.errors import BrainPatchError, RequestError
from brainpatch.runtime import GenerationConfig


@pytest.mark.parametrize(
    ("value", "wish"),
    [
        ('{"a": 0.5}', {"a": 0.5}),
        ('{"a": {"strength": 1, "schedule": {"0": 1}}}', {"a": {"strength": 1, "schedule": {"0": 1}}}),
        ("", {}),
        ("  ", {}),
        ("null", {}),
        (None, {}),
        (float("nan"), {}),
        ({"a": 1.0, "b": None}, {"a": 1.0}),
        ({"a": {"strength": 1.0, "schedule": None}}, {"a": {"strength": 1.0}}),
        ({"a": {"strength": 1.0, "schedule": {"0": 1.0, "3": None}}}, {"a": {"strength": 1.0, "schedule": {"0": 1.0}}}),
    ],
)  # fmt: skip
def test_a_rows_patches_are_those_that_it_names(value, wish):
    assert _wish(value) == wish


@pytest.mark.parametrize("value", ["{", "formal", "[1]", 7, 0.8, ["a"], '"formal"', "0.8", "NaN"])
def test_patches_that_are_no_mapping_are_refused(value):
    with pytest.raises(RequestError, match="BP402"):
        _wish(value)


def test_token_ids_are_a_list_again():
    assert _prompt(np.array([1, 2, 3])) == [1, 2, 3]
    assert _prompt("text") == "text"


class NeverAsked:
    def map_batches(self, *_, **__):
        raise AssertionError("the pipeline was built")


def test_a_bad_file_or_config_is_refused_before_anything_starts(tmp_path):
    bad = tmp_path / "bad.brainpatch"
    bad.write_bytes(b"no patch")
    with pytest.raises(BrainPatchError, match="BP"):
        generate(NeverAsked(), "model", [bad])
    with pytest.raises(BrainPatchError, match="BP"):
        generate(NeverAsked(), "model", [tmp_path / "missing.brainpatch"])
    with pytest.raises(RequestError, match="BP404"):
        generate(NeverAsked(), "model", [], config=GenerationConfig(n=2))
    with pytest.raises(RequestError, match="BP404"):
        generate(NeverAsked(), "model", [], config=GenerationConfig(temperature=-1))
