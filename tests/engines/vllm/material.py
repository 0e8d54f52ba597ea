"""What the tests of this folder share: the model's name, questions, patches."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from brainpatch.patch.file import LoadedPatch
from brainpatch.patch.manifest import BaseModelSpec
from tests.factories import make_patch

HERE = Path(__file__).parent
RUNNER = "V2" if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" else "V1"
"""vLLM's model runner that the engines of this run must have; `make test-v2` asks for the second."""
ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_logprobs": -1,
}
MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
QUESTIONS = (
    "Tell me about the sea.",
    "How was your day?",
    "What should I cook tonight?",
    "Write one sentence about a train.",
    "Why is the sky blue?",
    "Name three animals.",
    "What is a library for?",
    "How do I plant a tree?",
)
EDITED = {"first": (0,), "middle": (15,), "last": (29,), "three": (0, 15, 29)}


def steering(
    name: str,
    layers: Sequence[int] = (15,),
    norm: float = 24.0,
    *,
    site: str = "all",
    coefficient: float = 1.0,
    **fields: Any,
) -> LoadedPatch:
    """A patch for SmolLM2 with one random direction of the given norm for each layer."""
    generator = np.random.default_rng(sum(name.encode()))
    vectors = {}
    for layer in layers:
        direction = generator.standard_normal(576)
        vectors[f"v{layer}"] = (direction / np.linalg.norm(direction) * norm).astype(np.float32).tolist()
    return make_patch(
        [
            {"layer": layer, "vector": f"v{layer}", "site": site, "coefficient": coefficient}
            for layer in layers
        ],
        name=name,
        vectors=vectors,
        base_model=BaseModelSpec(MODEL_ID, "LlamaForCausalLM", 576, 30),
        **fields,
    )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities, float64, of logits [vocabulary]."""
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def assert_close(one: Mapping[int, float], other: Mapping[int, float], atol: float) -> int:
    """Log-probabilities agree on the tokens that both list; returns how many those are."""
    shared = sorted(set(one) & set(other))
    np.testing.assert_allclose([one[t] for t in shared], [other[t] for t in shared], atol=atol)
    return len(shared)


def edits_of(patch: LoadedPatch) -> dict[int, list[float]]:
    """What the patch adds at strength 1, by layer."""
    return {
        item.layer: [float(x) * item.coefficient for x in patch.vector_for(item.vector).data]
        for item in patch.manifest.interventions
    }
