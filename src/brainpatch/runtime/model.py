"""The object that most people use: a model with patches on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brainpatch.patch.file import LoadedPatch, load_patch
from brainpatch.patch.schedule import StrengthSchedule
from brainpatch.runtime.backend import BrainPatchBackend, Patches
from brainpatch.runtime.capabilities import Capabilities
from brainpatch.runtime.config import GenerationConfig
from brainpatch.runtime.discovery import engine_of, select_backend
from brainpatch.runtime.requests import Generation, Prompt, TraceRow

if TYPE_CHECKING:
    from brainpatch.patch.registry import PatchRegistry


class BrainPatchedModel:
    """A frozen model on an engine, and the patches installed on it."""

    def __init__(self, backend: BrainPatchBackend, registry: PatchRegistry | None = None) -> None:
        self.backend = backend
        self._registry = registry

    @classmethod
    def from_pretrained(
        cls,
        model: Any,
        *,
        backend: str = "auto",
        device: str = "auto",
        dtype: str = "auto",
        revision: str | None = None,
        registry: PatchRegistry | None = None,
        compatibility_mode: str = "strict",
        **engine_arguments: Any,
    ) -> BrainPatchedModel:
        """Load `model` (hub id or folder) on an engine.

        `backend`: auto (llama.cpp for a GGUF), transformers, vllm, ... ; `compatibility_mode`: strict, architecture or
        unsafe.
        Other arguments go to the engine's `load_model`. Errors: BackendNotAvailable, EngineError.
        """
        engine = select_backend(engine_of(model, backend))
        if device != "auto":
            engine_arguments["device"] = device
        engine.compatibility_mode = compatibility_mode
        engine.load_model(model, revision=revision, dtype=dtype, **engine_arguments)
        return cls(engine, registry)

    @property
    def compatibility_mode(self) -> str:
        """How strictly a patch must fit the model; `install` takes another for one patch."""
        return self.backend.compatibility_mode

    @compatibility_mode.setter
    def compatibility_mode(self, mode: str) -> None:
        self.backend.compatibility_mode = mode

    @property
    def registry(self) -> PatchRegistry:
        """Where names of installed patches are looked up."""
        if self._registry is None:
            from brainpatch.patch.registry import default_registry

            self._registry = default_registry()
        return self._registry

    # --- patches -----------------------------------------------------------------------------

    def install(
        self,
        ref: str | Path | LoadedPatch,
        *,
        strength: float | None = None,
        compatibility_mode: str | None = None,
        enabled: bool = True,
    ) -> PatchHandle:
        """Put a patch on the model: an installed name, a path, `owner/repo[:file]`, or a loaded patch.

        `enabled=False` makes it available to requests that name it without switching it on.
        """
        patch = ref if isinstance(ref, LoadedPatch) else self._find(ref)
        self.backend.install_patch(patch, strength=strength, mode=compatibility_mode, enabled=enabled)
        return PatchHandle(self, patch.name)

    def _find(self, ref: str | Path) -> LoadedPatch:
        if isinstance(ref, Path):
            return load_patch(ref)
        path = self.registry.find(ref)
        return self._from_hub(ref) if path is None else load_patch(path)

    def _from_hub(self, ref: str) -> LoadedPatch:
        """A hub's patch: the one that was fetched before, or fetched and put into the registry now."""
        repo, _, file = ref.partition(":")
        for installed in self.registry.list_patches():
            source = installed.source
            if source.get("repo") == repo and file in ("", source.get("file")):
                return installed.load()
        return self.registry.install_from_hub(ref).load()

    def patch(self, name: str) -> PatchHandle:
        """The handle of an installed patch."""
        self.backend._active(name)
        return PatchHandle(self, name)

    def remove_patch(self, name: str) -> None:
        """Take a patch off the model."""
        self.backend.remove_patch(name)

    def enable_patch(self, name: str) -> None:
        """Switch a patch on."""
        self.backend.set_enabled(name, True)

    def disable_patch(self, name: str) -> None:
        """Switch a patch off, and keep it installed."""
        self.backend.set_enabled(name, False)

    def set_patch_strength(self, name: str, strength: float) -> float:
        """Set the live strength; returns what it was clamped to."""
        return self.backend.set_strength(name, strength)

    def set_patch_schedule(self, name: str, schedule: StrengthSchedule | Mapping[Any, float] | None) -> None:
        """Set the schedule; None goes back to a constant 1.0."""
        self.backend.set_schedule(name, schedule)

    def list_patches(self) -> list[str]:
        """Names of the installed patches in install order."""
        return self.backend.list_patches()

    # --- text --------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        patches: Patches = None,
        **arguments: Any,
    ) -> str:
        """The answer to one prompt, with the installed defaults or with `patches` alone."""
        return self.backend.generate(prompt, config, **_given(patches), **arguments)

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        patches: Patches | Sequence[Patches] = None,
        **arguments: Any,
    ) -> list[str]:
        """The answers to several prompts; `config` and `patches` are one for all, or one for each."""
        return self.backend.generate_batch(prompts, config, **_given(patches), **arguments)

    def generate_detailed(
        self,
        prompts: Sequence[Prompt],
        config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        patches: Patches | Sequence[Patches] = None,
        **arguments: Any,
    ) -> list[Generation]:
        """As `generate_batch`, with token ids, log-probabilities and counts."""
        return self.backend.generate_detailed(prompts, config, **_given(patches), **arguments)

    def stream(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        patches: Patches = None,
        **arguments: Any,
    ) -> Iterator[str]:
        """Pieces of the answer as they come. Closing the iterator stops the work."""
        return self.backend.stream(prompt, config, **_given(patches), **arguments)

    def trace(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        patches: Patches = None,
        **arguments: Any,
    ) -> list[TraceRow]:
        """What was really added: rows of (layer, position, norm, expected)."""
        return self.backend.trace(prompt, config, patches=patches, **arguments)

    def compare(
        self, prompt: Prompt, config: GenerationConfig | None = None, **arguments: Any
    ) -> dict[str, str]:
        """The answer without any patch and with all installed ones on, same settings.

        Returns {"baseline": ..., "patched": ...}. States are as before afterwards.
        """
        names = self.list_patches()
        if self.backend.capabilities().per_request_strength:
            every: dict[str, Any] = {name: {} for name in names}
            baseline, patched = self.backend.generate_batch(
                [prompt, prompt], config, patches=[{}, every], **arguments
            )
            return {"baseline": baseline, "patched": patched}
        before = {name: self.backend.patches[name].enabled for name in names}
        answers = {}
        try:
            for arm, enabled in (("baseline", False), ("patched", True)):
                for name in names:
                    self.backend.set_enabled(name, enabled)
                answers[arm] = self.backend.generate(prompt, config, **arguments)
        finally:
            for name, enabled in before.items():
                self.backend.set_enabled(name, enabled)
        return answers

    # --- about -------------------------------------------------------------------------------

    def capabilities(self) -> Capabilities:
        """What the engine can do."""
        return self.backend.capabilities()

    def describe(self) -> dict[str, Any]:
        """Backend, model and installed patches as plain values."""
        model = self.backend.describe_model()
        return {
            "backend": self.backend.name,
            "model": model.model_id,
            "architecture": model.architecture,
            "hidden_size": model.hidden_size,
            "num_layers": model.num_layers,
            "revision": model.revision,
            "compatibility_mode": self.compatibility_mode,
            "patches": [PatchHandle(self, name).describe() for name in self.list_patches()],
        }

    def unload(self) -> None:
        """Free the model."""
        self.backend.unload()

    def __enter__(self) -> BrainPatchedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.unload()


