#!/usr/bin/env python3
"""Learn a direction from contrasting answers, pack it, and watch it act on two engines.

Usage: demo.py MODEL_FOLDER
"""

from __future__ import annotations

import sys
import tempfile
import textwrap
import time
from pathlib import Path

from brainpatch import BrainPatchedModel, GenerationConfig
from brainpatch.learn.contrast import learn_patch, read_pairs

HERE = Path(__file__).parent
MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PROMPTS = ["Tell me about the sea.", "How was your day?"]
STRENGTHS = [-1.0, -0.5, 0.5, 1.0]
LAYER = 15
COEFFICIENT = 2.0


def show(model: BrainPatchedModel, patch: str) -> None:
    """Baseline beside patched text at several strengths, and what was measured on the way."""
    config = GenerationConfig(max_new_tokens=32)
    for prompt in PROMPTS:
        arms = [{}] + [{patch: strength} for strength in STRENGTHS]
        answers = model.generate_batch([prompt] * len(arms), config, patches=arms)
        print(f"\n  prompt: {prompt}")
        for arm, answer in zip(arms, answers, strict=True):
            label = f"strength {arm[patch]:+.1f}" if arm else "baseline"
            text = textwrap.shorten(" ".join(answer.split()), 140, placeholder=" ...")
            print(f"    {label:>13} | {text}")
    rows = model.trace(PROMPTS[0], GenerationConfig(max_new_tokens=8), patches={patch: 1.0})
    worst = max(abs(row.norm / row.expected - 1) for row in rows)
    print(
        f"\n  measured: {len(rows)} positions at block {rows[0].layer}, norm added {rows[0].norm:.3f}, "
        f"expected {rows[0].expected:.3f}, largest relative difference {worst:.1e}"
    )


def main() -> None:
    """Learn, pack, and show."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder, started = sys.argv[1], time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "cheerful.brainpatch"
        for engine in ("transformers", "vllm"):
            print(f"\n== {engine} ==", flush=True)
            with BrainPatchedModel.from_pretrained(
                folder, backend=engine, dtype="float32", model_id=MODEL_ID
            ) as model:
                if engine == "transformers":
                    pairs = read_pairs(HERE / "pairs.jsonl")
                    learned = learn_patch(
                        model.backend, pairs, "cheerful", file, layers=[LAYER], coefficient=COEFFICIENT
                    )
                    print(
                        f"  learned from {len(pairs.items)} pairs at block {LAYER}: direction norm "
                        f"{learned.direction_norms[0]:.1f}, stream norm {learned.stream_norms[0]:.1f}; "
                        f"{file.name} has {file.stat().st_size} bytes"
                    )
                model.install(file, enabled=False)
                show(model, "cheerful")
    print(f"\n{time.monotonic() - started:.0f} s. The same file, the same words, on both engines.")


if __name__ == "__main__":
    main()
