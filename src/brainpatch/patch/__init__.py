"""The patch file: what it holds, how it is read and written, and whether it fits a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from brainpatch.errors import (
    PatchCompatibilityError,
    PatchFormatError,
    PatchLoadError,
    RegistryError,
)
from brainpatch.patch.compatibility import CompatibilityReport, ModelDescriptor, check_compatibility
from brainpatch.patch.file import (
    SUFFIX,
    LoadedPatch,
    load_patch,
    load_patch_bytes,
    patch_bytes,
    patch_size_report,
    save_patch,
)
from brainpatch.patch.identity import meaning_digest
from brainpatch.patch.limits import ABSOLUTE_MAX_STRENGTH
from brainpatch.patch.manifest import (
    FORMAT_VERSION,
    BaseModelSpec,
    Intervention,
    Manifest,
    PatchWarning,
    manifest_schema,
)
from brainpatch.patch.schedule import StrengthSchedule
from brainpatch.patch.tensors import Tensor

if TYPE_CHECKING:
    from brainpatch.patch.registry import InstalledPatch, PatchRegistry, default_registry, registry_home

_FROM_REGISTRY = frozenset(("InstalledPatch", "PatchRegistry", "default_registry", "registry_home"))

__all__ = [
    "ABSOLUTE_MAX_STRENGTH",
    "FORMAT_VERSION",
    "SUFFIX",
    "BaseModelSpec",
    "CompatibilityReport",
    "InstalledPatch",
    "Intervention",
    "LoadedPatch",
    "Manifest",
    "ModelDescriptor",
    "PatchCompatibilityError",
    "PatchFormatError",
    "PatchLoadError",
    "PatchRegistry",
    "PatchWarning",
    "RegistryError",
    "StrengthSchedule",
    "Tensor",
    "check_compatibility",
    "default_registry",
    "load_patch",
    "load_patch_bytes",
    "manifest_schema",
    "meaning_digest",
    "patch_bytes",
    "patch_size_report",
    "registry_home",
    "save_patch",
]


def __getattr__(name: str) -> Any:
    """The registry's names, imported when first asked for: a file can be read without it."""
    if name not in _FROM_REGISTRY:
        raise AttributeError(f"module 'brainpatch.patch' has no attribute {name!r}")
    from brainpatch.patch import registry

    return getattr(registry, name)
