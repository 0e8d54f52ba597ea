"""Strict JSON: one text, one meaning."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brainpatch.errors import PatchFormatError
from brainpatch.patch import strict_json


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{}", {}),
        (' [1, -0, 2.5e3, "a\\u00e9\\ud83e\\udde0", null, true]\n', [1, 0, 2500.0, "aé🧠", None, True]),
        ("[18446744073709551615, -18446744073709551615]", [2**64 - 1, 1 - 2**64]),
        ("[" * 32 + "]" * 32, None),
        ('"' + "[" * 100 + '\\"' + "{" * 100 + '"', None),
        ('["\\\\", [[]]]', ["\\", [[]]]),
        ('{"' + "k" * 1024 + '": 1}', None),
        ("[1e-400]", [0.0]),
    ],
)
def test_accepts(text: str, value: Any) -> None:
    parsed = strict_json.parse(text.encode(), "test")
    assert parsed == (json.loads(text) if value is None else value)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "Expecting value"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b'"\xff"', "byte 1 is not UTF-8"),
        (b'"\xed\xa0\x80"', "not UTF-8"),
        (b'{"a": 1, "b": {"x": 0, "x": 0}}', 'the key "x" is repeated'),
        (b'{"a": 1, "\\u0061": 2}', 'the key "a" is repeated'),
        (b"[NaN]", "NaN is not JSON"),
        (b"[-Infinity]", "-Infinity is not JSON"),
        (b"[1e999]", "out of range"),
        (b"[0." + b"1" * 500 + b"]", "out of range"),
        (b"[18446744073709551616]", "out of range"),
        (b"[" + b"9" * 100_000 + b"]", "out of range"),
        (b"[" * 33 + b"]" * 33, "nested deeper than 32"),
        (b'{"a":' * 33 + b"1" + b"}" * 33, "nested deeper than 32"),
        (b'["a\\\\", ' + b"[" * 32 + b"]" * 33, "nested deeper than 32"),
        (b"[" * 1_000_000, "nested deeper than 32"),
        (b'"\\ud800"', "lone surrogate"),
        (b'{"\\udc00": 1}', "lone surrogate"),
        (b'{"a": ["\\uDFFF"]}', "lone surrogate"),
        (b"{} {}", "Extra data"),
        (b"[1,]", "line 1 column 4"),
        (b'["\n"]', "control character"),
        (b"[01]", "line 1 column 3"),
        (b"{'a': 1}", "double quotes"),
        (b'{"' + b"k" * 1025 + b'": 1}', "a key of 1025 characters"),
    ],
)
def test_refuses(data: bytes, why: str) -> None:
    with pytest.raises(PatchFormatError, match="test: ") as caught:
        strict_json.parse(data, "test")
    assert caught.value.code == "BP109"
    assert why in caught.value.reason


def test_refuses_objects_of_too_many_keys() -> None:
    full = {str(n): n for n in range(4097)}
    assert strict_json.parse(json.dumps(full).encode(), "test") == full
    with pytest.raises(PatchFormatError, match="4098 keys"):
        strict_json.parse(json.dumps({**full, "x": 1}).encode(), "test")


@pytest.mark.parametrize(
    "data", [b'"' * 2**20, b"\\" * 2**20, b'"\\' * 2**19, b"[]," * 2**18, b'"' + b'\\"' * 2**19]
)
def test_costs_no_more_than_the_text_weighs(data: bytes) -> None:
    start = time.process_time()
    with pytest.raises(PatchFormatError):
        strict_json.parse(data, "test")
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize("value", [float("nan"), {"a": float("inf")}, object(), {1: 2, "a": 3}])
def test_refuses_to_write_what_json_cannot_hold(value: Any) -> None:
    with pytest.raises(PatchFormatError) as caught:
        strict_json.canonical(value)
    assert caught.value.code == "BP109"


def test_refuses_to_write_endless_nesting() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(PatchFormatError):
        strict_json.canonical(value)


def test_canonical_spelling() -> None:
    value = {"b": [1e-07, -0.0, "é🧠"], "a": {}, "c": []}
    assert strict_json.canonical(value) == (
        '{\n  "a": {},\n  "b": [\n    1e-07,\n    -0.0,\n    "\\u00e9\\ud83e\\udde0"\n  ],\n  "c": []\n}\n'
    )


_json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64) + 1, 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(_json_values)
def test_what_is_written_reads_back(value: Any) -> None:
    assert strict_json.parse(strict_json.canonical(value).encode("ascii"), "test") == value
    assert strict_json.parse(json.dumps(value, ensure_ascii=False).encode(), "test") == value


@given(st.binary(max_size=60) | st.text('[]{}",:\\u0dDeE+-. \n', max_size=60).map(str.encode))
def test_is_a_subset_of_json(data: bytes) -> None:
    try:
        value = strict_json.parse(data, "test")
    except PatchFormatError:
        return
    assert value == json.loads(data)
