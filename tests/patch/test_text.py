"""Untrusted text is shown, never sent."""

from __future__ import annotations

import pytest

from brainpatch.patch.text import visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain [bold] <b> 'x' \\ é 你 🧠", "plain [bold] <b> 'x' \\ é 你 🧠"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\nb\rc\td\0", "a\\nb\\rc\\td\\x00"),
        ("\x9b2J\x7f", "\\x9b2J\\x7f"),
        ("\u202egnp\u2066", "\\u202egnp\\u2066"),
        ("a\u200bb\u200dc\ufeff", "a\\u200bb\\u200dc\\ufeff"),
        ("\U000e0041", "\\U000e0041"),
        ("\ufe0f\U000e0101", "\\ufe0f\\U000e0101"),
        ("\u2028\u2029\ue000\u0378", "\\u2028\\u2029\\ue000\\u0378"),
        ("\u3164\u115f\u034f", "\\u3164\\u115f\\u034f"),
        ("\ud800", "\\ud800"),
        ("e\u0301", "e\u0301"),
        ("e" + "\u0301" * 5, "e" + "\u0301" * 3 + "\\u0301" * 2),
    ],
)
def test_what_could_act_or_hide_is_escaped(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_long_text_is_cut_and_counted() -> None:
    assert visible("x" * 200) == "x" * 200
    assert visible("x" * 1200) == "x" * 200 + "… (+1000 characters)"
    assert visible("\x1b" * 9, limit=2) == "\\x1b\\x1b… (+7 characters)"
