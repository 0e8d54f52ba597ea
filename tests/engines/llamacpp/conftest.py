"""One real model for all tests of this engine, with its weights in float32."""

from __future__ import annotations

import pytest

from brainpatch.backends.llamacpp_backend import LlamaCppBackend
from tests.engines.material import MODEL_ID

EXACT = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attn": False, "n_threads": 2}
"""llama.cpp's flash attention on a CPU goes through float16: it moves log-probabilities by 0.03."""


@pytest.fixture(scope="session")
def opened(gguf_f32):
    """Loads the real model, or another GGUF, with keys and values in float32."""
    there: list[LlamaCppBackend] = []

    def load(path=gguf_f32, **arguments):
        backend = LlamaCppBackend()
        backend.load_model(path, model_id=MODEL_ID, **{**EXACT, "n_ctx": 2048, **arguments})
        there.append(backend)
        return backend

    yield load
    for backend in there:
        backend.unload()


@pytest.fixture(scope="session")
def loaded(opened):
    """The real model, edited in the callback."""
    return opened()


@pytest.fixture
def backend(loaded):
    """The real model without patches."""
    loaded.patches.clear()
    yield loaded
    loaded.patches.clear()


@pytest.fixture(scope="session")
def controlled(opened):
    """The real model, edited by control vector."""
    return opened(editing="control-vector")
