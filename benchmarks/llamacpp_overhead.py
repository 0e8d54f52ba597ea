#!/usr/bin/env python3
"""What patches cost in llama.cpp: tokens a second with them beside llama.cpp without our callback, as ratios.

Both are in one process, and one at a time works: rounds go through all arms, and which is first changes. Every arm
generates TOKENS tokens for each of BATCH equal prompts, greedily. A ratio is speed: below 1 is slower than plain.

    python benchmarks/llamacpp_overhead.py --gguf model-f32.gguf --json llamacpp.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from brainpatch.backends.llamacpp_backend import LlamaCppBackend
from brainpatch.patch import BaseModelSpec, Intervention, LoadedPatch, Manifest
from brainpatch.patch.tensors import vector
from brainpatch.runtime.config import GenerationConfig

MODEL_ID = "benchmark"
PROMPT = "Tell me about the sea."


def patch(name: str, layers: list[int], hidden: int, count: int) -> LoadedPatch:
    """Random directions at some blocks."""
    random = np.random.default_rng(len(layers))
    vectors = {f"v{layer}": vector((0.1 * random.standard_normal(hidden)).tolist()) for layer in layers}
    items = [Intervention(layer, f"v{layer}") for layer in layers]
    return LoadedPatch(Manifest(name, BaseModelSpec(MODEL_ID, "", hidden, count), items), vectors)


def loaded(gguf: Path, editing: str) -> LlamaCppBackend:
    """A backend with both patches."""
    backend = LlamaCppBackend()
    backend.load_model(gguf, model_id=MODEL_ID, editing=editing, n_ctx=4096)
    shape = backend.describe_model()
    for name, layers in (("one", [shape.num_layers // 2]), ("all", list(range(1, shape.num_layers)))):
        backend.install_patch(patch(name, layers, shape.hidden_size, shape.num_layers), enabled=False)
    return backend


def measure(backend: LlamaCppBackend, wish: dict[str, float], batch: int, tokens: int) -> float:
    """Tokens a second."""
    config = GenerationConfig(max_new_tokens=tokens, ignore_eos=True)
    started = time.perf_counter()
    answers = backend.generate_detailed([PROMPT] * batch, config, patches=wish)
    seconds = time.perf_counter() - started
    return sum(len(answer.token_ids) for answer in answers) / seconds


def main() -> None:
    """Measure, print a table, and write the numbers where they are wanted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    # With the control vector there is no callback: without patches, that is llama.cpp as it is.
    bare, ours = loaded(given.gguf, "control-vector"), loaded(given.gguf, "callback")
    arms: dict[str, tuple[LlamaCppBackend, dict[str, float]]] = {
        "plain llama.cpp": (bare, {}),
        "no patch": (ours, {}),
        "one block": (ours, {"one": 1.0}),
        "all blocks but the first": (ours, {"all": 1.0}),
        "one block, control vector": (bare, {"one": 1.0}),
        "all blocks but the first, control vector": (bare, {"all": 1.0}),
    }
    results: dict[str, Any] = {}
    for batch in (int(text) for text in given.batches.split(",")):
        speeds: dict[str, list[float]] = {name: [] for name in arms}
        for backend, wish in arms.values():
            measure(backend, wish, batch, 4)
        for number in range(given.rounds):
            names = list(arms)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                backend, wish = arms[name]
                speeds[name].append(measure(backend, wish, batch, given.tokens))
        plain = speeds["plain llama.cpp"]
        for name, found in speeds.items():
            ratios = [one / other for one, other in zip(found, plain, strict=True)]
            results[f"{name}, batch {batch}"] = {"tokens_per_second": found, "ratios": ratios}
            print(
                f"| {name} | {batch} | {statistics.median(found):.0f} | {statistics.median(ratios):.3f} "
                f"({min(ratios):.3f} to {max(ratios):.3f}) |",
                flush=True,
            )
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
