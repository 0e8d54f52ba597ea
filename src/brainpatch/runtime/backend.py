"""The contract between an engine and everything above it.

State and who owns it: `patches` belongs to the backend and is changed only under `_patches_lock`, which
is held for the change or for taking a snapshot and never over generation. A request carries its own
`ResolvedSet`, so what is installed later cannot reach it.
"""

from __future__ import annotations

import copy
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from brainpatch.errors import BrainPatchError, CapabilityError, EngineStateError, RequestError
from brainpatch.patch.compatibility import CompatibilityReport, ModelDescriptor, check_compatibility
from brainpatch.patch.file import LoadedPatch, check_patch
from brainpatch.patch.schedule import StrengthSchedule
from brainpatch.runtime.capabilities import Capabilities
from brainpatch.runtime.config import GenerationConfig
from brainpatch.runtime.meaning import (
    ActivePatch,
    ResolvedEdit,
    ResolvedSet,
    finite_strength,
    request_schedule,
    resolve,
    resolve_edits,
    unknown_patch,
)
from brainpatch.runtime.requests import Generation, Listener, Prompt, Request, Scored, TraceRow

_KNOWN_SETS = 256

Patches = Mapping[str, Any] | None
"""A request's patches: name -> strength or {"strength", "schedule"}; None means the installed defaults."""


