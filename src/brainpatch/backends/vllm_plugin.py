"""The places that every way into vLLM passes: where it makes a request, and where its engine gets one.

vLLM loads `register` as a general plugin in each of its processes. Engines with another worker class than
ours pay one comparison for a request, and nothing else changes for them.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

from brainpatch.backends.vllm_requests import KEY, cache_salt, carried, check_fits
from brainpatch.errors import BrainPatchError, CapabilityError
from brainpatch.runtime.meaning import ResolvedSet

WORKER: Final = "brainpatch.backends.vllm_worker.BrainPatchWorker"
counters = {"refused": 0}
"""Of this process: requests that were refused for the patches they carry."""
_EMPTY = ResolvedSet()
_registered = False


class Served:
    """The patches of one HTTP request, on their way past vLLM's server, and whether they arrived."""

    def __init__(self, carried: dict[str, Any] | None) -> None:
        self.carried = carried
        self.taken = 0
        """How many requests to the engine were made under it."""


served: ContextVar[Served | None] = ContextVar("brainpatch_served", default=None)
"""What vLLM's server is answering, in the context of the request's task: no client can write to it."""


def is_registered() -> bool:
    """Whether requests that are made in this process are checked and salted."""
    return _registered


def register() -> None:
    """Have every request of our engines checked and salted. May be called again."""
    global _registered
    if _registered:
        return
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.input_processor import InputProcessor

    InputProcessor.process_inputs = _taken_in(InputProcessor.process_inputs)
    EngineCore.preprocess_add_request = _handed_over(EngineCore.preprocess_add_request)
    _registered = True


def _taken_in(original: Callable[..., Any]) -> Callable[..., Any]:
    """`process_inputs`, where a caller hears at once what is wrong, before vLLM spends anything on it."""

    @functools.wraps(original)
    def process_inputs(self: Any, *arguments: Any, **named: Any) -> Any:
        if self.vllm_config.parallel_config.worker_cls != WORKER:
            return original(self, *arguments, **named)
        parameters = _with_served(named["params"] if "params" in named else arguments[2])
        try:
            patches = _checked(self.model_config, parameters, bool(named.get("resumable")))
        except BrainPatchError as error:
            counters["refused"] += 1
            raise _as_client_error(error) from None
        if "params" in named:
            named["params"] = parameters
        else:
            arguments = (*arguments[:2], parameters, *arguments[3:])
        request = original(self, *arguments, **named)
        _salt(request, patches)
        return request

    return process_inputs


def _with_served(parameters: Any) -> Any:
    """The parameters with the patches of the HTTP request that is being served, if it has any.

    A client's own entry is left for the check to refuse, and what is no text has no parameters to carry them.
    """
    asked = served.get()
    if asked is None or not hasattr(parameters, "extra_args"):
        return parameters
    asked.taken += 1
    extra = parameters.extra_args or {}
    if asked.carried is None or KEY in extra:
        return parameters
    parameters = copy.copy(parameters)
    parameters.extra_args = {**extra, KEY: asked.carried}
    return parameters


def _handed_over(original: Callable[..., Any]) -> Callable[..., Any]:
    """`preprocess_add_request`, where the engine gets a request, made by `process_inputs` or by hand.

    vLLM fails the one request whose preprocessing raises. Salting again changes nothing.
    """

    @functools.wraps(original)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        if self.vllm_config.parallel_config.worker_cls == WORKER:
            resumable = bool(getattr(request, "resumable", False))
            model = self.vllm_config.model_config
            _salt(request, _checked(model, request.sampling_params, resumable))
        return original(self, request)

    return preprocess_add_request


def _as_client_error(error: BrainPatchError) -> BrainPatchError:
    """The same error, which vLLM's engines and server know as the client's fault and hand on as it is."""
    try:
        from vllm.exceptions import VLLMClientError
    except ImportError:  # an older vLLM, which hands on every ValueError
        return error
    kind = type(error)
    made = type(
        kind.__name__, (kind, VLLMClientError), {"__doc__": kind.__doc__, "__module__": kind.__module__}
    )
    found: BrainPatchError = made(error.code, error.reason, error.remedy)
    return found


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
