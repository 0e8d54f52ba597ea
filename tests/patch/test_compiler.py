"""A patch from lists of numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from brainpatch.errors import CompileError, PatchExistsError, PatchFormatError
from brainpatch.patch import BaseModelSpec, Intervention, load_patch
from brainpatch.patch.compiler import compile_from_vectors

MODEL = BaseModelSpec("m", "", 3, 2)
ITEMS = [Intervention(1, "v", 2.0)]


def test_compiles_with_every_option(tmp_path: Path) -> None:
    path = compile_from_vectors(
        "x",
        {"v": [1, 2.5, -0.25]},
        ITEMS,
        MODEL,
        tmp_path / "x",
        dtype="BF16",
        description="d",
        evidence_level="predictive",
        provenance={"discovery_method": "caa"},
        evaluation={"n": 1},
        compatibility={"vllm": {"status": "verified"}},
        readme="r",
    )
    patch = load_patch(path)
    assert path == tmp_path / "x.brainpatch"
    assert (patch.vectors["v"].dtype, patch.vectors["v"].data) == ("BF16", (1.0, 2.5, -0.25))
    assert (patch.name, patch.readme, patch.manifest.description) == ("x", "r", "d")
    assert patch.manifest.interventions == ITEMS
    assert patch.manifest.base_model == MODEL
    assert patch.manifest.evidence_level == "predictive"
    assert patch.manifest.provenance == {"discovery_method": "caa"}
    assert patch.manifest.evaluation == {"n": 1}
    assert patch.manifest.is_verified_on("vllm")


def test_the_default_dtype_and_overwrite(tmp_path: Path) -> None:
    path = compile_from_vectors("x", {"v": [0.0] * 3}, ITEMS, MODEL, tmp_path / "x")
    assert load_patch(path).vectors["v"].dtype == "F16"
    with pytest.raises(PatchExistsError):
        compile_from_vectors("x", {"v": [1.0] * 3}, ITEMS, MODEL, path)
    compile_from_vectors("x", {"v": [1.0] * 3}, ITEMS, MODEL, path, overwrite=True)
    assert load_patch(path).vectors["v"].data == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("vectors", "items", "dtype", "why"),
    [
        ({}, ITEMS, "F16", "at least one"),
        ({"v": [1.0] * 3}, [], "F16", "at least one"),
        ({"v": [1e5] * 3}, ITEMS, "F16", "BP118"),
        ({"v": ["a"] * 3}, ITEMS, "F16", "BP117"),
        ({"v": [1.0] * 3}, ITEMS, "I8", "BP117"),
    ],
)
def test_parts_that_do_not_make_a_patch(
    vectors: Any, items: list[Intervention], dtype: str, why: str, tmp_path: Path
) -> None:
    with pytest.raises(CompileError, match=why) as caught:
        compile_from_vectors("x", vectors, items, MODEL, tmp_path / "x", dtype=dtype)
    assert caught.value.code == "BP603"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "code"),
    [({"name": "X"}, "BP113"), ({"evidence_level": "x"}, "BP110"), ({"vectors": {"w": [1.0] * 3}}, "BP119")],
)
def test_the_rules_of_the_format_hold(change: dict[str, Any], code: str, tmp_path: Path) -> None:
    parts = {"name": "x", "vectors": {"v": [1.0] * 3}, "interventions": ITEMS, "base_model": MODEL, **change}
    with pytest.raises(PatchFormatError) as caught:
        compile_from_vectors(output=tmp_path / "x", **parts)
    assert caught.value.code == code
