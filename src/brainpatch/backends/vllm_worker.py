"""The classes that a user's vLLM is started with.

- `BrainPatchWorker` for `worker_cls`: every request its own patches, eager or compiled.
- `BrainPatchWorkerExtension` for `worker_extension_cls`: one set of patches for all requests, eager only,
  beside a worker class of somebody else's.

Methods named bp_* are called over `collective_rpc`, take and return plain values only, and report failures
as a result (`{"error": {"code", "reason"}}`): an exception in a worker ends vLLM's engine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from brainpatch.backends import vllm_plugin
from brainpatch.backends.vllm_digest import weights_digest
from brainpatch.backends.vllm_engine import LOAD_ERROR_FILE, availability
from brainpatch.backends.vllm_extension import BrainPatchWorkerExtension, reported
from brainpatch.backends.vllm_forms import locate_blocks
from brainpatch.backends.vllm_health import Health, check_layout
from brainpatch.backends.vllm_hooks import dtype_name
from brainpatch.backends.vllm_plane import Plane, PlaneTrace, wrap
from brainpatch.backends.vllm_proof import find_forms, prove_edits
from brainpatch.backends.vllm_requests import carried
from brainpatch.backends.vllm_runners import watch
from brainpatch.backends.vllm_seeds import kept_seeds
from brainpatch.errors import BackendNotAvailable, BrainPatchError, CapabilityError, EngineError

__all__ = ["BrainPatchWorker", "BrainPatchWorkerExtension"]

_GRAPH_VERSION = "1"
"""Part of vLLM's compile-cache key. Changes with the operations that are traced into the graph."""


