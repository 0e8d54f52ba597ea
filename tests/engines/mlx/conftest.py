"""Two models for this engine's tests: the real one, and a narrow one of the same width and depth.

The narrow one is quick, and its weights are random; its config is as transformers 5 writes it, with rotary positions
under `rope_parameters` alone.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
import transformers

from brainpatch.backends.mlx_backend import MLXBackend
from brainpatch.runtime.config import GenerationConfig
from tests.engines import fast_blas
from tests.engines.material import HIDDEN, LAYERS, MODEL_ID

fast_blas.load()


def opened(folder, **arguments):
    """A backend with a model, for patches made for any."""
    backend = MLXBackend()
    backend.load_model(str(folder), model_id=MODEL_ID, **arguments)
    backend.compatibility_mode = "unsafe"
    return backend


@pytest.fixture(scope="session")
def real_loaded(model_folder):
    """The real SmolLM2-135M-Instruct in float32."""
    backend = opened(model_folder, dtype="float32")
    yield backend
    backend.unload()


@pytest.fixture
def real(real_loaded):
    """The real model without patches. It is checked afterwards that its blocks are what they were."""
    yield from _without_patches(real_loaded)


@pytest.fixture(scope="session")
def narrow_hf():
    """The narrow model in plain PyTorch."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": 100000.0, "rope_type": "default"},
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(0.08 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="session")
def narrow_folder(narrow_hf, model_folder, tmp_path_factory):
    """The narrow model's files, with the real tokenizer."""
    folder = tmp_path_factory.mktemp("narrow")
    narrow_hf.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(str(model_folder)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def loaded(narrow_folder):
    """The narrow model in float32."""
    backend = opened(narrow_folder)
    yield backend
    backend.unload()


@pytest.fixture
def backend(loaded):
    """The narrow model without patches. It is checked afterwards that its blocks are what they were."""
    yield from _without_patches(loaded)


def _without_patches(backend):
    backend.patches.clear()
    yield backend
    backend.patches.clear()
    assert watched(backend.model) == []


def watched(model):
    """Which blocks are of another class than mlx-lm's."""
    from mlx_lm.models.llama import TransformerBlock

    return [layer for layer, block in enumerate(model.layers) if type(block) is not TransformerBlock]


def within(backend, work):
    """What `work` returns in the engine's thread, to which MLX's arrays belong."""
    return backend._ready()[1].call(lambda _: work())


def weights_digest(backend):
    """SHA-256 of all parameters."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    def work():
        seal = hashlib.sha256()
        for name, array in sorted(tree_flatten(backend.model.parameters())):
            seal.update(name.encode() + np.array(array.view(mx.uint8)).tobytes())
        return seal.hexdigest()

    return within(backend, work)


def library_answer(backend, ids, count):
    """mlx-lm's own greedy answer: token ids, and the logits of each, float32."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    def work():
        rows = []

        def keep(tokens, logits):
            rows.append(np.array(logits[0].astype(mx.float32)))
            return logits

        steps = generate_step(mx.array(ids), backend.model, max_tokens=count, logits_processors=[keep])
        return [token for token, _ in steps], rows[:count]

    return within(backend, work)


def scored(backend, prompts, wishes, count, answers=None):
    """Token ids and log-probabilities of the whole vocabulary, for prompts that are token ids."""
    config = GenerationConfig(max_new_tokens=count, ignore_eos=True)
    requests = [
        backend.requests([ids], config, patches=wish)[0] for ids, wish in zip(prompts, wishes, strict=True)
    ]
    return backend.score(requests, answers)
