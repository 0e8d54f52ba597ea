"""Patches inside vLLM: its own scheduler, batching and KV cache, on its own forward pass.

Every request carries its own patches to the workers (`vllm_requests`), which add them row by row
(`vllm_plane`). An engine that was started with the worker extension alone takes another road, one set for all
(`vllm_installed`).

State and who owns it: installed patches belong to this object, under the short lock of its base class; a
request takes what it needs of them when it is made and is whole in itself from then on. The engine belongs to
its driver's thread (`vllm_drivers`). Calls may come from any number of threads at once.
"""

from __future__ import annotations

import asyncio
import copy
import queue
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from brainpatch.backends.prompts import prompt_ids
from brainpatch.backends.vllm_drivers import AsyncDriver, Driver, LLMDriver, Sink
from brainpatch.backends.vllm_engine import (
    EXTENSION,
    Engine,
    availability,
    cache_arguments,
    check_arguments,
    descriptor,
    model_config,
    runs_on_cpu,
)
from brainpatch.backends.vllm_installed import InstalledPatches
from brainpatch.backends.vllm_plugin import WORKER, counters
from brainpatch.backends.vllm_requests import KEY, cache_salt, carry
from brainpatch.backends.vllm_sampling import generation, own_salt, sampling_params, scored
from brainpatch.errors import BackendNotAvailable, CapabilityError, EngineError
from brainpatch.patch.compatibility import ModelDescriptor
from brainpatch.runtime.backend import BrainPatchBackend, Patches
from brainpatch.runtime.capabilities import Capabilities
from brainpatch.runtime.config import GenerationConfig
from brainpatch.runtime.meaning import ResolvedSet
from brainpatch.runtime.requests import Generation, Prompt, Request, Scored, TraceRow


