"""The edits that the published package resolves from its own files, number by number."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from brainpatch import load_patch
from brainpatch.patch.schedule import StrengthSchedule
from brainpatch.runtime.meaning import ActivePatch, resolve, resolve_edits

FIXTURES = Path(__file__).parent.parent / "fixtures"
VALID = json.loads((FIXTURES / "valid.json").read_text())
MORE = json.loads((FIXTURES / "more-valid.json").read_text())

pytestmark = pytest.mark.filterwarnings("ignore::brainpatch.patch.manifest.PatchWarning")


def quiet(_: str) -> None:
    """Strength 100 is clamped on purpose."""


def rows(edits):
    return [[edit.layer, edit.vector_key, edit.coefficient] for edit in edits]


def planned(active, strength, index, *, prompt):
    """The same rows from the plan that engines follow, at a prompt of 3 tokens; keys are not in it."""
    position = 0 if prompt else 3 + index
    resolved = resolve({active.name: strength}, {active.name: active}, warn=quiet)
    return [
        [layer, coefficient]
        for layer in resolved.layers
        for coefficient in resolved.coefficients(layer, np.array([position]), 3)[0].tolist()
        if coefficient
    ]


@pytest.mark.parametrize("name", sorted(VALID["files"]))
def test_edits_of_the_published_files(name):
    patch = load_patch(FIXTURES / "valid" / name)
    table = VALID["files"][name]["edits"]
    cases = {**table["by_strength"], "default": table["at_default"]}
    checked = 0
    for strength, expected in cases.items():
        value = patch.manifest.default_strength if strength == "default" else float(strength)
        active = ActivePatch(patch, value)
        if "clamped" in expected:
            assert patch.manifest.clamp_strength(value) == expected["clamped"]
        assert rows(resolve_edits([active], 0, is_prompt_pass=True)) == expected["prompt"]
        plan = planned(active, value, 0, prompt=True)
        assert plan == sorted(([r[0], r[2]] for r in expected["prompt"]), key=lambda r: r[0])
        for index in (key for key in expected if key.isdigit()):
            row = expected[index]
            later = rows(resolve_edits([active], int(index), is_prompt_pass=False))
            assert later == row["continuation"]
            unknown = row["continuation"] if row["unknown"] == "same" else row["unknown"]
            assert rows(resolve_edits([active], int(index))) == unknown
            plan = planned(active, value, int(index), prompt=False)
            assert plan == sorted(([r[0], r[2]] for r in row["continuation"]), key=lambda r: r[0])
            checked += 1
    assert checked >= 6 * len(VALID["strengths"])
    off = ActivePatch(patch, enabled=False)
    assert rows(resolve_edits([off])) == table["disabled"]


@pytest.mark.parametrize("entry", MORE, ids=lambda entry: entry["file"])
def test_edits_of_more_files(entry):
    patch = load_patch(FIXTURES / "more-valid" / entry["file"])
    assert entry["edits"]
    for case in entry["edits"]:
        active = ActivePatch(patch, case["strength"])
        prompt = case["prompt_position"]
        found = rows(resolve_edits([active], case["token_index"], is_prompt_pass=prompt))
        assert found == case["edits"]
        plan = planned(active, case["strength"], case["token_index"], prompt=prompt)
        assert plan == sorted(([r[0], r[2]] for r in case["edits"]), key=lambda r: r[0])


@pytest.mark.parametrize("case", VALID["multi_patch"], ids=lambda case: "+".join(case["order"]))
def test_several_patches_at_once(case):
    patches = [load_patch(FIXTURES / "valid" / name) for name in case["files"]]
    active = [
        ActivePatch(patch, strength) for patch, strength in zip(patches, case["strengths"], strict=True)
    ]
    assert [patch.name for patch in active] == case["order"]

    def named(edits):
        return [[edit.patch_name, edit.layer, edit.vector_key, edit.coefficient] for edit in edits]

    assert named(resolve_edits(active, 0, is_prompt_pass=True)) == case["prompt"]
    for index, expected in case["tokens"].items():
        assert named(resolve_edits(active, int(index), is_prompt_pass=False)) == expected
    assert sorted({edit.layer for edit in resolve_edits(active, 0)}) == case["active_layers_at_0"]


@pytest.mark.parametrize("case", VALID["schedule_cases"], ids=lambda case: json.dumps(case["keyframes"])[:40])
def test_schedules(case):
    schedule = StrengthSchedule(case["keyframes"], case["interpolate"], case["default"])
    assert schedule.steps == case["steps"]
    assert schedule.is_constant() == case["constant"]
    assert schedule.to_dict() == case["serialized"]
    assert StrengthSchedule.from_dict(case["serialized"]) == schedule
    for index, value in case["values"].items():
        assert schedule.strength_at(int(index)) == pytest.approx(value, rel=1e-15)
