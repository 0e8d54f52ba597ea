"""Patches on a Transformers model: real batches in which each row has its own patches.

State and who owns it: a loaded model is shared and never changed; what a call needs (edits, sampling state)
belongs to that call and its thread. So calls from several threads may run at once.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

from brainpatch.backends.answers import Answer
from brainpatch.backends.batch_backend import BatchBackend, run_batches, shared_batches
from brainpatch.backends.prompts import prompt_ids
from brainpatch.backends.transformers_edits import Edits, Row
from brainpatch.backends.transformers_loading import Loaded, load, refuse_compiled
from brainpatch.errors import BrainPatchError, EngineError, RequestError
from brainpatch.patch.compatibility import ModelDescriptor
from brainpatch.runtime.backend import Patches
from brainpatch.runtime.capabilities import Capabilities
from brainpatch.runtime.config import GenerationConfig
from brainpatch.runtime.requests import Generation, Listener, Prompt, Request, TraceRow

_EXTRA = {"use_cache": (True, False), "cache_implementation": ("dynamic", "static")}
"""What `GenerationConfig.extra` may say here, and with which values."""


class TransformersBackend(BatchBackend):
    """Transformers.

    `last_trace` lists (generated-token index, norm of the edit) for each forward pass of the last call's
    first row, at its lowest edited block; a prompt's pass has index 0.
    """

    name: ClassVar[str] = "transformers"

    def __init__(self) -> None:
        super().__init__()
        self.max_batch_size = 16
        self.last_trace: list[tuple[int, float]] = []
        self._loaded: Loaded | None = None

    @classmethod
    def is_available(cls) -> tuple[bool, str]:
        """Whether torch and transformers are installed. Imports neither."""
        for package in ("torch", "transformers"):
            if importlib.util.find_spec(package) is None:
                return False, f"{package} is not installed: pip install 'brainpatch[transformers]'"
        try:
            found = version("transformers")
        except PackageNotFoundError:
            return False, "transformers is there, but not as an installed package"
        if int(found.split(".")[0]) < 5:
            return False, f"transformers {found} is too old: 5.0 or newer is needed"
        return True, f"transformers {found}"

    @classmethod
    def capabilities(cls) -> Capabilities:
        """What this engine can do."""
        return Capabilities(
            name=cls.name,
            static_intervention=True,
            dynamic_schedule=True,
            multiple_patches=True,
            streaming=True,
            cpu=True,
            cuda=True,
            mps=True,
            apple_silicon=True,
            server=True,
            concurrent_requests=True,
            per_request_strength=True,
            quantization=("torchao",),
            sites=True,
            trace=True,
            notes={
                "cuda": "written for it, not run on it",
                "mps": "written for it, not run on it",
                "concurrent_requests": "rows of one batch, and calls from several threads",
                "quantization": "torchao int8 weights were run; other kinds are passed through and were not",
            },
        )

    # --- the model ---------------------------------------------------------------------------

    def load_model(
        self,
        model: Any,
        *,
        revision: str | None = None,
        device: str = "auto",
        dtype: Any = "auto",
        trust_remote_code: bool = False,
        model_id: str | None = None,
        tokenizer: Any = None,
        **arguments: Any,
    ) -> None:
        """Load a model by hub id or folder, or take a loaded one as it is.

        `device` auto is cuda, mps, cpu, whichever comes first; `dtype` auto is bfloat16, float16, float32 there.
        `model_id` is the name that patches know the model by, where `model` is a folder. A loaded model
        needs its `tokenizer` unless that can be found by the model's name, is never changed, and must be in eval
        mode. `arguments` (device_map, quantization_config, ...) go to `from_pretrained`.

        A forward pass on three tokens proves that edits reach the stream. Errors: BackendNotAvailable (BP501),
        EngineError (BP503 to BP507).
        """
        loaded = load(
            model,
            revision=revision,
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            model_id=model_id,
            tokenizer=tokenizer,
            arguments=arguments,
        )
        self.unload()  # patches were checked on the model that was here before
        self._loaded = loaded

    def describe_model(self) -> ModelDescriptor:
        """Identity and shape of the loaded model."""
        return self._ready().descriptor

    def unload(self) -> None:
        """Let go of the model and of the patches installed on it."""
        super().unload()
        self._loaded = None

    @property
    def model(self) -> Any:
        """The loaded model."""
        return self._ready().model

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return self._ready().tokenizer

    @property
    def blocks(self) -> Any:
        """Its decoder blocks, in order."""
        return self._ready().blocks

    def _ready(self) -> Loaded:
        if self._loaded is None:
            raise self._nothing_loaded()
        return self._loaded

    # --- text --------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        patches: Patches = None,
        use_chat_template: bool = True,
        system: str | None = None,
        apply_to_prompt: bool = True,
    ) -> str:
        """The answer to one prompt. With `apply_to_prompt` False, prompt positions are not edited."""
        if apply_to_prompt:
            return super().generate(
                prompt, config, patches=patches, use_chat_template=use_chat_template, system=system
            )
        asked = self._request(
            prompt, config, patches, use_chat_template, system, "this call returns one text"
        )
        return self._run([Request(asked.prompt_ids, asked.config, asked.patches.continuation_only())])[0].text

    def assert_zero_is_baseline(
        self, prompt: Prompt, config: GenerationConfig | None = None
    ) -> dict[str, Any]:
        """Law 1 on this prompt: all installed patches at strength 0 against none.

        Returns {"identical": True, "baseline": text, "zero": text}; EngineError (BP508) when they differ.
        """
        zero = dict.fromkeys(self.list_patches(), 0.0)
        plain, still = self.generate_detailed([prompt, prompt], config, patches=[{}, zero])
        if plain.token_ids != still.token_ids:
            raise EngineError("BP508", "at strength 0 the tokens differ from those without patches")
        return {"identical": True, "baseline": plain.text, "zero": still.text}

    def _encode(self, prompt: Prompt, *, use_chat_template: bool, system: str | None) -> list[int]:
        return prompt_ids(self.tokenizer, prompt, use_chat_template=use_chat_template, system=system)

    def _check_config(self, config: GenerationConfig) -> None:
        for key, value in config.extra.items():
            if key not in _EXTRA:
                raise RequestError(
                    "BP404", f"extra[{key!r}] is not understood here; known: {', '.join(_EXTRA)}"
                )
            if value not in _EXTRA[key]:
                raise RequestError("BP404", f"extra[{key!r}] is one of {_EXTRA[key]}, not {value!r}")

    def run_batch(
        self, requests: Sequence[Request], listeners: Sequence[Listener] | None
    ) -> list[Generation | BrainPatchError]:
        """See the base class. Nobody listens where `listeners` is None."""
        return run_batches(requests, listeners, self._batches(requests), self._batch)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """What each token reads by itself."""
        return [str(self.tokenizer.decode([token])) for token in ids]

    def _context_length(self) -> int | None:
        return self._ready().context

    def _batches(self, requests: Sequence[Request]) -> list[list[int]]:
        """Which requests run together."""
        loaded = self._ready()
        return shared_batches(requests, self.max_batch_size, loaded.context, padded=loaded.can_be_padded)

    def _batch(
        self,
        requests: Sequence[Request],
        listeners: Sequence[Listener] | None = None,
        *,
        measured: bool = False,
        started: Callable[[Edits], None] = lambda edits: None,
    ) -> list[Answer]:
        """Generate one batch, padded on the left."""
        import torch
        import transformers

        from brainpatch.backends.transformers_sampling import Sampler

        loaded = self._ready()
        if any(not request.patches.is_empty for request in requests):
            refuse_compiled(loaded.model)
        width = max(len(request.prompt_ids) for request in requests)
        ids = torch.full((len(requests), width), loaded.pad_id, dtype=torch.long)
        mask = torch.zeros_like(ids)
        rows = []
        for number, request in enumerate(requests):
            length = len(request.prompt_ids)
            ids[number, width - length :] = torch.tensor(request.prompt_ids)
            mask[number, width - length :] = 1
            rows.append(Row(request.patches, length, width - length))
        edits = Edits(loaded.blocks, rows, width)
        heard: Sequence[Listener | None] = listeners or [None] * len(requests)
        answers = [
            Answer(request, self._decode, loaded.end_ids, listener)
            for request, listener in zip(requests, heard, strict=True)
        ]
        sampler = Sampler(answers, edits)
        started(edits)
        settings = transformers.GenerationConfig(
            max_new_tokens=max(request.config.max_new_tokens for request in requests),
            do_sample=False,
            pad_token_id=loaded.pad_id,
            disable_compile=True,
            **requests[0].config.extra,
        )
        # `generate` mixes in the model's own settings and keeps caches on the model: it gets a shallow twin
        # that has no settings, so that nothing of this call stays on the model itself.
        twin = copy.copy(loaded.model)
        twin.generation_config = transformers.GenerationConfig()
        with edits.applied(measured=measured), torch.no_grad():
            twin.generate(
                input_ids=ids.to(loaded.model.device),
                attention_mask=mask.to(loaded.model.device),
                generation_config=settings,
                logits_processor=transformers.LogitsProcessorList([sampler.choose]),
                stopping_criteria=transformers.StoppingCriteriaList([sampler.stop]),
            )
        self.last_trace = edits.first_row
        return answers

    def _run_trace(self, request: Request) -> list[TraceRow]:
        kept: list[Edits] = []
        (answer,) = self._batch([request], measured=True, started=kept.append)
        if answer.error is not None:
            raise answer.error
        return [kept[0].trace[key] for key in sorted(kept[0].trace)]


BACKEND = TransformersBackend