class VLLMBackend(BrainPatchBackend):
    """vLLM, stock, with a worker class that adds to the residual stream."""

    name: ClassVar[str] = "vllm"
    follows: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self._engine: Engine | None = None
        self._driver: Driver | None = None
        self._installed: InstalledPatches | None = None
        self._model: ModelDescriptor | None = None
        self._tokenizer: Any = None
        self._dtype = ""
        self._context = 0
        self._max_logprobs = 0
        self._graphs = False

    @classmethod
    def is_available(cls) -> tuple[bool, str]:
        """Whether a supported vLLM is installed; CPU builds count. Imports nothing."""
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
            server=True,
            concurrent_requests=True,
            per_request_strength=True,
            sites=True,
            trace=True,
            notes={
                "cuda": "written for it, not run on it",
                "trace": "on CUDA in eager mode only: a captured graph runs no code that could measure",
                "quantization": "not checked",
                "pipeline_parallel": "not run",
                "extension": "an engine with BrainPatchWorkerExtension alone: one set of patches for all "
                "requests, no schedules, no sites, no streaming, eager only",
            },
        )

    # --- the model ---------------------------------------------------------------------------

    def load_model(
        self,
        model: Any,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        gpu_memory_utilization: float = 0.80,
        max_model_len: int = 2048,
        enforce_eager: bool | None = None,
        model_id: str | None = None,
        **engine: Any,
    ) -> None:
        """Start vLLM on a hub id or a folder. A model that is loaded already is unloaded first.

        `max_model_len` is capped to the model's context. `enforce_eager` None: vLLM's default on an
        accelerator (compiled), eager on a CPU, where compiling takes minutes; both are right on both.
        `model_id` is the name that patches know the model by, where `model` is a folder. `engine` goes to
        `vllm.LLM` as it is, a `worker_extension_cls` of the caller's included; code from the model's
        repository runs only if it says `trust_remote_code`.

        Errors: CapabilityError (BP502) for arguments that patches cannot live with,
        BackendNotAvailable (BP501), EngineError (BP502 to BP507). Nothing is left running.
        """
        check_arguments(engine)
        ok, detail = self.is_available()
        if not ok:
            raise BackendNotAvailable("BP501", f"vllm: {detail}")
        self.unload()
        arguments = {key: value for key, value in engine.items() if key != "device"}
        arguments |= {"model": str(model), "revision": revision, "dtype": dtype}
        arguments |= {"worker_cls": WORKER}
        config = model_config(arguments)
        arguments |= {
            "max_model_len": min(max_model_len, int(config.max_model_len)),
            "gpu_memory_utilization": gpu_memory_utilization,
            "enforce_eager": runs_on_cpu() if enforce_eager is None else enforce_eager,
            **cache_arguments(engine),
        }
        self._engine = Engine(arguments)
        try:
            self._adopt(self._engine.llm, model_id=model_id or str(model), revision=revision)
        except BaseException:
            self.unload()
            raise

    @classmethod
    def from_llm(cls, llm: Any, *, model_id: str | None = None) -> VLLMBackend:
        """A backend on a `vllm.LLM` or `vllm.AsyncLLM` that the caller built and goes on owning.

        It must have been built with `worker_cls="brainpatch.backends.vllm_worker.BrainPatchWorker"`, or with
        `worker_extension_cls="brainpatch.backends.vllm_worker.BrainPatchWorkerExtension"` (an LLM only; one
        set of patches for all requests). Call it on the event loop of an AsyncLLM. While a call of the backend
        runs on an LLM, use that LLM through the backend alone: vLLM allows one thread at a time.

        Errors: CapabilityError (BP502) for an engine with neither class.
        """
        backend = cls()
        backend._adopt(llm, model_id=model_id, revision=None)
        return backend

    def _adopt(self, llm: Any, *, model_id: str | None, revision: str | None) -> None:
        synchronous = hasattr(llm, "llm_engine")
        config = (llm.llm_engine if synchronous else llm).vllm_config
        processor = (llm.llm_engine if synchronous else llm).input_processor
        parallel, model = config.parallel_config, config.model_config
        ours = parallel.worker_cls == WORKER
        if not ours and not (parallel.worker_extension_cls == EXTENSION and synchronous):
            raise CapabilityError(
                "BP502",
                f"this engine was started with worker_cls={parallel.worker_cls!r} and no extension of ours",
                f"Start it with worker_cls={WORKER!r}.",
            )
        self._tokenizer = processor.get_tokenizer()
        self._context = int(model.max_model_len)
        self._max_logprobs = int(model.max_logprobs)
        self._graphs = not runs_on_cpu() and not model.enforce_eager
        self._dtype = str(model.dtype).removeprefix("torch.")
        self._model = descriptor(model, model_id or str(model.served_model_name or model.model), revision)
        if not synchronous:
            self._driver = AsyncDriver(llm)
            return
        self._driver = driver = LLMDriver(llm)
        if not ours:
            self._installed = InstalledPatches(driver, self._ask_all, self._warn)

    def describe_model(self) -> ModelDescriptor:
        """Identity and shape of the loaded model. EngineStateError (BP407) when there is none."""
        if self._model is None:
            raise self._nothing_loaded()
        return self._model

    def unload(self) -> None:
        """End the engine and its processes; one that the caller built goes on, without this backend.

        Installed patches go with the model they were checked on.
        """
        engine, self._engine = self._engine, None
        driver, self._driver = self._driver, None
        self._model = self._tokenizer = self._installed = None
        super().unload()
        if driver is not None:
            driver.close()
        if engine is not None:
            engine.close()

    def _driven(self) -> Driver:
        if self._driver is None:
            raise self._nothing_loaded()
        return self._driver

    # --- what is refused ---------------------------------------------------------------------

    def _check_config(self, config: GenerationConfig) -> None:
        sampling_params(config, max_logprobs=self._max_logprobs)

    def _check_patches(self, patches: ResolvedSet) -> None:
        if self._installed is not None:
            self._installed.check(patches)

    def _encode(self, prompt: Prompt, *, use_chat_template: bool, system: str | None) -> list[int]:
        return prompt_ids(self._tokenizer, prompt, use_chat_template=use_chat_template, system=system)

    def _context_length(self) -> int | None:
        return self._context

    # --- the workers ---------------------------------------------------------------------------

    def worker_state(self) -> list[dict[str, Any]]:
        """What every worker says about itself and what is live now, one mapping a rank.

        The keys of `bp_probe` and, with BrainPatchWorker, those of `bp_state`, and `refused`: how many
        requests this process turned away for the patches they carried.
        """
        driver = self._driven()
        probes = driver.rpc("bp_probe")
        if self._installed is not None:
            return probes
        states = driver.rpc("bp_state")
        return [{**probe, **state, **counters} for probe, state in zip(probes, states, strict=True)]

    def weights_digest(self) -> list[str]:
        """SHA-256 of the parameters and buffers that each rank holds (law 2)."""
        return [result["digest"] for result in self._driven().rpc("bp_weights_digest")]

    @property
    def last_hook_report(self) -> dict[str, Any]:
        """With the extension alone: see `InstalledPatches.report`. Otherwise empty: nothing is applied for all."""
        return {} if self._installed is None else self._installed.report

    def begin_serving(self) -> None:
        """Nothing to do: requests keep what they were admitted with, and patches may change at any time."""
        self._driven()

    def end_serving(self) -> None:
        """Nothing to do; see `begin_serving`."""

    # --- for those who call the engine themselves --------------------------------------------

    def sampling_params(self, patches: Patches = None, base: Any = None) -> Any:
        """vLLM's SamplingParams for one request with its own patches; `base` (default: vLLM's) is not changed.

        They are all that a request needs: what keeps cached blocks apart follows from them, on every way into
        the engine. They keep the strengths and schedules of now, and may be used any number of times.
        Errors: those of a request's `patches`; CapabilityError (BP502) with the extension alone.
        """
        from vllm import SamplingParams

        self._only_with_worker("sampling_params")
        carried = carry(self.resolve_patches(patches))
        made = SamplingParams() if base is None else copy.copy(base)
        extra = {key: value for key, value in (made.extra_args or {}).items() if key != KEY}
        if carried is not None:
            extra[KEY] = carried
        made.extra_args = extra or None
        return made

    def cache_salt(self, patches: Patches = None, salt: str | None = None) -> str | None:
        """The `cache_salt` of a request with these patches and a salt of the caller's.

        vLLM's requests get it by themselves (see `sampling_params`); giving it as well changes nothing.
        """
        return cache_salt(self.resolve_patches(patches), None, salt)

    def _only_with_worker(self, what: str) -> None:
        if self._installed is not None:
            raise CapabilityError("BP502", f"{what} needs an engine with worker_cls={WORKER!r}")

    # --- text --------------------------------------------------------------------------------

    def score(
        self, requests: Sequence[Request], answers: Sequence[Sequence[int]] | None = None
    ) -> list[Scored]:
        """See the base class. vLLM follows nobody's answers, and the engine must be loaded with max_logprobs=-1."""
        self._only_with_worker("score")
        if answers is not None:
            raise CapabilityError("BP502", "vllm does not follow an answer that is given",
                                  "Score its own answers, and let another engine follow them.")  # fmt: skip
        asked = [replace(one, config=replace(one.config, extra={**one.config.extra, "logprobs": -1}))
                 for one in requests]  # fmt: skip
        tags = [uuid.uuid4().hex for _ in asked]
        answered: list[Scored] = self._ask_all(asked, None, tags, flat=True)
        self._check_numbers(asked, tags, [None] * len(asked))
        return answered

    def _run(self, requests: Sequence[Request]) -> list[Generation]:
        if self._installed is not None:
            return self._installed.run(requests)
        tags = [uuid.uuid4().hex for _ in requests]
        answers = self._ask_all(requests, None, tags)
        self._check_numbers(requests, tags, answers)
        return answers

    def _check_numbers(
        self, requests: Sequence[Request], tags: Sequence[str], answers: Sequence[Generation | None]
    ) -> None:
        """EngineError (BP509) when one of the requests had activations that are no numbers."""
        asked = _patched(requests, tags)
        if asked:
            _raise_broken(self._driven().rpc("bp_broken", asked), requests, tags, answers)

    async def broken(self, tags: Sequence[str]) -> set[str]:
        """Which requests that were handed in under these tags had activations that are no numbers (BP509)."""
        reports = await self._driven().rpc_async("bp_broken", list(tags))
        return {tag for report in reports for tag in report["broken"]}

    def _ask_all(
        self,
        requests: Sequence[Request],
        salt: str | None = None,
        tags: Sequence[str] | None = None,
        *,
        trace: bool = False,
        flat: bool = False,
    ) -> list[Any]:
        """Generate requests together; `salt` replaces theirs, and with `flat` the answers are `Scored`."""
        driver = self._driven()
        driver.check_thread()
        heard: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        ids: list[str] = []
        answers: dict[int, Any] = {}
        try:
            for number, request in enumerate(requests):
                tag = "" if tags is None else tags[number]

                def sink(output: Any, number: int = number) -> None:
                    heard.put((number, output))

                ids.append(
                    self._submit(request, sink, "FINAL_ONLY", tag=tag, trace=trace, salt=salt, flat=flat)
                )
            while len(answers) < len(requests):
                number, output = heard.get()
                if _heard(output).finished:
                    one = requests[number]
                    answers[number] = scored(output) if flat else generation(output, one.config, one.patches)
        except BaseException:
            driver.abort(ids)
            raise
        return [answers[number] for number in range(len(requests))]

    def _submit(
        self,
        request: Request,
        sink: Sink,
        kind: str,
        *,
        tag: str = "",
        trace: bool = False,
        salt: str | None = None,
        flat: bool = False,
    ) -> str:
        from vllm.sampling_params import RequestOutputKind

        parameters = sampling_params(request.config, max_logprobs=self._max_logprobs)
        parameters.output_kind = RequestOutputKind[kind]
        if flat:
            parameters.flat_logprobs, parameters.detokenize = True, False
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": list(request.prompt_ids)}
        own = own_salt(request.config) if salt is None else salt
        if self._installed is not None:
            own = cache_salt(request.patches, None, own)
        elif (carried := carry(request.patches, tag=tag, trace=trace)) is not None:
            parameters.extra_args = {**(parameters.extra_args or {}), KEY: carried}
        if own is not None:
            prompt["cache_salt"] = own
        return self._driven().submit(prompt, parameters, sink)

    def _run_stream(self, request: Request) -> Iterator[str]:
        self._only_with_worker("streaming")
        driver = self._driven()
        driver.check_thread()
        heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        tag = uuid.uuid4().hex
        number = self._submit(request, heard.put, "DELTA", tag=tag)
        finished = False
        try:
            while not finished:
                output = _heard(heard.get())
                finished = output.finished
                if output.outputs[0].text:
                    yield output.outputs[0].text
        finally:
            if not finished:
                driver.abort([number])
        self._check_numbers([request], [tag], [None])

    async def astream(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        patches: Patches = None,
        use_chat_template: bool = True,
        system: str | None = None,
    ) -> AsyncIterator[str]:
        """As `stream`, for an event loop: that of the AsyncLLM, or any with an LLM."""
        request = self._request(
            prompt, config, patches, use_chat_template, system, "a stream carries one answer"
        )
        self._only_with_worker("streaming")
        driver = self._driven()
        loop = asyncio.get_running_loop()
        heard: asyncio.Queue[Any] = asyncio.Queue()
        tag = uuid.uuid4().hex

        def sink(output: Any) -> None:
            loop.call_soon_threadsafe(heard.put_nowait, output)

        number = self._submit(request, sink, "DELTA", tag=tag)
        finished = False
        try:
            while not finished:
                output = _heard(await heard.get())
                finished = output.finished
                if output.outputs[0].text:
                    yield output.outputs[0].text
        finally:
            if not finished:
                driver.abort([number])
        if asked := _patched([request], [tag]):
            _raise_broken(await driver.rpc_async("bp_broken", asked), [request], [tag], [None])

    # --- what was really added ---------------------------------------------------------------

    def _run_trace(self, request: Request) -> list[TraceRow]:
        if self._installed is not None:
            return self._installed.trace(request)
        if self._graphs:
            raise CapabilityError(
                "BP502", "a captured graph runs no code that could measure", "Load with enforce_eager=True."
            )
        tag = uuid.uuid4().hex
        try:
            # A salt of its own: every position is computed, none comes from the cache.
            answers = self._ask_all([request], f"brainpatch-trace:{tag}", [tag], trace=True)
        finally:
            measured = self._driven().rpc("bp_trace_take", tag)
        self._check_numbers([request], [tag], [None])
        return _trace_rows(measured, request.patches, answers[0], self._dtype)


