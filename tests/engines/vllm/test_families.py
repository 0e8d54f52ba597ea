"""Tiny random models of every return form, in vLLM for real, against Transformers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brainpatch.patch.manifest import BaseModelSpec
from brainpatch.runtime import GenerationConfig
from tests.engines.vllm.conftest import alone
from tests.engines.vllm.material import cosine, log_softmax
from tests.factories import make_patch

pytestmark = [pytest.mark.vllm, pytest.mark.model, pytest.mark.slow]

LAYERS, HIDDEN, VOCABULARY = 3, 128, 49152
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 256, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "max_position_embeddings": 256,
}  # fmt: skip
PROMPT = [5, 77, 1200, 31, 9, 404, 15]

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    # model type: (form, path of the blocks in Transformers, its config)
    "llama": ("SUM", "model.layers", {**SHAPE, "num_key_value_heads": 2}),
    "qwen3": ("SUM", "model.layers", {**SHAPE, "num_key_value_heads": 2, "head_dim": 32}),
    "stablelm": ("DONE", "model.layers", {**SHAPE, "num_key_value_heads": 4}),
    "cohere": ("DONE", "model.layers", {**SHAPE, "num_key_value_heads": 2, "pad_token_id": 0}),
    "gpt2": (
        "ONE", "transformer.h",
        {"vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4, "n_positions": 256},
    ),
    "granite": ("ONE", "model.layers", {**SHAPE, "num_key_value_heads": 2, "residual_multiplier": 0.2}),
    "gpt_neox": ("HFB", "gpt_neox.layers", SHAPE),
    "starcoder2": ("HFB", "model.layers", {**SHAPE, "num_key_value_heads": 2}),
}  # fmt: skip


def tiny_model(model_type: str, folder: Path, tokenizer_of: Path) -> None:
    """Random weights, large enough that blocks matter, beside the tokenizer of a real model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **FAMILIES[model_type][2])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.08)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_of / name, folder / name)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_patch_means_the_same_in_every_family(free_slot, model_type, model_folder, tmp_path):
    from brainpatch.backends.vllm_backend import VLLMBackend

    form, blocks, _ = FAMILIES[model_type]
    tiny_model(model_type, tmp_path / "model", model_folder)
    generator = np.random.default_rng(1)
    vectors = {f"v{layer}": generator.standard_normal(HIDDEN).tolist() for layer in range(LAYERS)}
    cases = [(), (0,), (1,), (2,), (0, 1, 2)]
    runs = [
        {"ids": PROMPT, "new": 1, "edits": {layer: vectors[f"v{layer}"] for layer in case}} for case in cases
    ]
    question = {"model": str(tmp_path / "model"), "blocks": blocks, "runs": runs}
    theirs = np.load(alone("plain_transformers.py", question, tmp_path / "hf.npz"))
    spec = BaseModelSpec("test/tiny", "", HIDDEN, LAYERS)
    config = GenerationConfig(max_new_tokens=1, extra={"logprobs": -1})
    with VLLMBackend() as backend:
        backend.load_model(
            tmp_path / "model", model_id="test/tiny", dtype="float32", max_logprobs=-1, max_model_len=64
        )
        assert backend.worker_state()[0]["forms"] == {str(layer): form for layer in range(LAYERS)}
        for layer in range(LAYERS):
            item = {"layer": layer, "vector": f"v{layer}"}
            backend.install_patch(
                make_patch(
                    [item], name=f"p{layer}", vectors={f"v{layer}": vectors[f"v{layer}"]}, base_model=spec
                )
            )
        wishes = [{f"p{layer}": 1.0 for layer in case} for case in cases]
        answers = backend.generate_detailed([PROMPT] * len(cases), config, patches=wishes)
        rows = backend.trace(PROMPT, config, patches=wishes[-1])
    logits = [theirs[f"logits_{number}"].astype(np.float64) for number in range(len(cases))]
    for case, answer, wanted in zip(cases, answers, logits, strict=True):
        wanted = log_softmax(wanted)
        ours = np.array([answer.logprobs[0][token] for token in range(VOCABULARY)])
        assert cosine(ours, wanted) >= 0.99999, case
        np.testing.assert_allclose(ours, wanted, atol=2e-3, err_msg=str(case))
    for edited in logits[1:]:
        assert np.abs(edited - logits[0]).max() > 0.05  # the case shows something
    assert len(rows) == LAYERS * len(PROMPT)
    for row in rows:
        assert row.norm == pytest.approx(row.expected, rel=1e-4)
