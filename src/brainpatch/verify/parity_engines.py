"""How each engine is loaded to be compared: float32, nothing approximate."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from brainpatch.runtime.backend import BrainPatchBackend
from brainpatch.runtime.discovery import available_backends, backend_class
from brainpatch.verify.parity import Contender

COMPILED = "vllm compiled"

_EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    "transformers": ("transformers", {"dtype": "float32"}),
    "vllm": ("vllm", {"dtype": "float32", "max_logprobs": -1, "max_model_len": 1024, "enforce_eager": True}),
    COMPILED: (
        "vllm",
        {"dtype": "float32", "max_logprobs": -1, "max_model_len": 1024, "enforce_eager": False},
    ),
    # Flash attention on a CPU goes through float16.
    "llamacpp": ("llamacpp", {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attn": False}),
    "mlx": ("mlx", {"dtype": "float32"}),
}
"""Name -> engine, and what its `load_model` is given."""

NAMES = tuple(_EXACT)


def contenders(
    model: str, gguf: str | None, wanted: Collection[str] = ()
) -> tuple[dict[str, Contender], dict[str, str]]:
    """The engines that can be compared here, and of the others why not.

    `model` is a folder or hub id, `gguf` the same weights for llama.cpp. `wanted` names some of NAMES; without it, all
    that are installed but the compiled vLLM, which takes minutes to start.
    """
    there = {state.name: state for state in available_backends()}
    chosen: dict[str, Contender] = {}
    left_out: dict[str, str] = {}
    for name in wanted or [name for name in NAMES if name != COMPILED]:
        engine, arguments = _EXACT[name]
        if not there[engine].available:
            left_out[name] = there[engine].detail
        elif engine == "llamacpp" and gguf is None:
            left_out[name] = "it needs the same weights as a GGUF in F32: give --gguf FILE"
        else:
            chosen[name] = _contender(engine, gguf if engine == "llamacpp" else model, arguments)
    return chosen, left_out


def _contender(engine: str, model: Any, arguments: dict[str, Any]) -> Contender:
    kind = backend_class(engine)

    def load() -> BrainPatchBackend:
        backend = kind()
        backend.load_model(model, model_id="parity", **arguments)
        return backend

    return Contender(kind, load)
