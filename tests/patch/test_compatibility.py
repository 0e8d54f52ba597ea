"""Does a patch fit a model? The published package's own cases are in test_valid_files."""

from __future__ import annotations

import pytest

from brainpatch.errors import PatchCompatibilityError
from brainpatch.patch import Manifest, ModelDescriptor, check_compatibility

FITS = ModelDescriptor("example-org/tiny-4", 4, 4, "LlamaForCausalLM")


def test_fits(manifest: Manifest) -> None:
    report = check_compatibility(manifest, FITS)
    report.raise_if_failed()
    assert report.to_dict() == {"ok": True, "mode": "strict", "errors": [], "warnings": []}


@pytest.mark.parametrize(
    ("model", "errors"),
    [
        (ModelDescriptor("other", 4, 4), {"strict": 1, "architecture": 0, "unsafe": 0}),
        (ModelDescriptor("example-org/tiny-4", 5, 4), {"strict": 1, "architecture": 1, "unsafe": 1}),
        (ModelDescriptor("example-org/tiny-4", 4, 5), {"strict": 1, "architecture": 1, "unsafe": 0}),
        (ModelDescriptor("example-org/tiny-4", 4, 3), {"strict": 2, "architecture": 2, "unsafe": 1}),
        (ModelDescriptor("example-org/tiny-4", 4, 4, "Qwen"), {"strict": 1, "architecture": 1, "unsafe": 0}),
        (ModelDescriptor("Example-org/tiny-4", 9, 1, "Qwen"), {"strict": 6, "architecture": 5, "unsafe": 3}),
    ],
)
def test_every_difference_is_listed(
    model: ModelDescriptor, errors: dict[str, int], manifest: Manifest
) -> None:
    for mode, count in errors.items():
        report = check_compatibility(manifest, model, mode=mode)
        assert len(report.errors) == count
        assert report.ok == (count == 0)
        assert len(report.warnings) == (mode != "strict" and model.model_id != "example-org/tiny-4")
        if count:
            with pytest.raises(PatchCompatibilityError, match="BP201") as caught:
                report.raise_if_failed()
            assert all(error in caught.value.reason for error in report.errors)


@pytest.mark.parametrize(
    ("pinned", "actual", "errors", "warnings"),
    [(None, None, 0, 0), (None, "a", 0, 0), ("a", None, 0, 1), ("a", "a", 0, 0), ("a", "A", 1, 0)],
)
def test_revision(
    pinned: str | None, actual: str | None, errors: int, warnings: int, manifest: Manifest
) -> None:
    manifest.base_model.revision = pinned
    model = ModelDescriptor(FITS.model_id, 4, 4, "", actual)
    report = check_compatibility(manifest, model)
    assert (len(report.errors), len(report.warnings)) == (errors, warnings)
    assert check_compatibility(manifest, model, mode="architecture").ok


def test_texts_are_safe_to_print(manifest: Manifest) -> None:
    manifest.base_model.model_id = "\x1b[2J"
    report = check_compatibility(manifest, ModelDescriptor("\u202e", 4, 4))
    assert report.errors == ["model_id: the patch is for \\x1b[2J, the model has \\u202e"]


@pytest.mark.parametrize("mode", ["Strict", "", None, "loose"])
def test_an_unknown_mode(mode: str, manifest: Manifest) -> None:
    with pytest.raises(ValueError, match="BP202"):
        check_compatibility(manifest, FITS, mode=mode)
