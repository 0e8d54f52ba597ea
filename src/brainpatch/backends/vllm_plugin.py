"""The one place that every way into vLLM passes: where it turns a prompt and its parameters into a request.

vLLM loads `register` as a general plugin in each of its processes. Engines with another worker class than
ours pay one comparison for a request, and nothing else changes for them.
"""

from __future__ import annotations

import functools
from typing import Any, Final

from brainpatch.backends.vllm_requests import KEY, cache_salt, carried, check_fits
from brainpatch.errors import CapabilityError
from brainpatch.runtime.meaning import ResolvedSet

WORKER: Final = "brainpatch.backends.vllm_worker.BrainPatchWorker"
_EMPTY = ResolvedSet()
_registered = False


def is_registered() -> bool:
    """Whether requests that are made in this process are checked and salted."""
    return _registered


def register() -> None:
    """Have every request of our engines checked and salted. May be called again."""
    global _registered
    if _registered:
        return
    from vllm.v1.engine.input_processor import InputProcessor

    original = InputProcessor.process_inputs

    @functools.wraps(original)
    def process_inputs(self: Any, *arguments: Any, **named: Any) -> Any:
        if self.vllm_config.parallel_config.worker_cls != WORKER:
            return original(self, *arguments, **named)
        parameters = named["params"] if "params" in named else arguments[2]
        # before vLLM spends anything on the request
        patches = _checked(self.model_config, parameters, bool(named.get("resumable")))
        request = original(self, *arguments, **named)
        _salt(request, patches)
        return request

    InputProcessor.process_inputs = process_inputs
    _registered = True


def _checked(model: Any, parameters: Any, resumable: bool) -> ResolvedSet:
    """The patches that a request carries. Errors: RequestError (BP410), CapabilityError (BP502)."""
    found = carried(parameters)
    if found is None:
        return _EMPTY
    check_fits(found.patches, model.get_total_num_hidden_layers(), model.get_hidden_size())
    if resumable:
        raise CapabilityError(
            "BP502", "a request whose prompt comes in pieces has no fixed prompt length; patches need one"
        )
    return found.patches


def _salt(request: Any, patches: ResolvedSet) -> None:
    """Set the salt on the engine's own copy of the request; what the caller passed stays as it is."""
    extra = getattr(request.sampling_params, "extra_args", None)
    if patches.is_empty and extra and KEY in extra:
        request.sampling_params.extra_args = {k: v for k, v in extra.items() if k != KEY} or None
    request.cache_salt = cache_salt(patches, prompt_length(request), request.cache_salt)


def prompt_length(request: Any) -> int:
    """The number of the prompt's positions, of an engine's request or a worker's NewRequestData."""
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return len(request.prompt_embeds)
