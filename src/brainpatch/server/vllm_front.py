"""vLLM's own OpenAI server, with patches: a middleware around its application.

    python -m vllm.entrypoints.openai.api_server --model M \\
        --worker-cls brainpatch.backends.vllm_worker.BrainPatchWorker \\
        --middleware brainpatch.server.vllm_front.BrainPatchMiddleware

What the operator decides comes from the environment (`server.settings`), users' keys from vLLM's own --api-key.
The middleware reads the body of a request, takes the patches out of it, and lets vLLM answer; on the other side,
where vLLM makes a request for its engine, `vllm_plugin` puts them in. Between the two they travel in a context
variable. So routes that this module never heard of take patches as well, and what never reached the engine
is an error, not an answer without patches.

State and who owns it: each of vLLM's API server processes has a middleware with a backend of its own, which lives
on that process's event loop. Patches travel with requests, so replicas of the engine know nothing of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from functools import partial
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from brainpatch.backends.vllm_backend import VLLMBackend
from brainpatch.backends.vllm_plugin import WORKER, Served, served
from brainpatch.backends.vllm_requests import carry
from brainpatch.errors import BrainPatchError, CapabilityError, ServerError
from brainpatch.server import metrics
from brainpatch.server.access import Access
from brainpatch.server.asked import FIELD, Asked, asked
from brainpatch.server.echo import echo_of
from brainpatch.server.http import (
    ClientGone,
    header,
    json_object,
    maybe_json_object,
    read_body,
    refuse,
    replayed,
)
from brainpatch.server.logs import log_to_stderr
from brainpatch.server.patches_api import PatchesApi, answer_errors, install_at_start
from brainpatch.server.settings import Settings
from brainpatch.server.vllm_answers import EchoSend, ModelsSend, Numbers, with_length

_TOKEN_ROUTES: Final = ("/tokenize", "/detokenize")
"""They take a model's name and give nothing that a patch could change."""
_MARK: Final = "brainpatch"
_log = logging.getLogger("brainpatch.server")


class BrainPatchMiddleware:
    """For `--middleware`. Given twice, the outer one works."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._front: Front | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "lifespan":
            await self._start(scope, receive, send)
        elif scope["type"] == "http" and _MARK not in scope:
            if self._front is None:
                await refuse(ServerError("BP706", "the server has not started"), scope, receive, send)
            else:
                await self._front({**scope, _MARK: True}, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _start(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Put patches on the model before the server takes requests; it does not start when that fails."""
        message = await receive()
        if scope.get(_MARK) is None:
            try:
                self._front = Front(self._app, scope["app"].state)
            except Exception as error:  # a server would start without patches, and look healthy
                _log.error("%s", error, exc_info=None if isinstance(error, BrainPatchError) else error)
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                raise SystemExit(1) from None  # or the process would end as if all were well

        first = [message]

        async def again() -> Message:
            return first.pop() if first else await receive()

        await self._app({**scope, _MARK: True}, again, send)