def _given(patches: Any) -> dict[str, Any]:
    """`patches` as a keyword only when it was given, so that engines of the published API fit too."""
    return {} if patches is None else {"patches": patches}


class PatchHandle:
    """A dial on one installed patch; changes reach requests admitted from then on."""

    def __init__(self, model: BrainPatchedModel, name: str) -> None:
        self._model = model
        self.name = name

    @property
    def strength(self) -> float:
        """The live multiplier."""
        return self._model.backend._active(self.name).strength

    @strength.setter
    def strength(self, value: float) -> None:
        self._model.set_patch_strength(self.name, value)

    @property
    def enabled(self) -> bool:
        """Whether requests that name no patches get this one."""
        return self._model.backend._active(self.name).enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._model.backend.set_enabled(self.name, value)

    @property
    def schedule(self) -> StrengthSchedule | None:
        """The multiplier by generated-token index, or None for a constant 1.0."""
        return self._model.backend._active(self.name).schedule

    @schedule.setter
    def schedule(self, value: StrengthSchedule | Mapping[Any, float] | None) -> None:
        self._model.set_patch_schedule(self.name, value)

    @property
    def manifest(self) -> Any:
        """The patch's manifest."""
        return self._model.backend._active(self.name).manifest

    @property
    def evidence_level(self) -> str:
        """The evidence level that the file states."""
        level: str = self.manifest.evidence_level
        return level

    def describe(self) -> dict[str, Any]:
        """Plain values: name, strength, enabled, evidence_level, layers, scheduled."""
        return {
            "name": self.name,
            "strength": self.strength,
            "enabled": self.enabled,
            "evidence_level": self.evidence_level,
            "layers": list(self.manifest.layers),
            "scheduled": self.schedule is not None,
        }

    def __repr__(self) -> str:
        return f"PatchHandle({self.name!r}, strength={self.strength:g}, enabled={self.enabled})"
