"""Files of the published package keep their meaning here, and are written again byte for byte."""

from __future__ import annotations

import hashlib
import json
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brainpatch.patch import (
    LoadedPatch,
    Manifest,
    ModelDescriptor,
    PatchWarning,
    StrengthSchedule,
    check_compatibility,
    load_patch,
    patch_size_report,
    save_patch,
)

FIXTURES = Path(__file__).parents[1] / "fixtures"
VALID = json.loads((FIXTURES / "valid.json").read_text())
MORE = {entry["file"]: entry for entry in json.loads((FIXTURES / "more-valid.json").read_text())}
# Written by hand with integers for numbers; they become floats, so the bytes change.
NOT_CANONICAL = {"tiny-max-int.brainpatch"}


def _load(path: Path) -> LoadedPatch:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PatchWarning)  # unused vectors
        return load_patch(path)


def test_no_file_is_left_out() -> None:
    assert {path.name for path in (FIXTURES / "valid").iterdir()} == VALID["files"].keys()
    assert {path.name for path in (FIXTURES / "more-valid").iterdir()} == MORE.keys()


@pytest.mark.parametrize("name", VALID["files"])
def test_reads_a_published_file(name: str) -> None:
    facts = VALID["files"][name]
    patch = _load(FIXTURES / "valid" / name)
    assert patch.manifest.to_dict() == facts["manifest"]
    assert patch.manifest.summary() == facts["summary_line"]
    assert patch.manifest.layers == facts["layers"]
    assert patch.readme == facts["readme"]
    assert patch.archive_bytes == facts["size"]
    assert patch.vectors.keys() == facts["vectors"].keys()
    for key, wanted in facts["vectors"].items():
        tensor = patch.vector_for(key)
        assert (tensor.dtype, list(tensor.shape)) == (wanted["dtype"], wanted["shape"])
        assert list(tensor.data[:4]) == wanted["first4"]
        assert np.linalg.norm(tensor.data) == pytest.approx(wanted["l2"], rel=1e-12)
        assert hashlib.sha256(tensor.float32().astype("<f4").tobytes()).hexdigest() == wanted["f32_le_sha256"]


@pytest.mark.parametrize("name", MORE)
def test_reads_another_file(name: str) -> None:
    facts = MORE[name]
    patch = _load(FIXTURES / "more-valid" / name)
    assert patch.manifest.to_dict() == facts["manifest"]
    assert patch.readme == facts["readme"]
    assert patch.vectors.keys() == facts["vectors"].keys()
    for key, wanted in facts["vectors"].items():
        tensor = patch.vector_for(key)
        assert (tensor.dtype, list(tensor.shape)) == (wanted["dtype"], wanted["shape"])
        assert list(tensor.data[:4]) == wanted["head"]
        assert np.linalg.norm(tensor.data) == pytest.approx(wanted["norm"], rel=1e-12)
        doubles = struct.pack(f"<{tensor.numel}d", *tensor.data)
        assert hashlib.sha256(doubles).hexdigest() == wanted["values_sha256_f64le"]


ALL = [FIXTURES / "valid" / name for name in VALID["files"]] + [
    FIXTURES / "more-valid" / name for name in MORE
]


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_saving_again_gives_the_same_bytes(path: Path, tmp_path: Path) -> None:
    patch = _load(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PatchWarning)
        again = save_patch(patch.manifest, patch.vectors, tmp_path / "again", readme=patch.readme)
    assert (again.read_bytes() == path.read_bytes()) == (path.name not in NOT_CANONICAL)
    assert _load(again).manifest == patch.manifest


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_the_manifest_survives_json_and_validates(path: Path) -> None:
    manifest = _load(path).manifest
    manifest.validate()
    for item in manifest.interventions:
        item.validate(num_layers=manifest.base_model.num_layers)
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert Manifest.from_dict(manifest.to_dict()) == manifest


COMPATIBILITY = [
    (name, case, f"{name}-{case['label']}-{case['mode']}")
    for name, cases in VALID["compat_cases"].items()
    for case in cases
]


@pytest.mark.parametrize(
    ("name", "case"), [row[:2] for row in COMPATIBILITY], ids=[row[2] for row in COMPATIBILITY]
)
def test_compatibility_case(name: str, case: dict[str, Any]) -> None:
    manifest = _load(FIXTURES / "valid" / name).manifest
    report = check_compatibility(manifest, ModelDescriptor(**case["model"]), mode=case["mode"])
    assert (report.ok, report.mode) == (case["ok"], case["mode"])
    assert (len(report.errors), len(report.warnings)) == (case["n_errors"], case["n_warnings"])


@pytest.mark.parametrize("case", VALID["schedule_cases"], ids=lambda case: str(case["keyframes"]))
def test_schedule_case(case: dict[str, Any]) -> None:
    schedule = StrengthSchedule(case["keyframes"], case["interpolate"], case["default"])
    assert schedule.to_dict() == case["serialized"]
    assert schedule.steps == case["steps"]
    assert schedule.is_constant() == case["constant"]
    assert {str(n): schedule.strength_at(int(n)) for n in case["values"]} == case["values"]
    assert StrengthSchedule.from_dict(case["serialized"]) == schedule


def test_size_report() -> None:
    path = FIXTURES / "valid" / "smol-mixed-dtypes.brainpatch"
    assert patch_size_report(_load(path)) == {
        "archive_bytes": 9924,
        "archive_kb": 9.69,
        "num_vectors": 4,
        "vector_payload_bytes": 576 * (2 + 4 + 2 + 8),
        "hidden_size": 576,
        "dtype": "F16",
    }


def test_description() -> None:
    path = FIXTURES / "valid" / "smol-readme.brainpatch"
    patch = _load(path)
    assert patch.describe() == {
        "name": "smol-readme",
        "format_version": "1.0",
        "description": patch.manifest.description,
        "base_model": patch.manifest.base_model.to_dict(),
        "num_interventions": 1,
        "layers": [12],
        "num_vectors": 1,
        "vector_dtype": "F16",
        "evidence_level": "none",
        "compatibility": {},
        "archive_bytes": 2251,
        "source": str(path),
    }
