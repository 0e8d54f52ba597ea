"""Our own server: OpenAI's routes over an engine that has no server of its own.

State and who owns it: the event loop owns the application; the engine belongs to the thread of `server.batcher`;
installed patches belong to the backend.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.types import ASGIApp, Receive, Scope, Send

from brainpatch.errors import BrainPatchError, ServerError
from brainpatch.runtime.meaning import ResolvedSet
from brainpatch.runtime.model import BrainPatchedModel
from brainpatch.runtime.requests import Generation
from brainpatch.server import metrics
from brainpatch.server.access import Access
from brainpatch.server.answers import Shape, usage_of
from brainpatch.server.asked import FIELD, asked
from brainpatch.server.batcher import Batcher, Job
from brainpatch.server.echo import echo_of
from brainpatch.server.failures import as_json
from brainpatch.server.http import ClientGone, header, read_body, refuse, replayed
from brainpatch.server.models import listed
from brainpatch.server.patches_api import PatchesApi, answer_errors, install_at_start
from brainpatch.server.protocol import ChatBody, TextBody
from brainpatch.server.settings import Settings

_MAX_TEXT_BYTES: Final = 4 << 20
"""A body here is text alone."""
_UPLOADS: Final = "/brainpatch/patches"
"""Reads its body itself."""
_NOTES: Final = "brainpatch_notes"
"""Where a request's scope holds what its line in the log shall say."""


def build_app(
    model: BrainPatchedModel, served_model_name: str | None = None, *, settings: Settings | None = None
) -> FastAPI:
    """An ASGI application over a loaded model; the patches of `settings` are installed beside those that are on it.

    `served_model_name` None is the name that patches know the model by. Errors: those of installing a patch.
    """
    return _App(model, served_model_name, settings or Settings()).app