class BrainPatchBackend(ABC):
    """An engine. Subclasses provide the abstract methods and, for text, `_encode` and `_run`."""

    name: ClassVar[str] = "abstract"
    follows: ClassVar[bool] = True
    """Whether `score` can be told which answers to follow."""

    def __init__(self) -> None:
        self.patches: dict[str, ActivePatch] = {}
        self.compatibility_mode = "strict"
        self.max_batch_size = 1
        """How many requests share one forward pass, at most."""
        self.warns_of_requests = True
        """Whether a strength of a request's that is clamped is a warning. On a server the answer says it."""
        self._patches_lock = threading.Lock()
        self._known: dict[Any, ResolvedSet] = {}
        """Sets that were asked for lately: what is computed of a set once serves its later requests, too."""

    # --- what an engine provides -------------------------------------------------------------

    @classmethod
    @abstractmethod
    def is_available(cls) -> tuple[bool, str]:
        """Whether the engine can be used here, and in words why not or which version. Never raises."""

    @classmethod
    @abstractmethod
    def capabilities(cls) -> Capabilities:
        """What the engine can do. Answers without the engine installed."""

    @abstractmethod
    def load_model(self, model: Any, **arguments: Any) -> None:
        """Load a model (hub id or folder). Errors: BackendNotAvailable, EngineError (BP503 to BP507)."""

    @abstractmethod
    def describe_model(self) -> ModelDescriptor:
        """Identity and shape of the loaded model. EngineStateError (BP407) when there is none."""

    def unload(self) -> None:
        """Free the model; the patches installed on it go with it. May be called more than once."""
        with self._patches_lock:
            self.patches.clear()
        self._known.clear()

    def _encode(self, prompt: Prompt, *, use_chat_template: bool, system: str | None) -> list[int]:
        """Token ids of a prompt, special tokens exactly once."""
        raise CapabilityError("BP502", f"{self.name} does not generate text")

    def _check_config(self, config: GenerationConfig) -> None:
        """Refuse by name, before any cost, what this engine cannot do."""

    def _context_length(self) -> int | None:
        """How many tokens prompt and answer may have together; None when there is no bound."""
        return None

    def _check_patches(self, patches: ResolvedSet) -> None:
        """Refuse by name, before any cost, a set that this engine cannot apply."""

    def _run(self, requests: Sequence[Request]) -> list[Generation]:
        """Generate all requests (each with config.n == 1), in order."""
        raise CapabilityError("BP502", f"{self.name} does not generate text")

    def run_batch(
        self, requests: Sequence[Request], listeners: Sequence[Listener] | None
    ) -> list[Generation | BrainPatchError]:
        """Generate requests for a server: each listener hears its text as it comes, and one that is cancelled ends
        early. A request that fails is an error in the list, and the others are right."""
        results: list[Generation | BrainPatchError] = []
        for number, request in enumerate(requests):
            try:
                (answer,) = self._run([request])
            except BrainPatchError as error:
                results.append(error)
            else:
                if listeners is not None:
                    listeners[number].piece(answer.text)
                results.append(answer)
        return results

    def score(
        self, requests: Sequence[Request], answers: Sequence[Sequence[int]] | None = None
    ) -> list[Scored]:
        """What the model gives to every token of the vocabulary at each step of an answer.

        `answers` are the tokens to follow, one answer for each request; None: the engine's own. CapabilityError where
        the engine cannot be made to follow. Errors otherwise: those of a request.
        """
        raise CapabilityError("BP502", f"{self.name} does not score answers")

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """What each token reads by itself."""
        raise CapabilityError("BP502", f"{self.name} does not tell what its tokens read")

    def _run_stream(self, request: Request) -> Iterator[str]:
        """Generate one request, yielding text as it comes."""
        yield self._run([request])[0].text

    def _run_trace(self, request: Request) -> list[TraceRow]:
        """Generate one request, measuring what is added."""
        raise CapabilityError("BP502", f"{self.name} does not offer trace")

    def _on_patches_changed(self) -> None:
        """Called after every change of what is installed, outside the lock."""

    def _before_patches_change(self) -> None:
        """Called before every change of what is installed; raises to refuse it."""

    # --- installed patches -------------------------------------------------------------------

    def validate_patch(self, patch: LoadedPatch, *, mode: str | None = None) -> CompatibilityReport:
        """Whether `patch` fits the loaded model; `mode` is strict, architecture or unsafe."""
        return check_compatibility(
            patch.manifest, self.describe_model(), mode=mode or self.compatibility_mode
        )

    def install_patch(
        self,
        patch: LoadedPatch,
        *,
        strength: float | None = None,
        mode: str | None = None,
        enabled: bool = True,
    ) -> ActivePatch:
        """Put a patch on the model; one of the same name is replaced and keeps its place in the order.

        `strength` None takes the manifest's default. Raises before anything changes:
        PatchFormatError, PatchCompatibilityError, RequestError (BP402), CapabilityError.
        """
        check_patch(patch)  # it may have been made in memory
        report = self.validate_patch(patch, mode=mode)
        report.raise_if_failed()
        for line in report.warnings:
            self._warn(f"{patch.name}: {line}")
        status = patch.manifest.backend_status(self.name)
        if patch.manifest.compatibility and status in ("unsupported", "implemented"):
            self._warn(f"{patch.name}: its author lists {self.name} as {status}")
        wanted = (
            patch.manifest.default_strength if strength is None else finite_strength(strength, "strength")
        )
        self._warn_if_clamped(patch, wanted)
        active = ActivePatch(patch, wanted, enabled)
        self._check_patches(resolve({patch.name: active.manifest.max_abs_strength}, {patch.name: active}))
        self._before_patches_change()
        with self._patches_lock:
            self.patches[patch.name] = active
        self._on_patches_changed()
        return active

    def remove_patch(self, name: str) -> None:
        """Take a patch off the model. UnknownPatchError (BP401) when it is not installed."""
        self._active(name)
        self._before_patches_change()
        with self._patches_lock:
            self.patches.pop(name, None)
        self._on_patches_changed()

    def change_patch(self, name: str, **changes: Any) -> ActivePatch:
        """Several changes at once: some of `strength`, `enabled`, `schedule`. A request sees all of them or none.

        Errors: those of the three setters, before anything changes; RequestError (BP403) for no or other keys.
        """
        unknown = sorted(set(changes) - {"strength", "enabled", "schedule"})
        if unknown or not changes:
            what = f"the unknown key {unknown[0]!r}" if unknown else "nothing"
            raise RequestError("BP403", f"the change has {what}", "Give some of strength, enabled, schedule.")
        if not isinstance(changes.get("enabled", True), bool):
            raise RequestError("BP403", "enabled is not true or false")
        active = self._active(name)
        changed = copy.copy(active)
        if "strength" in changes:
            changed.strength = active.manifest.clamp_strength(
                finite_strength(changes["strength"], "strength")
            )
        if "schedule" in changes:
            given = changes["schedule"]
            if given is not None:
                self.capabilities().require("dynamic_schedule")
            changed.schedule = None if given is None else request_schedule(given, "schedule")
        changed.enabled = changes.get("enabled", active.enabled)
        self._before_patches_change()
        with self._patches_lock:
            if name not in self.patches:
                raise unknown_patch(name, self.patches)
            self.patches[name] = changed
        self._on_patches_changed()
        return changed

    def set_enabled(self, name: str, enabled: bool) -> None:
        """Switch an installed patch on or off for requests that name no patches."""
        active = self._active(name)
        self._before_patches_change()
        active.enabled = bool(enabled)
        self._on_patches_changed()

    def set_strength(self, name: str, strength: float) -> float:
        """Set the live strength; returns what it was clamped to."""
        active = self._active(name)
        wanted = finite_strength(strength, "strength")
        self._before_patches_change()
        self._warn_if_clamped(active.patch, wanted)
        active.strength = active.manifest.clamp_strength(wanted)
        self._on_patches_changed()
        return active.strength

    def set_schedule(self, name: str, schedule: StrengthSchedule | Mapping[Any, float] | None) -> None:
        """Set the schedule; None goes back to a constant 1.0."""
        self.capabilities().require("dynamic_schedule")
        active = self._active(name)
        wanted = None if schedule is None else request_schedule(schedule, "schedule")
        self._before_patches_change()
        active.schedule = wanted
        self._on_patches_changed()

    def list_patches(self) -> list[str]:
        """Names of the installed patches in install order."""
        return list(self.installed())

    def resolve_edits(
        self, token_index: int = 0, layer: int | None = None, *, is_prompt_pass: bool | None = None
    ) -> list[ResolvedEdit]:
        """The installed defaults as edits at one generated-token index; see `meaning.resolve_edits`."""
        return resolve_edits(self.installed().values(), token_index, layer, is_prompt_pass=is_prompt_pass)

    def active_layers(self) -> list[int]:
        """The blocks that the installed defaults edit at token index 0, ascending."""
        return sorted({edit.layer for edit in self.resolve_edits(0)})

    def vector_values(self, patch_name: str, key: str) -> list[float]:
        """A vector of an installed patch as Python floats."""
        return [float(value) for value in self._active(patch_name).patch.vector_for(key).data]

    def installed(self) -> dict[str, ActivePatch]:
        """What is installed now, by name in install order; later changes of the list do not reach it."""
        with self._patches_lock:
            return dict(self.patches)

    def _active(self, name: str) -> ActivePatch:
        installed = self.installed()
        if name not in installed:
            raise unknown_patch(name, installed)
        return installed[name]

    def _warn_if_clamped(self, patch: LoadedPatch, wanted: float) -> None:
        clamped = patch.manifest.clamp_strength(wanted)
        if clamped != wanted:
            self._warn(f"{patch.name}: strength {wanted:g} is beyond the patch's bound, {clamped:g} is used")

    def _warn(self, message: str) -> None:
        warnings.warn(f"[brainpatch:{self.name}] {message}", stacklevel=3)

    # --- text --------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        patches: Patches = None,
        use_chat_template: bool = True,
        system: str | None = None,
    ) -> str:
        """The answer to one prompt. `patches`: see `Patches`. Errors: RequestError, CapabilityError."""
        return self.generate_batch(
            [prompt], config, patches=patches, use_chat_template=use_chat_template, system=system
        )[0]

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        patches: Patches | Sequence[Patches] = None,
        use_chat_template: bool = True,
        system: str | None = None,
    ) -> list[str]:
        """The answers to several prompts; `config` and `patches` are one for all, or one for each."""
        for one in _one_each(config, len(prompts), "config"):
            if one is not None and one.n != 1:
                raise RequestError("BP404", f"n is {one.n}, and this call returns one text a prompt",
                                   "Call generate_detailed, which returns n answers a prompt.")  # fmt: skip
        answers = self.generate_detailed(
            prompts, config, patches=patches, use_chat_template=use_chat_template, system=system
        )
        return [answer.text for answer in answers]

    def generate_detailed(
        self,
        prompts: Sequence[Prompt],
        config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        patches: Patches | Sequence[Patches] = None,
        use_chat_template: bool = True,
        system: str | None = None,
    ) -> list[Generation]:
        """As `generate_batch`, with token ids, log-probabilities and counts.

        A prompt with config.n > 1 has n entries in the list, one after another.
        """
        if isinstance(prompts, (str, bytes, Mapping)):
            raise RequestError("BP405", "prompts is one prompt, not a list of prompts", "Write [prompt].")
        requests = self._requests(prompts, config, patches, use_chat_template, system)
        return self._run(requests) if requests else []

    def stream(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        patches: Patches = None,
        use_chat_template: bool = True,
        system: str | None = None,
    ) -> Iterator[str]:
        """Pieces of the answer as they come. Closing the iterator stops the work.

        The request is checked at once, not at the first piece.
        """
        self.capabilities().require("streaming")
        return self._run_stream(
            self._request(prompt, config, patches, use_chat_template, system, "a stream carries one answer")
        )

    def trace(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        patches: Patches = None,
        use_chat_template: bool = True,
        system: str | None = None,
    ) -> list[TraceRow]:
        """What was really added while answering, by layer and position (law 5)."""
        self.capabilities().require("trace")
        return self._run_trace(
            self._request(prompt, config, patches, use_chat_template, system, "a trace follows one answer")
        )

    def _request(
        self,
        prompt: Prompt,
        config: GenerationConfig | None,
        patches: Patches,
        use_chat_template: bool,
        system: str | None,
        why_one: str,
    ) -> Request:
        """The request of a call that has one answer."""
        requests = self._requests([prompt], config, patches, use_chat_template, system)
        if len(requests) != 1:
            raise RequestError("BP404", f"{why_one}; n must be 1")
        return requests[0]

    def requests(
        self,
        prompts: Sequence[Prompt],
        config: GenerationConfig,
        *,
        patches: Patches = None,
        use_chat_template: bool = True,
    ) -> list[Request]:
        """The checked requests of a call, for `run_batch`: config.n a prompt, one after another."""
        return self._requests(prompts, config, patches, use_chat_template, None)

    def _requests(
        self,
        prompts: Sequence[Prompt],
        config: GenerationConfig | Sequence[GenerationConfig] | None,
        patches: Patches | Sequence[Patches],
        use_chat_template: bool,
        system: str | None,
    ) -> list[Request]:
        """Check everything and take the snapshot that the requests keep."""
        self.describe_model()
        installed = self.installed()
        resolved: dict[int, ResolvedSet] = {}
        requests = []
        for prompt, one, wish in zip(
            prompts,
            _one_each(config, len(prompts), "config"),
            _one_each(patches, len(prompts), "patches"),
            strict=True,
        ):
            settings = one or GenerationConfig()
            settings.validate()
            self._check_config(settings)
            if id(wish) not in resolved:
                resolved[id(wish)] = self._resolve(wish, installed)
            ids = tuple(self._encode(prompt, use_chat_template=use_chat_template, system=system))
            requests += [Request(ids, single, resolved[id(wish)]) for single in _singles(settings)]
        self._check_length(requests)
        return requests

    def _resolve(self, patches: Patches, installed: Mapping[str, ActivePatch]) -> ResolvedSet:
        """What a request's `patches` mean on this engine, which may refuse it."""
        self.describe_model()
        resolved = resolve(patches, installed, warn=self._warn if self.warns_of_requests else _silent)
        self._check_patches(resolved)
        key = tuple((one.name, one.strength, one.schedule, id(one.interventions)) for one in resolved.patches)
        if key not in self._known and len(self._known) >= _KNOWN_SETS:
            self._known.clear()
        # An entry holds its interventions, so that their id is theirs alone for as long as it is there.
        return self._known.setdefault(key, resolved)

    def resolve_patches(self, patches: Patches = None) -> ResolvedSet:
        """What a request's `patches` mean now; a request keeps that, whatever is changed later.

        Errors: UnknownPatchError, RequestError, and CapabilityError for what this engine cannot apply.
        """
        return self._resolve(patches, self.installed())

    def _check_length(self, requests: Sequence[Request]) -> None:
        context = self._context_length()
        for request in requests:
            length, new = len(request.prompt_ids), request.config.max_new_tokens
            if context is not None and length + new > context:
                raise RequestError(
                    "BP406", f"{length} prompt tokens and {new} new ones do not fit into {context}"
                )

    # --- lifetime ----------------------------------------------------------------------------

    def _nothing_loaded(self) -> EngineStateError:
        return EngineStateError("BP407", f"the {self.name} backend has no model")

    def __enter__(self) -> BrainPatchBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.unload()


def _one_each(value: Any, count: int, what: str) -> list[Any]:
    """`value` for each of `count` prompts: a list stands for itself, anything else is repeated."""
    if isinstance(value, (list, tuple)):
        if len(value) != count:
            raise RequestError("BP403" if what == "patches" else "BP404",
                               f"{what} has {len(value)} entries for {count} prompts")  # fmt: skip
        return list(value)
    return [value] * count


def _singles(config: GenerationConfig) -> list[GenerationConfig]:
    """A config with n answers as n configs with one, each with its own seed."""
    if config.n == 1:
        return [config]
    return [
        replace(config, n=1, seed=None if config.seed is None else config.seed + i) for i in range(config.n)
    ]


def _silent(_: str) -> None:
    """No warning."""
