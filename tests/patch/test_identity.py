"""The digest of what a patch means."""

from __future__ import annotations

import copy
import hashlib
import struct
from collections.abc import Callable

import pytest

from brainpatch.patch import (
    Intervention,
    LoadedPatch,
    Manifest,
    StrengthSchedule,
    Tensor,
    load_patch_bytes,
    meaning_digest,
    patch_bytes,
)
from brainpatch.patch.tensors import vector


@pytest.fixture
def patch(manifest: Manifest, vectors: dict[str, Tensor]) -> LoadedPatch:
    manifest.schedule = StrengthSchedule({20: 0.5, 0: 1.0})
    return LoadedPatch(manifest, vectors)


def test_the_layout_that_the_specification_gives(patch: LoadedPatch) -> None:
    message = b"brainpatch meaning 1\n" + struct.pack("<d", 8.0)
    message += struct.pack("<I", 2) + struct.pack("<I", 0) + struct.pack("<d", 1.0)
    message += struct.pack("<I", 20) + struct.pack("<d", 0.5)
    message += struct.pack("<I", 2)
    message += (
        struct.pack("<I", 1) + b"\0" + struct.pack("<d", 2.0) + struct.pack("<I4f", 4, 0.5, -0.25, 0.125, 1.0)
    )
    message += (
        struct.pack("<I", 3) + b"\1" + struct.pack("<d", -0.5) + struct.pack("<I4f", 4, 1.0, 0.0, -1.0, 2.0)
    )
    assert meaning_digest(patch) == hashlib.sha256(message).hexdigest()


def _rename(patch: LoadedPatch) -> None:
    patch.manifest.name = "other"
    patch.manifest.description = patch.manifest.license = "x"
    patch.manifest.evidence_level = "replicated"
    patch.manifest.evaluation = {"a": 1}
    patch.manifest.base_model.model_id = "y"
    patch.manifest.default_strength = 0.0
    patch.manifest.interventions[0].id = "z"
    patch.readme = "hello"


def _rename_vector(patch: LoadedPatch) -> None:
    patch.vectors["renamed"] = patch.vectors.pop("v")
    patch.manifest.interventions[0].vector = "renamed"


def _store_otherwise(patch: LoadedPatch) -> None:
    patch.vectors["w"] = vector(patch.vectors["w"].data, "F64")


def _add_spare(patch: LoadedPatch) -> None:
    patch.vectors["spare"] = vector([1.0] * 4)


@pytest.mark.parametrize("change", [_rename, _rename_vector, _store_otherwise, _add_spare])
def test_what_does_not_count(change: Callable[[LoadedPatch], None], patch: LoadedPatch) -> None:
    before = meaning_digest(patch)
    changed = copy.deepcopy(patch)
    change(changed)
    assert changed != patch
    assert meaning_digest(changed) == before


def _set(field: str, value: object) -> Callable[[LoadedPatch], None]:
    return lambda patch: setattr(patch.manifest, field, value)


def _set_first(field: str, value: object) -> Callable[[LoadedPatch], None]:
    return lambda patch: setattr(patch.manifest.interventions[0], field, value)


@pytest.mark.parametrize(
    "change",
    [
        _set("max_abs_strength", 4.0),
        _set("schedule", None),
        _set("schedule", StrengthSchedule({0: 1.0, 21: 0.5})),
        _set("schedule", StrengthSchedule({0: 1.0, 20: 0.25})),
        _set_first("layer", 2),
        _set_first("coefficient", -2.0),
        _set_first("site", "continuation"),
        _set_first("vector", "w"),
        lambda patch: patch.manifest.interventions.reverse(),
        lambda patch: patch.manifest.interventions.append(Intervention(0, "v", 0.0)),
        lambda patch: patch.vectors.update(v=vector([0.5, -0.25, 0.125, 1.0000001])),
    ],
)
def test_what_counts(change: Callable[[LoadedPatch], None], patch: LoadedPatch) -> None:
    before = meaning_digest(patch)
    change(patch)
    assert meaning_digest(patch) != before


def test_a_file_keeps_it(patch: LoadedPatch) -> None:
    assert meaning_digest(load_patch_bytes(patch_bytes(patch.manifest, patch.vectors))) == meaning_digest(
        patch
    )
