"""A patch as a control vector of llama.cpp: what is in the file, and what is refused."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brainpatch.errors import CompileError, PatchExistsError, PatchFormatError, PatchWriteError, RequestError
from brainpatch.patch import BaseModelSpec, load_patch, meaning_digest, save_patch
from brainpatch.patch import control_vector as module
from brainpatch.patch.compiler import export_llamacpp_control_vector
from brainpatch.patch.control_vector import control_vector, model_hint
from brainpatch.runtime.meaning import ActivePatch, resolve
from tests.factories import make_patch

NOTHING = {"v": [0.0, 0.0, 0.0, 0.0]}


def _saved(tmp_path: Path, *arguments: Any, **fields: Any) -> Path:
    patch = make_patch(*arguments, **fields)
    return save_patch(patch.manifest, patch.vectors, tmp_path / "p.brainpatch")


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Keys and tensors of a GGUF file, by the public reader."""
    reader = gguf.GGUFReader(path)
    keys = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert {tensor.tensor_type for tensor in reader.tensors} <= {gguf.GGMLQuantizationType.F32}
    return keys, {tensor.name: np.array(tensor.data) for tensor in reader.tensors}


def test_the_edit_after_block_l_is_direction_l(tmp_path: Path) -> None:
    path = _saved(tmp_path, [{"layer": layer} for layer in (29, 1, 15)], layers=30)
    out = export_llamacpp_control_vector(path, tmp_path / "x.gguf")
    _, tensors = _read(out)
    assert list(tensors) == ["direction.1", "direction.15", "direction.29"]
    vector = load_patch(path).vectors["v"].float32()
    for direction in tensors.values():
        assert direction.dtype == np.float32
        assert np.array_equal(direction, vector)


def test_a_direction_is_the_sum_over_a_blocks_interventions(tmp_path: Path) -> None:
    items = [
        {"layer": 2, "vector": "a", "coefficient": 2.0},
        {"layer": 1, "vector": "a", "coefficient": -1.0},
        {"layer": 2, "vector": "b", "coefficient": -0.5},
        {"layer": 2, "vector": "a", "coefficient": 0.25},
    ]
    vectors = {"a": [1.0, -2.0, 0.0, 4.0], "b": [8.0, 8.0, -8.0, 0.0]}
    path = _saved(tmp_path, items, vectors=vectors)
    _, tensors = _read(export_llamacpp_control_vector(path, tmp_path / "x", strength=-2.0))
    assert tensors["direction.1"].tolist() == [2.0, -4.0, 0.0, 8.0]
    assert tensors["direction.2"].tolist() == [3.5, 17.0, -8.0, -18.0]


_numbers = st.sampled_from([-3.0, -1.0, -0.3, 0.0, 1e-13, 1e-7, 0.1, 1.0, 7.0])
_items = st.lists(
    st.fixed_dictionaries(
        {
            "layer": st.integers(1, 3),
            "vector": st.sampled_from(["u", "v", "w"]),
            "coefficient": _numbers,
        }
    ),
    min_size=1,
    max_size=6,
)
_schedules = st.none() | st.builds(
    lambda value, first: {str(first if value == 1.0 else 0): value}, _numbers, st.sampled_from([0, 5])
)


@settings(max_examples=100, deadline=None)
@given(_items, _numbers, _schedules)
def test_a_direction_is_what_an_engine_adds(
    items: list[dict[str, Any]], strength: float, schedule: dict[str, float] | None
) -> None:
    patch = make_patch(items, schedule=schedule)
    resolved = resolve({"p": strength}, {"p": ActivePatch(patch)})
    directions = control_vector(patch, strength).directions
    assert list(directions) == patch.manifest.layers
    for layer, direction in directions.items():
        segments = resolved.segments(layer, 0, 5, 3) if layer in resolved.layers else []
        added = resolved.sum(layer, segments[0].coefficients) if segments else np.zeros(4, np.float32)
        # To the bit, but for the sign of a zero.
        assert np.array_equal(direction, added)


def test_strength_0_is_a_file_of_zeros(tmp_path: Path) -> None:
    _, tensors = _read(
        export_llamacpp_control_vector(_saved(tmp_path, [{"layer": 2}]), tmp_path / "x", strength=0)
    )
    assert tensors["direction.2"].tolist() == [0.0] * 4


