"""Patches inside vLLM: its own scheduler, batching and KV cache, on its own forward pass.

State and who owns it: the workers hold one configuration at a time, the edits of one resolved set;
`_applied` is its digest, or None when unknown. It is changed only by `_ensure`, inside the one call that
the engine takes at a time. Requests of one call that need different configurations run group by group.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any, ClassVar

from brainpatch.backends.prompts import prompt_ids
from brainpatch.backends.vllm_engine import (
    EXTENSION,
    Engine,
    availability,
    cache_arguments,
    check_arguments,
    model_config,
)
from brainpatch.backends.vllm_sampling import cache_salt, generation, sampling_params
from brainpatch.errors import (
    BackendNotAvailable,
    CapabilityError,
    EngineError,
    EngineStateError,
    RequestError,
)
from brainpatch.patch.compatibility import ModelDescriptor
from brainpatch.runtime.backend import BrainPatchBackend
from brainpatch.runtime.capabilities import Capabilities
from brainpatch.runtime.config import GenerationConfig
from brainpatch.runtime.meaning import ResolvedSet, resolve
from brainpatch.runtime.requests import Generation, Prompt, Request, TraceRow

_EMPTY = ResolvedSet()

# (relative step, smallest number) of the dtypes that a residual stream has
_PRECISION = {
    "float32": (2.0**-23, 2.0**-149),
    "bfloat16": (2.0**-8, 2.0**-133),
    "float16": (2.0**-10, 2.0**-24),
}


class VLLMBackend(BrainPatchBackend):
    """vLLM, stock, eager, with a worker extension that adds to the residual stream.

    `last_hook_report` says what the workers answered to the last change of configuration: a mapping with
    the keys digest, layers, norms {layer: L2 norm as cast}, expected {layer: L2 norm}, dtype, hooks
    (number of edited blocks), ranks.
    """

    name: ClassVar[str] = "vllm"

    def __init__(self) -> None:
        super().__init__()
        self.last_hook_report: dict[str, Any] = {}
        self._engine: Engine | None = None
        self._model: ModelDescriptor | None = None
        self._tokenizer: Any = None
        self._context = 0
        self._max_logprobs = 0
        self._applied: str | None = None
        self._rows: dict[int, int] = {}
        self._serving: str | None = None
        self._in_call = Lock()

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
            multiple_patches=True,
            cpu=True,
            cuda=True,
            server=True,
            concurrent_requests=True,
            per_request_strength=True,
            trace=True,
            notes={
                "dynamic_schedule": "the worker adds the same at every position; use a constant schedule",
                "sites": 'the worker adds at every position; only the site "all" is applied',
                "streaming": "answers come whole",
                "per_request_strength": "a request may name its own patches, but the workers hold one "
                "configuration at a time: a batch with several runs group by group",
                "concurrent_requests": "the requests of one call are batched by vLLM; one call at a time",
                "cuda": "written for it, not run on it",
                "quantization": "not checked",
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
        enforce_eager: bool = True,
        model_id: str | None = None,
        **engine: Any,
    ) -> None:
        """Start vLLM on a hub id or a folder. A model that is loaded already is unloaded first.

        `max_model_len` is capped to the model's context. `model_id` is the name that patches know the
        model by, where `model` is a folder. `engine` goes to `vllm.LLM` as it is; code from the model's
        repository runs only if it says `trust_remote_code`.

        Errors: CapabilityError (BP502) for arguments that patches cannot live with,
        BackendNotAvailable (BP501), EngineError (BP503, BP504, BP506, BP507). Nothing is left running.
        """
        check_arguments(enforce_eager, engine)
        ok, detail = self.is_available()
        if not ok:
            raise BackendNotAvailable("BP501", f"vllm: {detail}")
        self.unload()
        arguments = {
            key: value for key, value in engine.items() if key not in ("device", "worker_extension_cls")
        }
        arguments |= {"model": str(model), "revision": revision, "dtype": dtype}
        config = model_config(arguments)
        self._context = min(max_model_len, int(config.max_model_len))
        self._max_logprobs = int(config.max_logprobs)
        arguments |= {
            "max_model_len": self._context,
            "gpu_memory_utilization": gpu_memory_utilization,
            "enforce_eager": True,
            "worker_extension_cls": EXTENSION,
            **cache_arguments(engine),
        }
        with self._exclusive():
            self._engine = Engine(arguments)
            try:
                self._tokenizer = self._engine.llm.get_tokenizer()
                probe = self._find_forms(self._engine)
                self._model = ModelDescriptor(
                    model_id=str(model) if model_id is None else model_id,
                    hidden_size=probe["hidden_size"],
                    num_layers=probe["num_layers"],
                    architecture=(config.hf_config.architectures or [""])[0],
                    revision=revision,
                )
                self._applied = _EMPTY.digest
            except BaseException:
                self._close()
                raise

    def _find_forms(self, engine: Engine) -> dict[str, Any]:
        """Prove that an edit reaches the stream, block kind by block kind; returns rank 0's probe."""
        probes = engine.rpc("bp_probe")
        total = probes[0]["num_layers"]
        missing = sorted(set(range(total)) - {layer for probe in probes for layer in probe["local_layers"]})
        if missing:
            raise EngineError(
                "BP503", f"no rank holds the blocks {missing} of {total} at {probes[0]['path']}"
            )
        self._watched_pass(engine, -1, 0)
        cases = {(case[0], case[1]) for rank in engine.rpc("bp_form_stop") for case in rank["cases"]}
        for layer, element in sorted(cases):
            self._watched_pass(engine, layer, element)
            engine.rpc("bp_form_stop")
        result: dict[str, Any] = engine.rpc("bp_form_result")[0]
        expected, found = result["expected_form"], set(result["forms"].values())
        if expected is not None and found - {expected}:
            self._warn(
                f"the blocks return {', '.join(sorted(found))}, and {expected} was expected; what was found is used"
            )
        return result

    def _watched_pass(self, engine: Engine, layer: int, element: int) -> None:
        engine.rpc("bp_form_start", layer, element)
        probe = Request(tuple(range(min(8, self._context - 1))), GenerationConfig(max_new_tokens=1), _EMPTY)
        self._ask(engine, [probe], salt=f"brainpatch-probe:{uuid.uuid4()}")

    def describe_model(self) -> ModelDescriptor:
        """Identity and shape of the loaded model. EngineStateError (BP407) when there is none."""
        if self._model is None:
            raise self._nothing_loaded()
        return self._model

    def unload(self) -> None:
        """End the engine and its processes. Installed patches go with the model they were checked on."""
        with self._exclusive():
            self._close()

    def _close(self) -> None:
        engine, self._engine = self._engine, None
        self._model = self._tokenizer = self._applied = self._serving = None
        super().unload()
        self.last_hook_report = {}
        if engine is not None:
            engine.close()

    def _loaded(self) -> Engine:
        if self._engine is None:
            raise self._nothing_loaded()
        return self._engine

    # --- what is refused ---------------------------------------------------------------------

    def _check_config(self, config: GenerationConfig) -> None:
        sampling_params(config, max_logprobs=self._max_logprobs)

    def _check_patches(self, patches: ResolvedSet) -> None:
        if not patches.depends_on_position:
            return
        notes = self.capabilities().notes
        for patch in patches.patches:
            if any(item.site != "all" for item in patch.interventions):
                raise CapabilityError("BP502", f'{patch.name} has another site than "all": {notes["sites"]}')
            if patch.schedule is not None and not patch.schedule.is_constant():
                raise CapabilityError("BP502", f"{patch.name} has a schedule: {notes['dynamic_schedule']}")

    def _before_patches_change(self) -> None:
        if self._serving is not None:
            raise EngineStateError(
                "BP408", "patches were to be changed between begin_serving and end_serving"
            )

    def _encode(self, prompt: Prompt, *, use_chat_template: bool, system: str | None) -> list[int]:
        return prompt_ids(self._tokenizer, prompt, use_chat_template=use_chat_template, system=system)

    def _context_length(self) -> int | None:
        return self._context

    def _check_served(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if self._serving not in (None, request.patches.digest):
                raise EngineStateError(
                    "BP408",
                    f"a request for {request.patches.to_mapping()} needs another set than the served one",
                )

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One call at a time; another thread's is refused, not queued (EngineStateError BP409)."""
        if not self._in_call.acquire(blocking=False):
            raise EngineStateError("BP409", "another call is running on this vLLM engine")
        try:
            yield
        finally:
            self._in_call.release()

    # --- the workers' configuration ------------------------------------------------------------

    def _ensure(self, engine: Engine, patches: ResolvedSet) -> None:
        """Make the workers hold `patches`; sends the edits only when they hold another set."""
        if self._applied == patches.digest:
            return
        self._applied = None
        edits = {layer: _static_coefficients(patches, layer) for layer in patches.layers}
        probes = engine.rpc(
            "bp_apply_deltas", {layer: patches.sum(layer, edit).tolist() for layer, edit in edits.items()}
        )
        if any(probe["was_broken"] for probe in probes):
            engine.rpc("bp_clear_cache")
            engine.reset_cache()
        report = _agreed(probes)
        expected = {layer: patches.expected_norm(layer, edit) for layer, edit in edits.items()}
        if report["layers"] != list(patches.layers):
            raise EngineError(
                "BP506", f"blocks {list(patches.layers)} were to be edited, {report['layers']} are"
            )
        step, smallest = _PRECISION.get(report["dtype"], (2.0**-7, 2.0**-24))
        slack = smallest * math.sqrt(probes[0]["hidden_size"])
        for layer, norm in expected.items():
            if abs(report["norms"][layer] - norm) > step * norm + slack:
                raise EngineError(
                    "BP506",
                    f"the edit at block {layer} has norm {report['norms'][layer]:g}, expected {norm:g}",
                )
        self.last_hook_report = {"digest": patches.digest, "expected": expected, **report}
        self._rows = dict.fromkeys(expected, 0)
        self._applied = patches.digest

    def worker_state(self) -> list[dict[str, Any]]:
        """What every worker says about itself and its edits now, one mapping a rank; see `bp_probe`."""
        with self._exclusive():
            return self._loaded().rpc("bp_probe")

    def weights_digest(self) -> list[str]:
        """SHA-256 of the parameters and buffers that each rank holds (law 2)."""
        with self._exclusive():
            return [result["digest"] for result in self._loaded().rpc("bp_weights_digest")]

    def begin_serving(self) -> None:
        """Apply the installed defaults and freeze them until `end_serving`.

        In between, a change of patches and a request that needs another configuration are refused
        (EngineStateError BP408).
        """
        with self._exclusive():
            engine = self._loaded()
            defaults = resolve(None, self._snapshot(), warn=self._warn)
            self._check_patches(defaults)
            self._ensure(engine, defaults)
            self._serving = defaults.digest

    def end_serving(self) -> None:
        """Allow changes again."""
        self._serving = None

    # --- text --------------------------------------------------------------------------------

    def _run(self, requests: Sequence[Request]) -> list[Generation]:
        self._check_served(requests)
        with self._exclusive():
            engine = self._loaded()
            answers: dict[int, Generation] = {}
            for members in self._groups(requests):
                group = [requests[index] for index in members]
                self._ensure(engine, group[0].patches)
                made = self._ask(engine, group)
                self._check_work(engine, group[0].patches, made)
                answers |= zip(members, made, strict=True)
            return [answers[index] for index in range(len(requests))]

    def _groups(self, requests: Sequence[Request]) -> list[list[int]]:
        """Indices of requests that need one configuration, the one that is applied now first."""
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(request.patches.digest, []).append(index)
        return [groups[digest] for digest in sorted(groups, key=lambda digest: digest != self._applied)]

    def _ask(self, engine: Engine, group: Sequence[Request], salt: str | None = None) -> list[Generation]:
        """Generate requests of one configuration; `salt` replaces theirs."""
        from vllm.inputs import TokensPrompt

        prompts = []
        for request in group:
            prompt = TokensPrompt(prompt_token_ids=list(request.prompt_ids))
            own = cache_salt(request.patches, request.config) if salt is None else salt
            if own is not None:
                prompt["cache_salt"] = own
            prompts.append(prompt)
        parameters = [sampling_params(request.config, max_logprobs=self._max_logprobs) for request in group]
        try:
            outputs = engine.llm.generate(prompts, parameters, use_tqdm=False)
        except Exception as error:
            engine.abort()
            self._applied = None
            if type(error).__name__ == "VLLMValidationError":  # found out when the request was handed in
                raise RequestError("BP404", f"vLLM refuses the request: {error}") from None
            raise EngineError("BP508", f"{type(error).__name__}: {error}") from error
        except BaseException:
            engine.abort()
            self._applied = None  # what ran until now was not checked
            raise
        return [
            generation(output, request.config, request.patches)
            for output, request in zip(outputs, group, strict=True)
        ]

    def _check_work(self, engine: Engine, patches: ResolvedSet, made: Sequence[Generation]) -> None:
        """Every computed token went through every edited block's hook (BP506), and no logit broke (BP509)."""
        if not self._rows:
            return
        probes = engine.rpc("bp_probe")
        counted = {int(layer): rows for probe in probes for layer, rows in probe["rows_edited"].items()}
        computed = sum(one.prompt_tokens - one.cached_tokens + len(one.token_ids) - 1 for one in made)
        for layer, before in self._rows.items():
            edited = counted.get(layer, 0) - before
            if edited < computed:
                raise EngineError("BP506", f"block {layer} was edited for {edited} of {computed} tokens")
        self._rows = {layer: counted[layer] for layer in self._rows}
        if any(probe["broken_logits"] for probe in probes):
            self._applied = None  # so that the next call applies anew, and clears what was broken
            raise EngineError("BP509", f"NaN or infinite logits with the patches {patches.to_mapping()}")

    def _run_trace(self, request: Request) -> list[TraceRow]:
        self._check_served([request])
        with self._exclusive():
            engine = self._loaded()
            self._ensure(engine, request.patches)
            engine.rpc("bp_trace_start")
            try:
                # a salt of its own: every position is computed, none comes from the cache
                answer = self._ask(engine, [request], salt=f"brainpatch-trace:{uuid.uuid4()}")[0]
            finally:
                measured = engine.rpc("bp_trace_stop")
            self._check_work(engine, request.patches, [answer])
            length = answer.prompt_tokens + len(answer.token_ids) - 1
            return _trace_rows(measured, request.patches, length, self.last_hook_report)


def _static_coefficients(patches: ResolvedSet, layer: int) -> tuple[float, ...]:
    """The layer's coefficients, for a set that does not depend on position."""
    return patches.segments(layer, 0, 1, 1)[0].coefficients


def _agreed(probes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The report of all ranks as one. EngineError (BP508) when two ranks of one block differ."""
    norms: dict[int, float] = {}
    for probe in probes:
        for layer, norm in probe["norms"].items():
            if norms.setdefault(int(layer), norm) != norm:
                raise EngineError("BP508", f"the ranks hold different edits at block {layer}")
    if len({probe["dtype"] for probe in probes}) != 1:
        raise EngineError("BP508", "the ranks run in different dtypes")
    return {
        "layers": sorted(norms),
        "norms": dict(sorted(norms.items())),
        "dtype": probes[0]["dtype"],
        "hooks": len(norms),
        "ranks": len(probes),
    }


def _trace_rows(
    measured: Sequence[Mapping[str, Any]], patches: ResolvedSet, length: int, report: Mapping[str, Any]
) -> list[TraceRow]:
    """Rows by layer and position. EngineError (BP508) unless every position was seen exactly once."""
    rows: dict[tuple[int, int], TraceRow] = {}
    for rank in measured:
        for name, norms in rank["norms"].items():
            layer = int(name)
            # an engine that schedules ahead may compute one more token than the answer has
            seen = [(p, n) for p, n in zip(rank["positions"], norms, strict=False) if p < length]
            if sorted(p for p, _ in seen) != list(range(length)):
                raise EngineError("BP508", f"the trace saw {len(seen)} rows for {length} positions")
            for position, norm in seen:
                row = TraceRow(layer, position, norm, report["expected"][layer], report["dtype"])
                rows.setdefault((layer, position), row)
    if len(rows) != length * len(patches.layers):
        raise EngineError(
            "BP506", f"{len(rows)} edits were measured, {length * len(patches.layers)} were due"
        )
    return [rows[key] for key in sorted(rows)]


BACKEND = VLLMBackend
