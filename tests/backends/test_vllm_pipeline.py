"""Two pipeline stages add together what one worker adds. vLLM's CPU build cannot run stages, so the modules are toys;
the placeholders have vLLM's name, by which blocks of other stages are told apart."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from brainpatch.backends.vllm_forms import locate_blocks
from brainpatch.backends.vllm_plane import Plane, wrap
from brainpatch.runtime.meaning import ActivePatch, resolve
from tests.factories import make_patch

HIDDEN, LAYERS, PROMPT = 16, 6, 3
CONFIG = SimpleNamespace(model_type="llama", architectures=["LlamaForCausalLM"], num_hidden_layers=LAYERS)


class PPMissingLayer(nn.Identity):
    """A fake of vLLM's: it hands on its first argument."""


class Block(nn.Module):
    """Returns hidden and residual, as vLLM's Llama does."""

    def __init__(self, number: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN, generator=generator) / 8)

    def forward(self, hidden, residual):
        residual = hidden if residual is None else hidden + residual
        return torch.tanh(residual @ self.weight), residual


def stage(first: int, last: int) -> nn.Module:
    """A model that holds blocks first..last-1 of six."""
    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList(
        [Block(i) if first <= i < last else PPMissingLayer() for i in range(LAYERS)]
    )
    return model


class Worker:
    """What a worker does with its part, step by step."""

    def __init__(self, first: int, last: int) -> None:
        found = locate_blocks(stage(first, last), CONFIG)
        assert (found.total, sorted(found.local)) == (LAYERS, list(range(first, last)))
        self.blocks = found.local
        self.plane = Plane(found.local, HIDDEN, torch.float32)
        self.plane.forms = dict.fromkeys(found.local, "SUM")
        for layer, block in found.local.items():
            wrap(block, layer, self.plane, compiled=False)

    def run(self, hidden, residual, counts, positions):
        self.plane.begin(["a", "b"], np.array(counts), np.array(positions))
        for layer in sorted(self.blocks):
            hidden, residual = self.blocks[layer](hidden, residual)
        self.plane.end()
        return hidden, residual


@torch.inference_mode()
def answer(workers: list[Worker]) -> list[torch.Tensor]:
    """A prefill of two requests and three steps, of which the first one is patched."""
    patch = make_patch(
        [
            {"layer": 0, "vector": "v0"},
            {"layer": 2, "vector": "v2", "site": "prompt"},
            {"layer": 3, "vector": "v3", "site": "continuation"},
            {"layer": 5, "vector": "v0", "coefficient": -2.0},
        ],
        hidden=HIDDEN,
        layers=LAYERS,
    )
    patches = resolve({"p": {"strength": 1, "schedule": {"0": 1, "2": 0.5}}}, {"p": ActivePatch(patch)})
    for worker in workers:
        worker.plane.table.admit("a", patches, PROMPT)
    generator = torch.Generator().manual_seed(99)
    outputs = []
    for counts, positions in (([3, 2], [0, 1, 2, 0, 1]), *(([1, 1], [3 + i, 2 + i]) for i in range(3))):
        hidden, residual = torch.randn(sum(counts), HIDDEN, generator=generator), None
        for worker in workers:
            hidden, residual = worker.run(hidden, residual, counts, positions)
        outputs.append(hidden + residual)
    return outputs


@pytest.mark.parametrize("cut", [1, 2, 3, 5])
def test_stages_add_together_what_one_worker_adds(cut):
    whole = answer([Worker(0, LAYERS)])
    stages = [Worker(0, cut), Worker(cut, LAYERS)]
    for one, other in zip(whole, answer(stages), strict=True):
        assert torch.equal(one, other)
    for worker in stages:
        assert worker.plane.counters["blocks_missed"] == 0
        assert worker.plane.counters["blocks_edited"] > 0
    vectors = [worker.plane.table.live_vectors for worker in stages]
    assert max(vectors) <= 3  # each holds only what its own blocks need
    for worker in stages:
        worker.plane.table.release("a")
        assert worker.plane.table.live_vectors == 0
