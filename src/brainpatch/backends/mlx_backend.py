"""Patches on MLX: models of mlx-lm, in real batches in which each row has its own patches.

State and who owns it: MLX's arrays belong to a thread, so the model is loaded and run in the engine's own one, and
callers of any thread wait in line for it. The model is never changed; what a call needs belongs to that call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any, ClassVar

from brainpatch.backends.answers import Answer
from brainpatch.backends.batch_backend import BatchBackend, EngineThread, run_batches, shared_batches
from brainpatch.backends.mlx_edits import Edits, Row
from brainpatch.backends.mlx_loading import Loaded, availability, compute, load
from brainpatch.backends.mlx_passes import CHUNK, Passes
from brainpatch.backends.prompts import prompt_ids
from brainpatch.errors import BackendNotAvailable, BrainPatchError, RequestError
from brainpatch.patch.compatibility import ModelDescriptor
from brainpatch.runtime.capabilities import Capabilities
from brainpatch.runtime.config import GenerationConfig
from brainpatch.runtime.requests import Generation, Listener, Prompt, Request, TraceRow


class MLXBackend(BatchBackend):
    """MLX, by mlx-lm."""

    name: ClassVar[str] = "mlx"

    def __init__(self) -> None:
        super().__init__()
        self.max_batch_size = 16
        self.prefill_chunk = CHUNK
        """How many columns of prompts one forward pass computes, at most."""
        self._loaded: Loaded | None = None
        self._thread: EngineThread | None = None

    @classmethod
    def is_available(cls) -> tuple[bool, str]:
        """Whether mlx and a known mlx-lm are installed. Imports neither."""
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
            apple_silicon=True,
            server=True,
            concurrent_requests=True,
            per_request_strength=True,
            quantization=("mlx 4-bit", "mlx 8-bit"),
            sites=True,
            trace=True,
            notes={
                "apple_silicon": "written for it; run only on the CPU builds of MLX for Linux",
                "cuda": "MLX has a build for CUDA; not run",
                "concurrent_requests": "rows of one batch; calls from several threads wait in line",
                "quantization": "affine weights as mlx-lm makes them were run; other kinds are passed through",
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

        `device` is auto (what MLX takes by itself), cpu or gpu; `dtype` auto is that of the files, and float32,
        bfloat16 or float16 casts every floating parameter. `model_id` is the name that patches know the model by,
        where `model` is a folder. A loaded model needs its `tokenizer`, is never changed, and must be in eval
        mode. `arguments` (adapter_path, model_config, ...) go to `mlx_lm.load`.

        Forward passes on a few tokens prove that edits reach the stream, and whether rows of different lengths may
        share a batch. Errors: BackendNotAvailable (BP501), EngineError (BP503 to BP507).
        """
        available, detail = availability()
        if not available:
            raise BackendNotAvailable("BP501", f"mlx: {detail}")
        if not isinstance(model, (str, PurePath)):
            compute(model)
        thread = EngineThread(self.name)

        def work(_: Callable[[], bool]) -> Loaded:
            return load(
                model,
                revision=revision,
                device=device,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                model_id=model_id,
                tokenizer=tokenizer,
                arguments=arguments,
            )

        try:
            loaded = thread.call(work)
        except BaseException:
            thread.close()
            raise
        self.unload()  # patches were checked on the model that was here before
        self._loaded, self._thread = loaded, thread

    def describe_model(self) -> ModelDescriptor:
        """Identity and shape of the loaded model."""
        return self._ready()[0].descriptor

    def unload(self) -> None:
        """Let go of the model and of the patches installed on it, once what runs has ended."""
        super().unload()
        thread, self._thread, self._loaded = self._thread, None, None
        if thread is not None:
            thread.call(lambda _: _give_back())
            thread.close()

    @property
    def model(self) -> Any:
        """The loaded model. Compute with it in one thread only, and not while this backend does."""
        return self._ready()[0].model

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer, that of Hugging Face."""
        return self._ready()[0].tokenizer

    @property
    def blocks(self) -> list[Any]:
        """Its decoder blocks, in order."""
        return self._ready()[0].blocks

    def _ready(self) -> tuple[Loaded, EngineThread]:
        if self._loaded is None or self._thread is None:
            raise self._nothing_loaded()
        return self._loaded, self._thread

    # --- text --------------------------------------------------------------------------------

    def _encode(self, prompt: Prompt, *, use_chat_template: bool, system: str | None) -> list[int]:
        return prompt_ids(self.tokenizer, prompt, use_chat_template=use_chat_template, system=system)

    def _check_config(self, config: GenerationConfig) -> None:
        for key in config.extra:
            raise RequestError("BP404", f"extra[{key!r}] is not understood here; nothing is")

    def _context_length(self) -> int | None:
        return self._ready()[0].context

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """What each token reads by itself."""
        return [str(self.tokenizer.decode([token])) for token in ids]

    def run_batch(
        self, requests: Sequence[Request], listeners: Sequence[Listener] | None
    ) -> list[Generation | BrainPatchError]:
        """See the base class. Nobody listens where `listeners` is None."""
        loaded, _ = self._ready()
        batches = shared_batches(requests, self.max_batch_size, loaded.context, padded=loaded.can_be_padded)
        return run_batches(requests, listeners, batches, self._batch)

    def _batch(self, requests: Sequence[Request], listeners: Sequence[Listener] | None) -> list[Answer]:
        loaded, thread = self._ready()
        return thread.call(lambda gone: self._generate(loaded, requests, listeners, gone)[0])

    def _run_trace(self, request: Request) -> list[TraceRow]:
        loaded, thread = self._ready()
        (answer,), edits = thread.call(
            lambda gone: self._generate(loaded, [request], None, gone, measured=True)
        )
        if answer.error is not None:
            raise answer.error
        return [edits.trace[key] for key in sorted(edits.trace)]

    def _generate(
        self,
        loaded: Loaded,
        requests: Sequence[Request],
        listeners: Sequence[Listener] | None,
        gone: Callable[[], bool],
        *,
        measured: bool = False,
    ) -> tuple[list[Answer], Edits]:
        """One batch, in the engine's thread."""
        import mlx.core as mx

        from brainpatch.backends.sampling import advance

        def decode(ids: Sequence[int]) -> str:  # of this model, whatever is loaded meanwhile
            text = loaded.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            return str(text)

        heard: Sequence[Listener | None] = listeners or [None] * len(requests)
        answers = [
            Answer(request, decode, loaded.end_ids, listener)
            for request, listener in zip(requests, heard, strict=True)
        ]
        edits = Edits(loaded.blocks, [Row(one.patches, len(one.prompt_ids)) for one in requests])

        def finished() -> bool:
            for answer in answers:
                answer.hear()
            return gone() or all(answer.done for answer in answers)

        with mx.stream(loaded.device or mx.default_device()), edits.applied(measured=measured):
            passes = Passes(loaded.model, [one.prompt_ids for one in requests], edits)
            passes.prefill(self.prefill_chunk, finished)
            tokens = [one.prompt_ids[-1] for one in requests]
            while not finished():
                for answer, logits in zip(answers, passes.step(tokens), strict=True):
                    advance(answer, logits)
                # A row that has ended goes on with anything until the last one has: the batch keeps its shape, and
                # so its rounding.
                tokens = [0 if answer.done else answer.token_ids[-1] for answer in answers]
        return answers, edits


def _give_back() -> None:
    """Let MLX give back the buffers that it keeps."""
    import mlx.core as mx

    mx.clear_cache()


BACKEND = MLXBackend
