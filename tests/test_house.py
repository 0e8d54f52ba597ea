"""The house rules that a machine can check."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from brainpatch.errors import ERRORS, RETIRED, BrainPatchError

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "brainpatch").rglob("*.py"))

sys.path.insert(0, str(ROOT / "tools"))
import generate_docs  # noqa: E402


@pytest.mark.parametrize("name", generate_docs.PAGES)
def test_a_generated_page_is_current(name):
    assert (ROOT / name).read_text(encoding="utf-8") == generate_docs.PAGES[name](), "run `make generated`"


def test_every_code_in_the_source_is_in_the_table_and_every_row_is_used():
    used = set()
    for path in SOURCES:
        if path.name != "errors.py":
            used |= set(re.findall(r"\bBP\d{3}\b", path.read_text()))
    assert used - set(ERRORS) == set()
    assert set(ERRORS) - used == RETIRED


def test_an_error_says_code_reason_and_remedy():
    error = BrainPatchError("BP101", "no such file")
    assert str(error).startswith("BP101 file not found or not readable: no such file\n  what to do: Check")
    assert BrainPatchError("BP101", "x", "Do that.").remedy == "Do that."


def test_the_map_in_design_is_the_tree():
    text = (ROOT / "docs" / "design.md").read_text()
    block = text.split("```")[1]
    inside = block.split("tests/")[0]
    listed = {m.rstrip("/") for m in re.findall(r"^  ([a-z_.]+/?) ", inside, re.M)}
    package = ROOT / "src" / "brainpatch"
    rooms = {path.name for path in package.iterdir() if (path / "__init__.py").exists()} | {"errors.py"}
    assert listed == rooms


def test_nothing_in_the_source_can_act():
    words = re.compile(
        r"\b(import|from) (pickle|cloudpickle|dill|marshal|shelve|joblib)\b"
        r"|\bpickle\.[a-z]|torch\.load\(|ALLOW_INSECURE|trust_remote_code=True|shell=True"
        r"|(?<![.\w])(eval|exec)\("
    )
    found = [
        f"{path.name}:{number}: {line.strip()}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if words.search(line) and not line.lstrip().startswith(("#", '"'))
    ]
    assert found == []
