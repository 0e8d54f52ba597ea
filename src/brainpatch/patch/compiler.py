"""A patch from lists of numbers, in one call; and a patch as a control vector of llama.cpp."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from brainpatch.errors import CompileError, PatchFormatError
from brainpatch.patch import tensors
from brainpatch.patch.control_vector import export_llamacpp_control_vector
from brainpatch.patch.file import save_patch
from brainpatch.patch.manifest import BaseModelSpec, Intervention, Manifest
from brainpatch.patch.text import visible

__all__ = ["compile_from_vectors", "export_llamacpp_control_vector"]


def compile_from_vectors(
    name: str,
    vectors: Mapping[str, Iterable[float]],
    interventions: Iterable[Intervention],
    base_model: BaseModelSpec,
    output: str | os.PathLike[str],
    *,
    dtype: str = "F16",
    description: str = "",
    evidence_level: str = "none",
    provenance: Mapping[str, Any] | None = None,
    evaluation: Mapping[str, Any] | None = None,
    compatibility: Mapping[str, Mapping[str, Any]] | None = None,
    readme: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a patch of `vectors` (name -> `hidden_size` numbers, stored as `dtype`) and return its path.

    Raises CompileError BP603 when there are no vectors or interventions, or a vector cannot be stored as
    `dtype`; PatchFormatError for what the manifest's rules refuse; PatchExistsError and PatchWriteError as
    `save_patch`.
    """
    items = list(interventions)
    if not vectors or not items:
        raise CompileError("BP603", "a patch needs at least one vector and one intervention")
    packed = {}
    for key, values in vectors.items():
        try:
            packed[key] = tensors.vector(values, dtype)
        except PatchFormatError as error:
            raise CompileError(
                "BP603", f'vector "{visible(str(key), 80)}": {error.reason} ({error.code})', error.remedy
            ) from None
    manifest = Manifest(
        name,
        base_model,
        items,
        description=description,
        evidence_level=evidence_level,  # type: ignore[arg-type]  # checked by save_patch
        provenance=dict(provenance or {}),
        evaluation=dict(evaluation or {}),
        compatibility={engine: dict(claim) for engine, claim in (compatibility or {}).items()},
    )
    return save_patch(manifest, packed, output, readme=readme, overwrite=overwrite)
