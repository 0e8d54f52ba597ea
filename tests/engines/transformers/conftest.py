"""One real model for all tests of this engine."""

from __future__ import annotations

import hashlib

import pytest
import torch

from brainpatch.backends.transformers_backend import TransformersBackend
from tests.engines.material import MODEL_ID


@pytest.fixture(scope="session")
def loaded(model_folder):
    """The real SmolLM2-135M-Instruct in float32."""
    torch.set_num_threads(2)
    backend = TransformersBackend()
    backend.load_model(str(model_folder), dtype="float32", model_id=MODEL_ID)
    backend.compatibility_mode = "unsafe"
    yield backend
    backend.unload()


@pytest.fixture
def backend(loaded):
    """The real model without patches. It is checked afterwards that no hook was left on it."""
    loaded.patches.clear()
    yield loaded
    loaded.patches.clear()
    assert hooks(loaded.model) == 0


def hooks(model):
    """How many forward hooks are on the model."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def weights_digest(model):
    """SHA-256 of all parameters and buffers."""
    seal = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        seal.update(name.encode() + tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return seal.hexdigest()