def _heard(output: Any) -> Any:
    """What a sink was given, where it is no error."""
    if isinstance(output, BaseException):
        raise output
    return output


def _patched(requests: Sequence[Request], tags: Sequence[str]) -> list[str]:
    """The tags of the requests that have edits; the workers watch no others."""
    return [tag for request, tag in zip(requests, tags, strict=True) if not request.patches.is_empty]


def _raise_broken(
    reports: Sequence[dict[str, Any]],
    requests: Sequence[Request],
    tags: Sequence[str],
    answers: Sequence[Generation | None],
) -> None:
    """BP509 when the workers report one of the tags as broken; the error keeps the other answers."""
    broken = {tag for report in reports for tag in report["broken"]}
    if not broken:
        return
    first = next(request for request, tag in zip(requests, tags, strict=True) if tag in broken)
    error = EngineError("BP509", f"NaN or infinite activations with the patches {first.patches.to_mapping()}")
    error.answers = [None if tag in broken else one for tag, one in zip(tags, answers, strict=True)]
    raise error


def _trace_rows(
    measured: Sequence[dict[str, Any]], patches: ResolvedSet, answer: Generation, dtype: str
) -> list[TraceRow]:
    """Rows by layer and position. EngineError (BP506) when an edit that was due was not measured."""
    norms = {(layer, position): norm for rank in measured for layer, position, norm in rank["rows"]}
    length = answer.prompt_tokens + len(answer.token_ids) - 1  # the last token is not computed
    rows = []
    for layer in patches.layers:
        for segment in patches.segments(layer, 0, length, answer.prompt_tokens):
            expected = patches.expected_norm(layer, segment.coefficients)
            for position in range(segment.first, segment.last):
                if (layer, position) not in norms:
                    raise EngineError("BP506", f"no edit was measured at block {layer}, position {position}")
                rows.append(TraceRow(layer, position, norms[layer, position], expected, dtype))
    return rows


BACKEND = VLLMBackend
