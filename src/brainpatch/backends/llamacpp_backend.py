"""Patches on llama.cpp: GGUF models, quantised or not, in process, each sequence of a batch with its own patches.

State and who owns it: the model, its context and the edits belong to the engine's thread, in which everything is
computed; callers of any thread wait in line for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from brainpatch.backends.answers import Answer
from brainpatch.backends.batch_backend import BatchBackend, EngineThread
from brainpatch.backends.llamacpp_library import availability
from brainpatch.backends.prompts import prompt_ids
from brainpatch.errors import BackendNotAvailable, BrainPatchError, CapabilityError, EngineError, RequestError
from brainpatch.patch.compatibility import ModelDescriptor
from brainpatch.runtime.capabilities import Capabilities
from brainpatch.runtime.config import GenerationConfig
from brainpatch.runtime.meaning import ResolvedSet
from brainpatch.runtime.requests import Generation, Listener, Prompt, Request, TraceRow

if TYPE_CHECKING:
    from brainpatch.backends.llamacpp_engine import Engine


class LlamaCppBackend(BatchBackend):
    """llama.cpp.

    Patches act in one of two ways, `editing`: "callback", where each sequence of a batch has its own edits at any
    block, or "control-vector", llama.cpp's own means, which knows one configuration a step and cannot reach block 0.
    """

    name: ClassVar[str] = "llamacpp"

    def __init__(self) -> None:
        super().__init__()
        self._engine: Engine | None = None
        self._thread: EngineThread | None = None
        self._descriptor: ModelDescriptor | None = None

    @classmethod
    def is_available(cls) -> tuple[bool, str]:
        """Whether a build of llama.cpp that is known is installed. Loads nothing."""
        return availability()

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
            quantization=("gguf",),
            sites=True,
            trace=True,
            notes={
                "static_intervention": "with editing='control-vector': not at block 0, and one set a step",
                "cuda": "n_gpu_layers is passed through; not run",
                "mps": "n_gpu_layers is passed through; not run",
                "concurrent_requests": "sequences of one batch; calls from several threads wait in line",
                "quantization": "F32, Q8_0, Q4_1 and Q4_K_M were run; llama.cpp loads other kinds the same way",
                "trace": "not with editing='control-vector'",
            },
        )

    # --- the model ---------------------------------------------------------------------------

    def load_model(
        self,
        model: Any,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        model_id: str | None = None,
        **arguments: Any,
    ) -> None:
        """Load a GGUF file: a path, or `owner/repo:file.gguf` of a hub.

        `model_id` is the name that patches know the model by; without it, it is the file's `general.name`. A GGUF has
        its own types, so `dtype` is auto; `device` is auto or cpu, and `n_gpu_layers` moves blocks to a GPU. The other
        `arguments` are those of `llamacpp_model.Settings`; `editing` auto is the callback wherever llama.cpp names the
        model's streams.

        Three tokens prove that an edit acts. Errors: BackendNotAvailable (BP501), EngineError (BP503 to BP507).
        """
        from brainpatch.backends.llamacpp_engine import Engine
        from brainpatch.backends.llamacpp_model import Settings

        if dtype != "auto":
            raise EngineError("BP507", f"dtype is {dtype}, but a GGUF has its own types", "Leave dtype out.")
        if device not in ("auto", "cpu"):
            raise EngineError(
                "BP507", f"device is {device}", "Leave it out; n_gpu_layers=-1 moves the model to a GPU."
            )
        settings = Settings.of(arguments)
        path = _file_of(model, revision)
        thread = EngineThread(self.name)
        try:
            engine = thread.call(lambda _: Engine(path, settings))
        except BaseException:
            thread.close()
            raise
        self.unload()  # patches were checked on the model that was here before
        self._engine, self._thread = engine, thread
        self.max_batch_size = settings.n_parallel
        self._descriptor = ModelDescriptor(
            model_id or engine.model.name or path.stem,
            engine.model.width,
            engine.model.layers,
            revision=revision,
        )

    def describe_model(self) -> ModelDescriptor:
        """Identity and shape of the loaded model. A GGUF does not say of which class of Transformers it is."""
        if self._descriptor is None:
            raise self._nothing_loaded()
        return self._descriptor

    def unload(self) -> None:
        """Free the model, and the patches installed on it."""
        super().unload()
        engine, thread = self._engine, self._thread
        self._engine = self._thread = self._descriptor = None
        if engine is not None and thread is not None:
            thread.call(lambda _: engine.close())
            thread.close()

    @property
    def editing(self) -> str:
        """How patches act: "callback" or "control-vector"."""
        return self._ready()[0].editing

    def _ready(self) -> tuple[Engine, EngineThread]:
        if self._engine is None or self._thread is None:
            raise self._nothing_loaded()
        return self._engine, self._thread

    # --- text --------------------------------------------------------------------------------

    def _encode(self, prompt: Prompt, *, use_chat_template: bool, system: str | None) -> list[int]:
        tokenizer = self._ready()[0].model.tokenizer
        return prompt_ids(tokenizer, prompt, use_chat_template=use_chat_template, system=system)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """What each token reads by itself."""
        tokenizer = self._ready()[0].model.tokenizer
        return [tokenizer.text(token) for token in ids]

    def _check_config(self, config: GenerationConfig) -> None:
        for key in config.extra:
            raise RequestError("BP404", f"extra[{key!r}] is not understood here; nothing is")

    def _check_patches(self, patches: ResolvedSet) -> None:
        if 0 in patches.layers and self.editing == "control-vector":
            raise CapabilityError("BP502", "a control vector cannot reach block 0",
                                  "Load the model with editing='callback'.")  # fmt: skip

    def _context_length(self) -> int | None:
        return self._ready()[0].model.context_length

    def run_batch(
        self, requests: Sequence[Request], listeners: Sequence[Listener] | None
    ) -> list[Generation | BrainPatchError]:
        """See the base class. Nobody listens where `listeners` is None."""
        answers, _ = self._generate(requests, listeners)
        return [answer.error or answer.generation() for answer in answers]

    def _run_trace(self, request: Request) -> list[TraceRow]:
        if self.editing == "control-vector":
            raise CapabilityError("BP502", "llamacpp does not offer trace with editing='control-vector'")
        (answer,), trace = self._generate([request], None, measured=True)
        if answer.error is not None:
            raise answer.error
        return trace

    def _generate(
        self, requests: Sequence[Request], listeners: Sequence[Listener] | None, *, measured: bool = False
    ) -> tuple[list[Answer], list[TraceRow]]:
        engine, thread = self._ready()

        def work(gone: Callable[[], bool]) -> tuple[list[Answer], list[TraceRow]]:
            return engine.generate(requests, listeners, self.max_batch_size, gone, measured=measured)

        return thread.call(work)


def _file_of(model: Any, revision: str | None) -> Path:
    """The GGUF on disk, fetched when a hub has it."""
    text = os.fspath(model)
    path = Path(text)
    if path.is_file():
        return path
    repo, _, file = text.partition(":")
    if path.suffix == ".gguf" and not file:
        raise EngineError("BP507", f"there is no file {text}")
    if not file or repo.count("/") != 1:
        raise EngineError(
            "BP507", f"{text} is not a GGUF file", "Give a .gguf file, or owner/repo:file.gguf of a hub."
        )
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise BackendNotAvailable(
            "BP501", "huggingface_hub is not installed", "pip install 'brainpatch[hub]'"
        ) from None
    try:
        return Path(hf_hub_download(repo, file, revision=revision))
    except Exception as error:  # the hub, the network and the disk may fail in many ways
        raise EngineError("BP507", f"{text} cannot be fetched: {error}") from None


BACKEND = LlamaCppBackend
