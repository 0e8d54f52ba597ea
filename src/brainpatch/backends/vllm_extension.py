"""One set of patches for all requests of a worker: what `worker_extension_cls` adds to somebody else's.

They are called by name over `collective_rpc`, take and return plain values only, and report failures as
a result (`{"error": {"code", "reason"}}`): an exception in a worker ends vLLM's engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from brainpatch.backends.vllm_digest import weights_digest
from brainpatch.backends.vllm_forms import FormFinder, locate_blocks, tensors_in
from brainpatch.backends.vllm_hooks import BlockEditor, MethodTap, Trace, dtype_name
from brainpatch.errors import BrainPatchError, EngineError

Method = Callable[..., dict[str, Any]]


def reported(method: Method) -> Method:
    """A method of a worker whose failures are results."""

    @functools.wraps(method)
    def call(*arguments: Any) -> dict[str, Any]:
        try:
            return method(*arguments)
        except BrainPatchError as error:
            return {"error": {"code": error.code, "reason": error.reason}}
        except Exception as error:  # whatever it is, the engine must live and the caller must know
            return {"error": {"code": "BP508", "reason": f"{type(error).__name__}: {error}"}}

    return call


class _State:
    """What this extension keeps on a worker."""

    def __init__(self, worker: Any) -> None:
        config = worker.model_runner.model_config
        mode = worker.vllm_config.compilation_config.mode
        if mode is not None and int(mode) != 0:
            raise EngineError(
                "BP505", f"vLLM's compilation mode is {int(mode)}; load with enforce_eager=True"
            )
        self.model: nn.Module = worker.get_model()
        self.located = locate_blocks(self.model, config.hf_config)
        self.editor = BlockEditor(
            self.model,
            self.located.local,
            config.get_hidden_size(),
            config.dtype,
            worker.model_runner.device,
        )
        self.finder: FormFinder | None = None
        self.tap: MethodTap | None = None


class BrainPatchWorkerExtension:
    """Edits of the residual stream for all requests that a worker runs, by hooks in an eager engine."""

    if TYPE_CHECKING:
        _bp_kept: _State
        model_runner: Any

    def _bp_state(self) -> _State:
        if "_bp_kept" not in self.__dict__:
            self._bp_kept = _State(self)
        return self._bp_kept

    @reported
    def bp_probe(self) -> dict[str, Any]:
        """What is there and what is applied.

        Keys: path, num_layers (of the whole model), local_layers, hidden_size, dtype (of the stream, from the
        model's config), forms {layer: form}, expected_form (by the table of families), layers (edited now),
        norms {layer: L2 norm as cast}, hook_calls and rows_edited {layer: count since the last apply},
        broken_logits (NaN or infinite ones since then), hooks (on all modules, ours and others').
        """
        state = self._bp_state()
        editor = state.editor
        return {
            "path": state.located.path,
            "num_layers": state.located.total,
            "local_layers": sorted(editor.blocks),
            "hidden_size": editor.hidden_size,
            "dtype": dtype_name(editor.dtype),
            "forms": {str(layer): form for layer, form in editor.forms.items()},
            "expected_form": state.located.expected_form,
            "layers": sorted(editor.deltas),
            "norms": {str(layer): norm for layer, norm in editor.norms().items()},
            "hook_calls": {str(layer): count.calls for layer, count in editor.counts.items()},
            "rows_edited": {str(layer): count.rows for layer, count in editor.counts.items()},
            "broken_logits": editor.broken,
            "hooks": sum(
                len(module._forward_hooks) + len(module._forward_pre_hooks)
                for module in state.model.modules()
            ),
        }

    @reported
    def bp_apply_deltas(self, deltas: Mapping[int | str, Sequence[float]]) -> dict[str, Any]:
        """Replace what is added: block number -> hidden_size numbers; an empty mapping removes all.

        The caller sums; the numbers are cast once to the stream's dtype. Returns what `bp_probe` does, and
        `was_broken`: whether logits broke under the edits that were replaced, see `bp_clear_cache`.
        """
        state = self._bp_state()
        was_broken = state.editor.broken
        state.editor.apply({int(layer): values for layer, values in deltas.items()}, state.located.total)
        return {**self.bp_probe(), "was_broken": was_broken}

    @reported
    def bp_clear_cache(self) -> dict[str, Any]:
        """Overwrite the KV cache with zeros. Only while no request runs; then reset the prefix cache.

        A NaN that is left in a freed block reaches whoever gets the block next: attention kernels
        multiply what is beyond a request's end by 0, and 0 times NaN is NaN.
        """
        for tensor in tensors_in(self.model_runner.kv_caches):
            tensor.zero_()
        return {}

    @reported
    def bp_weights_digest(self) -> dict[str, Any]:
        """SHA-256 of this rank's weights; see `vllm_digest.weights_digest`."""
        return {"digest": weights_digest(self._bp_state().model)}

    @reported
    def bp_form_start(self, layer: int, element: int) -> dict[str, Any]:
        """Watch the next forward pass, with a test edit on an element of a block's output (-1: none)."""
        state = self._bp_state()
        editor = state.editor
        if state.finder is None:
            state.finder = FormFinder(state.model, editor.blocks, editor.hidden_size, editor.dtype)
        state.finder.start((layer, element))
        return {}

    @reported
    def bp_form_stop(self) -> dict[str, Any]:
        """End of the watched pass. Returns {"cases": [[layer, element], ...]}: what to try next."""
        finder = self._bp_state().finder
        return {"cases": [list(case) for case in finder.stop()] if finder else []}

    @reported
    def bp_form_result(self) -> dict[str, Any]:
        """Judge the watched passes and keep the forms. Returns what `bp_probe` does."""
        state = self._bp_state()
        if state.finder is not None:
            state.editor.forms = state.finder.forms()
            state.finder = None
        return self.bp_probe()

    @reported
    def bp_trace_start(self) -> dict[str, Any]:
        """Measure at the edited blocks what is added, from now on."""
        state = self._bp_state()
        trace = state.editor.trace = Trace()

        # vLLM's runners name every argument; the second by position is the same one
        def seen(_result: Any, *arguments: Any, **named: Any) -> None:
            positions = named["positions"] if "positions" in named else arguments[1]
            trace.positions.append((positions if positions.dim() == 1 else positions[0]).clone())

        state.tap = MethodTap(state.model, "forward", seen)
        return {}

    @reported
    def bp_trace_stop(self) -> dict[str, Any]:
        """End of the measurement: {"positions": [...], "norms": {layer: [...]}}, row by row."""
        state = self._bp_state()
        trace, state.editor.trace = state.editor.trace, None
        if state.tap is not None:
            state.tap.remove()
            state.tap = None
        if trace is None:
            return {"positions": [], "norms": {}}
        return {
            "positions": [p for chunk in trace.positions for p in chunk.tolist()],
            "norms": {
                str(layer): [n for chunk in chunks for n in chunk.tolist()]
                for layer, chunks in trace.norms.items()
            },
        }