def test_a_strength_beyond_the_bound_is_clamped_with_a_warning(tmp_path: Path) -> None:
    path = _saved(tmp_path, [{"layer": 1}], max_abs_strength=2.0)
    bound = export_llamacpp_control_vector(path, tmp_path / "a", strength=-2.0)
    with pytest.warns(UserWarning, match="clamped to -2"):
        beyond = export_llamacpp_control_vector(path, tmp_path / "b", strength=-100)
    assert beyond.read_bytes() == bound.read_bytes()


@pytest.mark.parametrize("strength", [float("nan"), float("inf"), 10**400, "1", True, None])
def test_a_strength_is_a_finite_number(strength: Any, tmp_path: Path) -> None:
    path = _saved(tmp_path, [{"layer": 1}])
    with pytest.raises(RequestError, match="BP402"):
        export_llamacpp_control_vector(path, tmp_path / "x", strength=strength)
    assert [each.name for each in tmp_path.iterdir()] == ["p.brainpatch"]


def test_a_constant_schedule_is_folded_in(tmp_path: Path) -> None:
    plain = make_patch([{"layer": 1}])
    vector = plain.vectors["v"].float32()
    for schedule, factor in (({"0": 0.5}, 0.5), ({"7": 1.0}, 1.0), ({"0": -2.0, "9": -2.0}, -2.0)):
        path = _saved(tmp_path / str(factor), [{"layer": 1}], schedule=schedule)
        _, tensors = _read(export_llamacpp_control_vector(path, tmp_path / str(factor)))
        assert np.array_equal(tensors["direction.1"], np.float32(factor) * vector)


@pytest.mark.parametrize(
    ("items", "fields", "why"),
    [
        ([{"layer": 1}, {"layer": 0}], {}, "edits block 0"),
        ([{"layer": 0, "coefficient": 0.0}], {}, "edits block 0"),
        ([{"layer": 1}, {"layer": 3, "site": "prompt"}], {}, 'site "prompt" alone, at block 3'),
        ([{"layer": 2, "site": "continuation"}], {}, 'site "continuation" alone, at block 2'),
        ([{"layer": 1}], {"schedule": {"0": 1.0, "20": 0.0}}, "schedule changes"),
        ([{"layer": 1}], {"schedule": {"20": 0.5}}, "schedule changes"),
        (
            [{"layer": 1, "coefficient": 1e3}] * 2,
            {"vectors": {"v": [1e37] * 4}},
            "sum at block 1 is not finite",
        ),
        (
            [{"layer": 1}, {"layer": 1, "coefficient": -1.0}],
            {"vectors": {"v": [1e38, 0.0, 0.0, 0.0]}, "schedule": {"0": 8.0}},
            "sum at block 1 is not finite",
        ),
        (
            [{"layer": layer} for layer in range(1, 2000)],
            {"vectors": {"v": [0.0] * 60000}, "hidden": 60000, "layers": 2000},
            "needs 479760000 bytes",
        ),
    ],
)
def test_what_a_control_vector_cannot_say_is_refused_by_name(
    items: list[dict[str, Any]], fields: dict[str, Any], why: str, tmp_path: Path
) -> None:
    path = _saved(tmp_path, items, **fields)
    for strength in (1.0, 0.0):
        if "finite" in why and strength == 0.0:
            continue
        with pytest.raises(CompileError, match=why) as caught:
            export_llamacpp_control_vector(path, tmp_path / "out" / "x", strength=strength)
        assert caught.value.code == "BP604"
    assert [each.name for each in tmp_path.iterdir()] == ["p.brainpatch"]


def test_all_reasons_are_told_at_once() -> None:
    items = [{"layer": 0, "site": "prompt"}, {"layer": 1, "site": "continuation"}]
    with pytest.raises(CompileError) as caught:
        control_vector(make_patch(items, schedule={"1": 2.0}))
    for reason in ("block 0", '"prompt"', '"continuation"', "schedule"):
        assert reason in caught.value.reason


def test_a_patch_made_by_hand_is_checked() -> None:
    patch = make_patch([{"layer": 1}])
    patch.manifest.interventions[0].layer = 4
    with pytest.raises(PatchFormatError, match="BP111"):
        control_vector(patch)


