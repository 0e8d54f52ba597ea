"""The control vector of llama.cpp, a GGUF file. Written, not read."""

from __future__ import annotations

import shlex
from pathlib import Path

from brainpatch.convert.form import Format, Written
from brainpatch.patch.control_vector import SUFFIX, control_vector
from brainpatch.patch.file import LoadedPatch


def _recognise(path: Path, head: bytes) -> bool:
    return head.startswith(b"GGUF")


def _write(patch: LoadedPatch, output: Path, strength: float | None, overwrite: bool) -> Written:
    import numpy as np

    vector = control_vector(patch, patch.manifest.default_strength if strength is None else strength)
    path = vector.save(output, overwrite=overwrite)
    arguments = server_arguments(path, patch.manifest.base_model.num_layers)
    norms = {block: float(np.linalg.norm(each)) for block, each in vector.directions.items()}
    lines = [f"block {block}: direction.{block}, norm {norm:.4g}" for block, norm in norms.items()]
    lines.append(
        f"strength {vector.strength:g} is in it: at the scale 1.0 llama.cpp adds what the patch adds"
    )
    if "," in str(path):
        lines.append("llama-server takes no path with a comma: rename it first")
    lines.append(f"llama-server -m MODEL.gguf {shlex.join(arguments)}")
    facts = {
        "format": FORMAT.name,
        "strength": vector.strength,
        "scale": 1.0,
        "layers": [{"layer": block, "tensor": f"direction.{block}", "norm": norms[block]} for block in norms],
        "arguments": arguments,
    }
    return Written(path, lines, facts)


def server_arguments(path: Path, num_layers: int) -> list[str]:
    """What llama-server is given to add the control vector at `path`, in a model of `num_layers` blocks."""
    # It splits FILE:SCALE at every colon, so a path with one goes in without a scale, which is 1.0 then.
    named = (
        ["--control-vector", str(path)] if ":" in str(path) else ["--control-vector-scaled", f"{path}:1.0"]
    )
    return [*named, "--control-vector-layer-range", "1", str(num_layers - 1)]


FORMAT = Format("llama.cpp", SUFFIX, _recognise, write=_write)