class Front:
    """One server's patches, and the way of a request through it."""

    def __init__(self, app: ASGIApp, state: Any) -> None:
        """Errors: CapabilityError (BP502) for an engine without our worker, and those of the patches."""
        engine, arguments = state.engine_client, state.args
        config = engine.vllm_config
        if config.parallel_config.worker_cls != WORKER:
            raise CapabilityError(
                "BP502",
                f"the server was started with worker_cls={config.parallel_config.worker_cls!r}",
                f"Add --worker-cls {WORKER}.",
            )
        log_to_stderr()
        self._app = app
        self._state = state
        self.settings = Settings.from_environment(api_keys=_vllm_keys(arguments))
        processes = int(getattr(config.parallel_config, "_api_process_count", 1) or 1)
        if self.settings.admin_key is not None and processes > 1:
            raise CapabilityError(
                "BP502",
                f"{processes} API server processes: a change would reach one of them only",
                "Start it with --api-server-count 1, or without an admin key.",
            )
        self.backend = VLLMBackend.from_llm(
            engine, model_id=self.settings.model_id or config.model_config.model
        )
        install_at_start(self.backend, self.settings)
        self._patches = FastAPI(
            title="BrainPatch", openapi_url="/brainpatch/openapi.json", docs_url=None, redoc_url=None
        )
        answer_errors(self._patches)
        self._patches.include_router(PatchesApi(self.backend, self.settings).router())
        self._numbers = Numbers(self.backend)
        self._in_work = 0
        self._stops = False
        self._shutdown = engine.shutdown
        engine.shutdown = self._told_to_stop

    def _told_to_stop(self, timeout: float | None = None) -> Any:
        """In place of the engine's `shutdown`, the first that vLLM's server calls on SIGTERM, in a thread.

        From its call on, the engine takes no new request and answers no question, and the end of a patched answer is a
        question. So what runs is waited for here, in the time that there is.
        """
        first, self._stops = not self._stops, True
        until = time.monotonic() + (timeout or 0)
        if first and not _on_a_loop():
            while self._in_work and time.monotonic() < until:
                time.sleep(0.05)
        left = None if timeout is None else max(0.0, until - time.monotonic())
        return self._shutdown(timeout=left)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI, for HTTP."""
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._pass(scope, receive, send, {})
            return
        access = Access(scope, send)
        try:
            await self._pass(access.scope(), receive, access.send, access.notes)
        finally:
            access.close()

    async def _pass(self, scope: Scope, receive: Receive, send: Send, notes: dict[str, Any]) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        try:
            self.settings.check_key(scope["method"], path, header(scope, b"authorization"))
            if self._stops and (scope["method"] == "POST" or path == "/health"):
                raise ServerError("BP706", "the server stops")
            if path == "/brainpatch" or path.startswith("/brainpatch/"):
                await self._patches({**scope, "app": self._patches}, receive, send)
                return
            if path == "/v1/models" and scope["method"] == "GET":
                await self._app(scope, receive, ModelsSend(self.backend, send))
            elif scope["method"] == "POST":
                await self._post(path, scope, receive, send, notes)
            else:
                await self._app(scope, receive, send)
        except ClientGone:
            return
        except BrainPatchError as error:
            metrics.REFUSED.labels(error.code).inc()
            notes["code"] = error.code
            await refuse(error, scope, receive, send)

    async def _post(
        self, path: str, scope: Scope, receive: Receive, send: Send, notes: dict[str, Any]
    ) -> None:
        body = await read_body(receive, self.settings.max_body_bytes, self.settings.body_seconds)
        if self._in_work >= self.settings.max_requests:
            raise ServerError("BP705", f"{self._in_work} requests are in work or waiting")
        self._in_work += 1
        metrics.IN_WORK.inc()
        try:
            await self._answer(path, scope, body, receive, send, notes)
        finally:
            self._in_work -= 1
            metrics.IN_WORK.dec()

    async def _answer(
        self, path: str, scope: Scope, data: bytes, receive: Receive, send: Send, notes: dict[str, Any]
    ) -> None:
        body: dict[str, Any] = {}
        wish = Asked(None, None)
        choices, drop_usage = 1, False
        kind = (header(scope, b"content-type") or "").partition(";")[0].strip().lower()
        if kind == "multipart/form-data":
            if b'name="brainpatch"' in data:
                raise ServerError("BP707", "a form takes no patches")
        else:
            body = json_object(data) if kind == "application/json" else maybe_json_object(data)
            wish = asked(body, self._served_names())
            forced = bool(getattr(self._state.args, "enable_force_include_usage", False))
            drop_usage = not forced and _ask_for_usage(path, body)
            if FIELD in body or drop_usage or wish.by_name:
                body.pop(FIELD, None)
                if wish.model is not None:
                    body["model"] = wish.model
                data = msgspec.json.encode(body)
                scope = {**scope, "headers": with_length(scope["headers"], len(data))}
            choices = _choices(body)
        receive = replayed(data, receive)
        patches = self.backend.resolve_patches(wish.patches)
        if patches.depends_on_position and body.get("use_beam_search"):
            raise CapabilityError(
                "BP502",
                "beam search gives the engine a longer prompt at each step, so schedules and sites have no meaning",
            )
        if body.get("background") and not patches.is_empty:
            raise CapabilityError(
                "BP502", "nobody could tell whether patches acted in a response in the background"
            )
        notes |= echo_of(patches)
        tag = uuid.uuid4().hex
        asking = Served(carry(patches, tag=tag))
        named = bool(wish.patches) and path not in _TOKEN_ROUTES
        broken = partial(self._numbers.broken, tag)
        echo = EchoSend(send, patches, asking, broken, choices, drop_usage=drop_usage, named=named)
        token = served.set(asking)
        try:
            await self._app(scope, receive, echo)
        finally:
            served.reset(token)
            metrics.count_tokens(patches, echo.usage)
            notes["tokens"] = echo.usage

    def _served_names(self) -> list[str]:
        """vLLM's own names: the model's, and those of adapters."""
        models = self._state.openai_serving_models
        return [*(base.name for base in models.base_model_paths), *getattr(models, "lora_requests", {})]


def _ask_for_usage(path: str, body: dict[str, Any]) -> bool:
    """Have a stream say its usage in the end, for the metrics; True when the client did not ask for that."""
    if path not in ("/v1/chat/completions", "/v1/completions") or body.get("stream") is not True:
        return False
    options = body.get("stream_options")
    if options is None:
        body["stream_options"] = {"include_usage": True}
    elif isinstance(options, dict) and not options.get("include_usage"):
        options["include_usage"] = True
        options.pop("continuous_usage_stats", None)
    else:
        return False
    return True


def _choices(body: dict[str, Any]) -> int:
    """How many choices an answer has."""
    n, prompt = body.get("n"), body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    return min(4096, (n if isinstance(n, int) and n > 0 else 1) * prompts)


def _on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _vllm_keys(arguments: Any) -> list[str]:
    """The keys that vLLM itself asks for."""
    from vllm import envs

    return [key for key in (arguments.api_key or [envs.VLLM_API_KEY]) if key]


class Endpoint:
    """For vLLM's endpoint plugins, which VLLM_PLUGINS names: the same as `--middleware`."""

    name = "brainpatch"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Put the middleware around the application."""
        app.add_middleware(BrainPatchMiddleware)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Nothing: patches are put on the model when the application starts."""
