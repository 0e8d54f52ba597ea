"""Which engines are there. Answers without importing any of them."""

from __future__ import annotations

import importlib
import importlib.util
import platform
from dataclasses import dataclass
from typing import Any

from brainpatch.errors import BackendNotAvailable
from brainpatch.runtime.backend import BrainPatchBackend
from brainpatch.runtime.capabilities import Capabilities

ENGINES: dict[str, str] = {
    "transformers": "brainpatch.backends.transformers_backend",
    "llamacpp": "brainpatch.backends.llamacpp_backend",
    "vllm": "brainpatch.backends.vllm_backend",
    "mlx": "brainpatch.backends.mlx_backend",
}
"""Engine name -> module that exposes its class as BACKEND, in the order in which "auto" tries them."""

ALIASES: dict[str, str] = {
    "hf": "transformers",
    "torch": "transformers",
    "pytorch": "transformers",
    "llama.cpp": "llamacpp",
    "llama_cpp": "llamacpp",
    "gguf": "llamacpp",
    "mlx-lm": "mlx",
    "mlx_lm": "mlx",
}


@dataclass(frozen=True)
class BackendStatus:
    """Whether one engine can be used here, and why not."""

    name: str
    available: bool
    detail: str
    capabilities: Capabilities | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values under the keys backend, available, detail, capabilities."""
        return {
            "backend": self.name,
            "available": self.available,
            "detail": self.detail,
            "capabilities": self.capabilities.to_dict() if self.capabilities else None,
        }


def backend_class(name: str) -> type[BrainPatchBackend]:
    """The class of an engine by name or alias. BackendNotAvailable (BP501) when there is none."""
    engine = ALIASES.get(name.lower(), name.lower())
    if engine not in ENGINES:
        raise BackendNotAvailable(
            "BP501", f"there is no engine called {name!r}", f"Known engines: {', '.join(ENGINES)}."
        )
    if importlib.util.find_spec(ENGINES[engine]) is None:
        raise BackendNotAvailable("BP501", f"this release does not contain the {engine} engine yet")
    found: type[BrainPatchBackend] = importlib.import_module(ENGINES[engine]).BACKEND
    return found


def available_backends() -> list[BackendStatus]:
    """The state of every engine, in the order in which "auto" tries them. Never raises."""
    return [_status(name) for name in ENGINES]


def _status(name: str) -> BackendStatus:
    try:
        found = backend_class(name)
    except BackendNotAvailable as error:
        return BackendStatus(name, False, error.reason)
    try:
        available, detail = found.is_available()
        return BackendStatus(name, available, detail, found.capabilities())
    except Exception as error:  # an engine may be broken in any way; the list must come
        return BackendStatus(name, False, f"{type(error).__name__}: {error}")


def engine_of(model: Any, preferred: str = "auto") -> str:
    """The engine to ask for: what is preferred, and for "auto" that of the model's kind of file, if it has one."""
    return "llamacpp" if preferred == "auto" and str(model).lower().endswith(".gguf") else preferred


def select_backend(preferred: str = "auto") -> BrainPatchBackend:
    """A new backend: the named engine, or for "auto" the first available one; never a substitute."""
    if preferred != "auto":
        found = backend_class(preferred)
        available, detail = found.is_available()
        if not available:
            raise BackendNotAvailable("BP501", f"{preferred}: {detail}")
        return found()
    states = available_backends()
    for state in states:
        if state.available:
            return backend_class(state.name)()
    found_out = "; ".join(f"{state.name}: {state.detail}" for state in states)
    raise BackendNotAvailable("BP501", f"no engine is available ({found_out})",
                              "pip install 'brainpatch[transformers]' is the shortest way to one.")  # fmt: skip


def environment_report() -> dict[str, Any]:
    """What `brainpatch doctor` shows, as plain values."""
    from brainpatch import __version__
    from brainpatch.patch.registry import default_registry, registry_home

    machine = platform.machine()
    return {
        "brainpatch_version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": machine,
        "is_apple_silicon": platform.system() == "Darwin" and machine == "arm64",
        "registry_home": str(registry_home()),
        "installed_patches": [patch.name for patch in default_registry().list_patches()],
        "backends": [state.to_dict() for state in available_backends()],
    }
