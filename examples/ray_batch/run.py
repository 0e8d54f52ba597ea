#!/usr/bin/env python3
"""Many prompts, each with its own patches, over several vLLM engines on a Ray cluster.

    python examples/ray_batch/run.py MODEL PATCH.brainpatch... --prompts prompts.jsonl --out answers --replicas 2

`prompts.jsonl` has an object a line: {"prompt": "Tell me about the sea.", "patches": "{\"cheerful\": 0.8}"}.
The patches are JSON text, since a column of mappings would give every row the names of all. Needs `ray[data]`.
"""

from __future__ import annotations

import argparse

import ray

from brainpatch import GenerationConfig
from brainpatch.backends.ray_data import generate


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="hub id or folder; on a cluster, one that every node can read")
    parser.add_argument("patch", nargs="+", help="patch files")
    parser.add_argument(
        "--model-id", help="the name that the patches know the model by, where it is a folder"
    )
    parser.add_argument("--prompts", required=True, help="JSON lines")
    parser.add_argument("--out", required=True, help="folder for JSON lines")
    parser.add_argument("--replicas", type=int, default=1, help="engines (default: 1)")
    parser.add_argument("--cpus", type=float, default=1, help="CPU cores of a replica (default: 1)")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of a replica (default: none)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer at most (default: 64)")
    options = parser.parse_args()
    answers = generate(
        ray.data.read_json(options.prompts, lines=True),
        options.model,
        options.patch,
        replicas=options.replicas,
        config=GenerationConfig(max_new_tokens=options.tokens),
        load={"model_id": options.model_id},
        num_cpus=options.cpus,
        num_gpus=options.gpus,
    )
    answers.write_json(options.out)
    print(f"answers are in {options.out}")


if __name__ == "__main__":
    main()
