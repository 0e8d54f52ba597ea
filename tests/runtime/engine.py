"""An engine made for tests: it keeps the contract and answers with what it was asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from brainpatch.patch.compatibility import ModelDescriptor
from brainpatch.runtime.backend import BrainPatchBackend
from brainpatch.runtime.capabilities import Capabilities
from brainpatch.runtime.config import GenerationConfig
from brainpatch.runtime.meaning import ResolvedSet
from brainpatch.runtime.requests import Generation, Request, TraceRow


class RecordingBackend(BrainPatchBackend):
    """No model: the text of an answer is its patches, and all requests are kept in `seen`."""

    name = "recording"

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Request] = []
        self.changes = 0
        self.frozen = False
        self.encoded: list[dict[str, Any]] = []
        self.checked: list[Any] = []

    @classmethod
    def is_available(cls) -> tuple[bool, str]:
        return True, "made for tests"

    @classmethod
    def capabilities(cls) -> Capabilities:
        return Capabilities(
            "recording",
            static_intervention=True,
            dynamic_schedule=True,
            streaming=True,
            per_request_strength=True,
            trace=True,
        )

    def load_model(self, model: Any, **arguments: Any) -> None:
        self.arguments = {"model": model, **arguments}

    def describe_model(self) -> ModelDescriptor:
        return ModelDescriptor("test/model", 4, 4, "Test")

    def _encode(self, prompt: Any, *, use_chat_template: bool, system: str | None) -> list[int]:
        self.encoded.append({"prompt": prompt, "use_chat_template": use_chat_template, "system": system})
        return [len(prompt)]

    def _check_config(self, config: GenerationConfig) -> None:
        self.checked.append(config)

    def _check_patches(self, patches: ResolvedSet) -> None:
        self.checked.append(patches.to_mapping())

    def _run_trace(self, request: Request) -> list[TraceRow]:
        self.seen.append(request)
        return []

    def _before_patches_change(self) -> None:
        if self.frozen:
            raise RuntimeError("frozen")

    def _on_patches_changed(self) -> None:
        self.changes += 1

    def _run(self, requests: Sequence[Request]) -> list[Generation]:
        self.seen += requests
        return [
            Generation(
                text=repr(r.patches.to_mapping()),
                token_ids=[],
                logprobs=None,
                finish_reason="stop",
                prompt_tokens=len(r.prompt_ids),
                patches=r.patches.to_mapping(),
                digest=r.patches.digest,
            )
            for r in requests
        ]