def _platform_worker() -> Any:
    """The worker class of the platform that vLLM runs on. CapabilityError (BP502) for others than CPU and CUDA."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    if current_platform.is_cuda():
        from vllm.v1.worker.gpu_worker import Worker

        return Worker
    raise CapabilityError(
        "BP502", f"vLLM's platform {current_platform.device_name!r} is not supported; CPU and CUDA are"
    )


class BrainPatchWorker(_platform_worker()):  # type: ignore[misc]
    """The platform's own worker, with a plane between its blocks. Its state belongs to the worker's one thread."""

    def __init__(self, vllm_config: Any, *arguments: Any, **named: Any) -> None:
        with _load_errors():
            _check_engine(vllm_config)
            _own_compile_cache(vllm_config)
        super().__init__(vllm_config, *arguments, **named)
        self._bp_health = Health()
        self._bp_admitted = 0
        self._bp_batch: tuple[list[str], np.ndarray] | None = None

    def load_model(self, *arguments: Any, **named: Any) -> Any:
        """As the platform's; then every block is wrapped, before vLLM compiles them."""
        result = super().load_model(*arguments, **named)
        with _load_errors():
            config = self.model_runner.model_config
            self._bp_blocks = locate_blocks(self.get_model(), config.hf_config)
            mode = self.vllm_config.compilation_config.mode
            self._bp_compiled = mode is not None and int(mode) != 0
            # A graph that is captured without compilation needs the operation, too.
            self._bp_compiled |= self.model_runner.device.type == "cuda" and not config.enforce_eager
            self._bp_plane = _plane(
                self._bp_blocks.local, config.get_hidden_size(), config.dtype, self.model_runner.device
            )
            for layer, block in self._bp_blocks.local.items():
                wrap(block, layer, self._bp_plane, compiled=self._bp_compiled)
            self._bp_runner = watch(self.model_runner, self._bp_begin)
        return result

    def compile_or_warm_up_model(self) -> Any:
        """As the platform's; then it is proven that edits act."""
        result = super().compile_or_warm_up_model()
        with _load_errors():
            plane = self._bp_plane
            plane.forms, vector = find_forms(self.model_runner, self._bp_runner, plane, self._bp_blocks.local)
            prove_edits(self.model_runner, self._bp_runner, plane, vector)
            check_layout(self.model_runner)
        return result

    def execute_model(self, scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
        """As the platform's, with requests coming and going, and edits in the forward pass."""
        health, plane = self._bp_health, self._bp_plane
        for request in scheduler_output.finished_req_ids:
            plane.table.release(request)
            health.release(request)
        # Blocks of a preempted request are handed out at once, and its last step may not be judged yet.
        health.catch_up(wait=bool(getattr(scheduler_output, "preempted_req_ids", None)))
        health.clean(scheduler_output, self.model_runner)
        for new in scheduler_output.scheduled_new_reqs:
            self._bp_admit(new)
        if plane.table.live_requests:
            health.note_blocks(scheduler_output)
        self._bp_batch = None
        try:
            output = super().execute_model(scheduler_output, *arguments, **named)
        finally:
            plane.end()
        self._bp_look()
        return output

    def sample_tokens(self, *arguments: Any, **named: Any) -> Any:
        """As the platform's, which on a CPU would not survive a seed."""
        with kept_seeds(self.model_runner):
            return super().sample_tokens(*arguments, **named)

    def _bp_look(self) -> None:
        """After a pass with patched requests in the engine: are their activations still numbers?"""
        hidden = getattr(self.model_runner.execute_model_state, "hidden_states", None)
        if self._bp_batch is not None and hidden is not None:
            self._bp_health.look(hidden, *self._bp_batch)

    def _bp_admit(self, new: Any) -> None:
        found = carried(new.sampling_params)  # raises nothing: checked where the engine got it
        if found is None:
            return
        self._bp_admitted += 1
        plane = self._bp_plane
        plane.table.admit(new.req_id, found.patches, vllm_plugin.prompt_length(new))
        self._bp_health.admit(new.req_id, found.tag)
        if found.trace:
            plane.trace = plane.trace or PlaneTrace()
            plane.trace.watch(new.req_id, found.tag)

    def _bp_begin(self, requests: Any, counts: np.ndarray, positions: np.ndarray) -> None:
        plane = self._bp_plane
        if plane.proving:  # a pass over made-up requests, whose edits are set already
            return
        plane.begin(requests, counts, positions)
        if plane.table.live_requests:  # one that is edited no more may still break of what it was given
            self._bp_batch = requests, counts

    # --- called by name --------------------------------------------------------------------------

    @reported
    def bp_probe(self) -> dict[str, Any]:
        """What is there: path, num_layers (of the whole model), local_layers, hidden_size, dtype (of the
        stream), forms {layer: form}, expected_form (by the table of families), runner, compiled."""
        blocks = self._bp_blocks
        return {
            "path": blocks.path,
            "num_layers": blocks.total,
            "local_layers": sorted(blocks.local),
            "hidden_size": self._bp_plane.table.hidden_size,
            "dtype": dtype_name(self._bp_plane.dtype),
            "forms": {str(layer): form for layer, form in self._bp_plane.forms.items()},
            "expected_form": blocks.expected_form,
            "runner": self._bp_runner,
            "compiled": self._bp_compiled,
        }

    @reported
    def bp_state(self) -> dict[str, Any]:
        """What is live now, and totals since the start: live_requests, live_sets, live_vectors, slots (the
        size of the vector table), admitted, broken (requests whose activations were no numbers), steps,
        rows_edited, blocks_edited, blocks_missed."""
        plane = self._bp_plane
        plane.settle()
        return {
            "live_requests": plane.table.live_requests,
            "live_sets": plane.table.live_sets,
            "live_vectors": plane.table.live_vectors,
            "slots": len(plane.table.vectors),
            "admitted": self._bp_admitted,
            "broken": self._bp_health.total,
            **plane.counters,
        }

    @reported
    def bp_apply_deltas(self, _deltas: Any) -> dict[str, Any]:
        """Refused: this worker takes patches with each request, and one set for all would share cached blocks."""
        raise CapabilityError(
            "BP502",
            "BrainPatchWorker takes patches with each request",
            "Use sampling_params(patches=...), or start vLLM with BrainPatchWorkerExtension alone.",
        )

    @reported
    def bp_broken(self, tags: list[str]) -> dict[str, Any]:
        """Which of these requests had activations that are not finite: {"broken": [tag, ...]}."""
        self._bp_health.catch_up()
        return {"broken": [tag for tag in tags if tag in self._bp_health.broken]}

    @reported
    def bp_trace_take(self, tag: str) -> dict[str, Any]:
        """What was measured for a traced request, and forget it: {"rows": [[layer, position, norm], ...]}."""
        plane = self._bp_plane
        norms = {} if plane.trace is None else plane.trace.take(tag)
        if plane.trace is not None and plane.trace.is_empty:
            plane.trace = None
        return {"rows": [[layer, position, norm] for (layer, position), norm in sorted(norms.items())]}

    @reported
    def bp_weights_digest(self) -> dict[str, Any]:
        """SHA-256 of this rank's weights; see `vllm_digest.weights_digest`."""
        return {"digest": weights_digest(self.get_model())}


def _plane(layers: Iterable[int], hidden_size: int, dtype: torch.dtype, device: torch.device) -> Plane:
    if device.type == "cpu":
        return Plane(layers, hidden_size, dtype)
    from brainpatch.backends.vllm_device_plane import DevicePlane

    return DevicePlane(layers, hidden_size, dtype, device)


def _check_engine(vllm_config: Any) -> None:
    """Refuse by name what patches cannot live with. Errors: BackendNotAvailable (BP501) for the version,
    CapabilityError (BP502), EngineError (BP508)."""
    ok, detail = availability()
    if not ok:
        raise BackendNotAvailable("BP501", detail)
    parallel, passes = vllm_config.parallel_config, vllm_config.compilation_config.pass_config
    if parallel.worker_cls != vllm_plugin.WORKER:
        raise CapabilityError(
            "BP502",
            f"worker_cls is {parallel.worker_cls}; requests are checked for {vllm_plugin.WORKER} only",
        )
    if not vllm_plugin.is_registered():
        raise EngineError(
            "BP508",
            f"vLLM did not load the plugin brainpatch (VLLM_PLUGINS={os.environ.get('VLLM_PLUGINS')!r}); "
            "without it nothing keeps cached blocks of different patches apart",
            "Add brainpatch to VLLM_PLUGINS, or unset it; and install brainpatch where vLLM runs.",
        )
    rows = "a block then sees other rows than the batch has"
    refused = [
        (
            "micro-batches (enable_dbo, ubatch_size)",
            getattr(parallel, "enable_dbo", False) or getattr(parallel, "ubatch_size", 0) > 1,
            rows,
        ),
        (
            "prefill context parallelism",
            getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            rows,
        ),
        ("sequence parallelism (pass_config.enable_sp)", getattr(passes, "enable_sp", False), rows),
        (
            "kv_sharing_fast_prefill",
            getattr(vllm_config.cache_config, "kv_sharing_fast_prefill", False),
            rows,
        ),
        (
            "distributed_executor_backend='ray' with VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0",
            _goes_around(parallel.distributed_executor_backend),
            "that executor does not call the worker",
        ),
        (
            "speculation with async scheduling on an accelerator",
            vllm_config.speculative_config is not None
            and vllm_config.scheduler_config.async_scheduling
            and vllm_config.device_config.device_type != "cpu",
            "the host does not know the positions of a step; set async_scheduling=False",
        ),
        (
            "kv_transfer_config",
            vllm_config.kv_transfer_config is not None,
            "it is not proven that stores outside the engine keep the blocks of different patches apart",
        ),
    ]
    for what, asked, why in refused:
        if asked:
            raise CapabilityError("BP502", f"{what}: {why}")


def _goes_around(executor: Any) -> bool:
    """Whether this executor calls the model runner itself, and not the worker."""
    from vllm import envs

    if executor == "ray":
        return not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", False)
    kinds = executor.__mro__ if isinstance(executor, type) else ()
    return any(kind.__name__ == "RayDistributedExecutor" for kind in kinds)


def _own_compile_cache(vllm_config: Any) -> None:
    """Make the graph with our operation another one to vLLM's compile cache, whose key leaves the worker out."""
    given = vllm_config.additional_config
    if isinstance(given, dict):
        vllm_config.additional_config = {**given, "brainpatch": _GRAPH_VERSION}
    else:
        vllm_config.additional_config = _Hashed(given)


class _Hashed:
    """An additional_config that is no mapping, told apart from itself in a plain engine."""

    def __init__(self, given: Any) -> None:
        self._given = given

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)

    def compute_hash(self) -> str:
        """The given one's hash, marked."""
        return f"{self._given.compute_hash()}-brainpatch-{_GRAPH_VERSION}"


@contextmanager
def _load_errors() -> Iterator[None]:
    """Leave an error's code for the process that started this one; vLLM passes on that it failed, not why."""
    try:
        yield
    except BrainPatchError as error:
        if target := os.environ.get(LOAD_ERROR_FILE):
            Path(target).write_text(json.dumps({"code": error.code, "reason": error.reason}))
        raise
