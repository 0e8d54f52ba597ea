"""Patches: small, inert files that steer a frozen language model, and a runtime for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from brainpatch.errors import (
        BackendNotAvailable,
        BrainPatchError,
        CapabilityError,
        PatchCompatibilityError,
        PatchFormatError,
        UnknownPatchError,
    )
    from brainpatch.patch import (
        FORMAT_VERSION,
        SUFFIX,
        BaseModelSpec,
        Intervention,
        LoadedPatch,
        Manifest,
        PatchRegistry,
        StrengthSchedule,
        default_registry,
        load_patch,
        save_patch,
    )
    from brainpatch.runtime import (
        BrainPatchedModel,
        Capabilities,
        Generation,
        GenerationConfig,
        PatchHandle,
        available_backends,
        environment_report,
    )

_HOMES = {
    "brainpatch.errors": (
        "BackendNotAvailable",
        "BrainPatchError",
        "CapabilityError",
        "PatchCompatibilityError",
        "PatchFormatError",
        "UnknownPatchError",
    ),
    "brainpatch.patch": (
        "BaseModelSpec",
        "FORMAT_VERSION",
        "Intervention",
        "LoadedPatch",
        "Manifest",
        "PatchRegistry",
        "SUFFIX",
        "StrengthSchedule",
        "default_registry",
        "load_patch",
        "save_patch",
    ),
    "brainpatch.runtime": (
        "BrainPatchedModel",
        "Capabilities",
        "Generation",
        "GenerationConfig",
        "PatchHandle",
        "available_backends",
        "environment_report",
    ),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "FORMAT_VERSION",
    "SUFFIX",
    "BackendNotAvailable",
    "BaseModelSpec",
    "BrainPatchError",
    "BrainPatchedModel",
    "Capabilities",
    "CapabilityError",
    "Generation",
    "GenerationConfig",
    "Intervention",
    "LoadedPatch",
    "Manifest",
    "PatchCompatibilityError",
    "PatchFormatError",
    "PatchHandle",
    "PatchRegistry",
    "StrengthSchedule",
    "UnknownPatchError",
    "__version__",
    "available_backends",
    "default_registry",
    "environment_report",
    "load_patch",
    "save_patch",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, so that `import brainpatch` costs nothing."""
    if name not in _HOME:
        raise AttributeError(f"module 'brainpatch' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
