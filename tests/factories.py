"""Small patches made in memory, for tests of what stands above the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from brainpatch.patch.file import LoadedPatch
from brainpatch.patch.manifest import BaseModelSpec, Intervention, Manifest
from brainpatch.patch.tensors import vector


def make_patch(
    interventions: Sequence[Mapping[str, Any]],
    *,
    name: str = "p",
    hidden: int = 4,
    layers: int = 4,
    vectors: Mapping[str, Sequence[float]] | None = None,
    seed: int = 0,
    **fields: Any,
) -> LoadedPatch:
    """A patch whose vectors are random (norm about sqrt(hidden)) unless given."""
    items = [Intervention(**{"vector": "v", **item}) for item in interventions]
    generator = np.random.default_rng(seed)
    keys = sorted({item.vector for item in items})
    values = {key: generator.standard_normal(hidden).astype(np.float32).tolist() for key in keys}
    values.update(vectors or {})
    fields.setdefault("base_model", BaseModelSpec("test/model", "Test", hidden, layers))
    manifest = Manifest(name, fields.pop("base_model"), items, **fields)
    manifest.validate()
    return LoadedPatch(manifest, {key: vector(value) for key, value in values.items()})
