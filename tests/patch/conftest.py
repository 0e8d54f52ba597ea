"""A small valid patch, to start from."""

from __future__ import annotations

from typing import Any

import pytest

from brainpatch.patch import BaseModelSpec, Intervention, Manifest, Tensor


@pytest.fixture
def manifest() -> Manifest:
    """Two interventions on a model of 4 blocks and hidden size 4."""
    return Manifest(
        "tiny",
        BaseModelSpec("example-org/tiny-4", "LlamaForCausalLM", 4, 4),
        [Intervention(1, "v", 2.0), Intervention(3, "w", -0.5, site="prompt")],
    )


@pytest.fixture
def vectors() -> dict[str, Tensor]:
    """The vectors that `manifest` names."""
    return {
        "v": Tensor("F32", (4,), [0.5, -0.25, 0.125, 1.0]),
        "w": Tensor("F16", (4,), [1.0, 0.0, -1.0, 2.0]),
    }


@pytest.fixture
def data(manifest: Manifest) -> dict[str, Any]:
    """`manifest` as JSON data."""
    return manifest.to_dict()