class _App:
    def __init__(self, model: BrainPatchedModel, name: str | None, settings: Settings) -> None:
        self.backend = model.backend
        self.settings = settings
        self.name = name or self.backend.describe_model().model_id
        install_at_start(self.backend, settings)
        self.batcher: Batcher
        self.app = FastAPI(title="BrainPatch", lifespan=self._lifespan)
        answer_errors(self.app)
        self.app.add_exception_handler(ClientGone, _nobody)
        self.app.add_middleware(_Bounded, settings=settings)
        self.app.include_router(PatchesApi(self.backend, settings).router())
        self.app.get("/health")(self.health)
        self.app.get("/metrics")(self.metrics)
        self.app.get("/v1/models")(self.models)
        self.app.get("/v1/models/{name:path}")(self.model)
        self.app.post("/v1/chat/completions", response_model=None)(self.chat)
        self.app.post("/v1/completions", response_model=None)(self.complete)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        self.batcher = Batcher(self.backend, self.settings.max_requests)
        self.app.state.draining = False
        yield
        await asyncio.to_thread(self.batcher.close)

    # --- about -------------------------------------------------------------------------------------

    def health(self) -> Response:
        """Green when the model is loaded, which takes a forward pass with an edit that was seen to act."""
        self.backend.describe_model()
        if self.app.state.draining:
            return JSONResponse({"status": "stopping"}, 503)
        about: dict[str, Any] = {"status": "ok"}
        if not self.settings.api_keys:  # names are for those who may ask
            patches = {
                name: {
                    "strength": one.strength,
                    "enabled": one.enabled,
                    "evidence_level": one.manifest.evidence_level,
                }
                for name, one in self.backend.installed().items()
            }
            about |= {"backend": self.backend.name, "model": self.name, "patches": patches}
        return JSONResponse(about)

    def metrics(self) -> Response:
        """Prometheus."""
        metrics.IN_WORK.set(self.batcher.in_work)
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    def _cards(self) -> list[dict[str, Any]]:
        card = {"id": self.name, "object": "model", "created": 0, "owned_by": "brainpatch"}
        return listed([card], self.backend.installed())

    def models(self) -> dict[str, Any]:
        """The names that a request may use."""
        return {"object": "list", "data": self._cards()}

    def model(self, name: str) -> dict[str, Any]:
        """One of the names, or any other that a request may use."""
        wish = asked({"model": name}, [self.name])
        self.backend.resolve_patches(wish.patches)
        listed_ones = {card["id"]: card for card in self._cards()}
        return listed_ones.get(name) or {
            **listed_ones[self.name],
            "id": name,
            FIELD: {"patches": dict(wish.patches or {})},
        }

    # --- text --------------------------------------------------------------------------------------

    async def chat(
        self,
        body: ChatBody,
        request: Request,
    ) -> Response:
        """An answer to messages."""
        return await self._answer(body, request)

    async def complete(
        self,
        body: TextBody,
        request: Request,
    ) -> Response:
        """A continuation of text, without a chat template."""
        return await self._answer(body, request)

    async def _answer(self, body: ChatBody | TextBody, request: Request) -> Response:
        try:
            if self.app.state.draining:
                raise ServerError("BP706", "the server stops")
            return await self._admitted(body, request)
        except BrainPatchError as error:
            metrics.REFUSED.labels(error.code).inc()
            request.scope[_NOTES]["code"] = error.code
            raise

    async def _admitted(self, body: ChatBody | TextBody, request: Request) -> Response:
        chat = isinstance(body, ChatBody)
        wish = asked(body.for_reading(), [self.name])
        body.refuse_what_is_not_done(self.backend.name)
        config = body.config()
        prompts = body.prompts()
        if len(prompts) * config.n > self.settings.max_requests:
            raise ServerError("BP705", f"{len(prompts) * config.n} answers in one request")
        requests = await asyncio.to_thread(
            self.backend.requests, prompts, config, patches=wish.patches, use_chat_template=chat
        )
        patches = requests[0].patches
        address = request.client.host if request.client else ""
        client = self.settings.client(request.headers.get("authorization"), address)
        job = Job(requests, client)
        self.batcher.submit(job)
        for name in metrics.labels(patches):
            metrics.REQUESTS.labels(name).inc()
        echo = echo_of(patches)
        request.scope[_NOTES] |= echo
        shape = Shape(body.model or self.name, echo, chat, self.backend.token_texts)
        if body.stream:
            include = body.stream_options is not None and bool(body.stream_options.include_usage)
            events = self._events(job, shape, patches, config.n, include)
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse(await self._whole(job, shape, patches, config.n, request))

    async def _whole(
        self, job: Job, shape: Shape, patches: ResolvedSet, n: int, request: Request
    ) -> dict[str, Any]:
        gone = asyncio.create_task(_gone(request.receive))
        work = asyncio.create_task(_collect(job))
        try:
            await asyncio.wait([gone, work], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientGone
            answers = work.result()
        finally:
            job.cancel()
            for task in (gone, work):
                task.cancel()
        usage = usage_of(answers, n)
        _count(patches, usage)
        return await asyncio.to_thread(shape.whole, answers, usage)

    async def _events(
        self, job: Job, shape: Shape, patches: ResolvedSet, n: int, include_usage: bool
    ) -> AsyncIterator[bytes]:
        """The stream. It is closed when the client goes away, which ends the work."""
        answers: dict[int, Generation] = {}
        try:
            for index in range(len(job.requests)):
                yield _sse(shape.begin(index))
            while len(answers) < len(job.requests):
                event = await job.events.get()
                if event.error is not None:
                    metrics.REFUSED.labels(event.error.code).inc()
                    yield _sse(as_json(event.error))
                    break
                if event.done is not None:
                    answers[event.index] = event.done
                    yield _sse(shape.end(event.index, event.done.finish_reason))
                else:
                    yield _sse(shape.piece(event.index, event.piece))
            else:
                usage = usage_of([answers[index] for index in sorted(answers)], n)
                _count(patches, usage)
                if include_usage:
                    yield _sse(shape.usage(usage))
            yield b"data: [DONE]\n\n"
        finally:
            job.cancel()


async def _nobody(_: Request, error: Exception) -> Response:
    """An answer that nobody gets."""
    return Response(status_code=499)


def _count(patches: ResolvedSet, usage: dict[str, Any]) -> None:
    metrics.count_tokens(
        patches, {"prompt": usage["prompt_tokens"], "completion": usage["completion_tokens"]}
    )


def _sse(event: dict[str, Any]) -> bytes:
    return (
        b"data: "
        + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
        + b"\n\n"
    )


async def _collect(job: Job) -> list[Generation]:
    answers: dict[int, Generation] = {}
    while len(answers) < len(job.requests):
        event = await job.events.get()
        if event.error is not None:
            raise event.error
        if event.done is not None:
            answers[event.index] = event.done
    return [answers[index] for index in range(len(job.requests))]


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Bounded:
    """Looks at the key, and reads the body within bounds, before anybody parses it."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._pass(scope, receive, send)
        else:
            access = Access(scope, send)
            try:
                await self._pass({**access.scope(), _NOTES: access.notes}, receive, access.send)
            finally:
                access.close()

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        try:
            self._settings.check_key(method, path, header(scope, b"authorization"))
            if method not in ("GET", "HEAD", "OPTIONS") and path != _UPLOADS:
                body = await read_body(
                    receive, min(_MAX_TEXT_BYTES, self._settings.max_body_bytes), self._settings.body_seconds
                )
                receive = replayed(body, receive)
            await self._app(scope, receive, send)
        except ClientGone:
            return
        except BrainPatchError as error:
            await refuse(error, scope, receive, send)