def test_the_file_says_what_it_is_and_where_it_came_from(tmp_path: Path) -> None:
    path = _saved(
        tmp_path,
        [{"layer": 1}, {"layer": 3}],
        name="formal",
        description="Zeile\nzwei \u202e",
        authors=["A. One", "B. Two"],
        license="MIT",
        evidence_level="predictive",
        base_model=BaseModelSpec("org/model", "LlamaForCausalLM", 4, 4),
    )
    keys, _ = _read(export_llamacpp_control_vector(path, tmp_path / "x", strength=0.1))
    assert keys == {
        "general.architecture": "controlvector",
        "controlvector.model_hint": "llama",
        "controlvector.layer_count": 2,
        "general.name": "formal",
        "general.description": "Zeile\nzwei \u202e",
        "general.author": "A. One, B. Two",
        "general.license": "MIT",
        "brainpatch.name": "formal",
        "brainpatch.digest": meaning_digest(load_patch(path)),
        "brainpatch.strength": "0.1",
        "brainpatch.base_model": "org/model",
        "brainpatch.evidence_level": "predictive",
    }
    raw = gguf.GGUFReader(tmp_path / "x.gguf").fields["controlvector.layer_count"]
    assert raw.types == [gguf.GGUFValueType.UINT32]


@pytest.mark.parametrize(
    ("architecture", "hint"),
    [
        ("Qwen2ForCausalLM", "qwen2"),
        ("Qwen3MoeForCausalLM", "qwen2"),
        ("LlamaForCausalLM", "llama"),
        ("MistralForCausalLM", "llama"),
        ("Gemma2ForCausalLM", "gemma"),
        ("PhiForCausalLM", "phi2"),
        ("GPT2LMHeadModel", "unknown"),
        ("", "unknown"),
    ],
)
def test_the_model_hint(architecture: str, hint: str) -> None:
    patch = make_patch([{"layer": 1}], base_model=BaseModelSpec("m", architecture, 4, 4))
    assert model_hint(patch.manifest) == hint


def test_the_suffix_is_gguf_and_nothing_is_replaced_unasked(tmp_path: Path) -> None:
    path = _saved(tmp_path, [{"layer": 1}])
    out = export_llamacpp_control_vector(str(path), str(tmp_path / "deep" / "x.bin"))
    assert out == tmp_path / "deep" / "x.gguf"
    whole = out.read_bytes()
    with pytest.raises(PatchExistsError, match="BP121"):
        export_llamacpp_control_vector(path, out, strength=2.0)
    assert out.read_bytes() == whole
    assert export_llamacpp_control_vector(path, out, strength=2.0, overwrite=True) == out
    assert out.read_bytes() != whole
    assert [each.name for each in out.parent.iterdir()] == ["x.gguf"]
    with pytest.raises(PatchWriteError, match="BP122"):
        export_llamacpp_control_vector(path, "")


def test_a_file_that_comes_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _saved(tmp_path, [{"layer": 1}])
    (tmp_path / "x.gguf").write_bytes(b"theirs")
    monkeypatch.setattr(os.path, "lexists", lambda path: False)
    with pytest.raises(PatchExistsError):
        export_llamacpp_control_vector(path, tmp_path / "x")
    assert (tmp_path / "x.gguf").read_bytes() == b"theirs"


def test_equal_patches_give_equal_bytes(tmp_path: Path) -> None:
    items = [{"layer": 3, "vector": "a"}, {"layer": 1, "vector": "b", "coefficient": 0.3}]
    path = _saved(tmp_path, items)
    once = export_llamacpp_control_vector(path, tmp_path / "one").read_bytes()
    assert export_llamacpp_control_vector(path, tmp_path / "other" / "name").read_bytes() == once


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _saved(tmp_path, [{"layer": 1}])
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CompileError, match=r"pip install 'brainpatch\[convert\]'") as caught:
        export_llamacpp_control_vector(path, tmp_path / "out" / "x")
    assert caught.value.code == "BP605"
    assert not (tmp_path / "out").exists()


def test_nothing_is_left_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _saved(tmp_path, [{"layer": 1}])
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(module.tempfile, "tempdir", str(folder))

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", full)
    with pytest.raises(PatchWriteError, match="a temporary file: No space left"):
        export_llamacpp_control_vector(path, tmp_path / "out" / "x")
    assert list(folder.iterdir()) == []
    assert not (tmp_path / "out").exists()
