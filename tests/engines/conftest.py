"""The real model as engines are compared with it."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def hf(model_folder):
    """SmolLM2-135M-Instruct in plain PyTorch, float32."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    return AutoModelForCausalLM.from_pretrained(str(model_folder), dtype=torch.float32).eval()
