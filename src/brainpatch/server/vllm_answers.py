"""What is done to the answers of vLLM's own server: names with patches, the echo, and a last look at the numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from starlette.types import Message, Send

from brainpatch.backends.vllm_backend import VLLMBackend
from brainpatch.backends.vllm_plugin import Served
from brainpatch.errors import BrainPatchError, EngineError, ServerError
from brainpatch.runtime.meaning import ResolvedSet
from brainpatch.server import metrics
from brainpatch.server.echo import EchoStream, echo_of, into_answer
from brainpatch.server.failures import as_json
from brainpatch.server.http import failure
from brainpatch.server.models import listed

_DONE: Final = b"data: [DONE]"
_SECONDS: Final = 30.0
"""How long the workers may take to answer; an engine that died never does."""


def with_length(headers: Any, length: int) -> list[tuple[bytes, bytes]]:
    """Headers of a body of this length."""
    kept = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    return [*kept, (b"content-length", str(length).encode())]


class Numbers:
    """Asks the workers whether patched requests stayed numbers, for all that end at the same time at once."""

    def __init__(self, backend: VLLMBackend) -> None:
        self._backend = backend
        self._waiting: dict[str, asyncio.Future[bool]] = {}
        self._asking: asyncio.Task[None] | None = None

    async def broken(self, tag: str) -> bool:
        """Whether the request of this tag had activations that are no numbers."""
        asked_for: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[tag] = asked_for
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return await asked_for

    async def _ask(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, {}
            try:
                found = await asyncio.wait_for(self._backend.broken(list(waiting)), _SECONDS)
            except Exception as error:
                for one in waiting.values():
                    if not one.done():
                        one.set_exception(error)
            else:
                for tag, one in waiting.items():
                    if not one.done():
                        one.set_result(tag in found)


class ModelsSend:
    """A `send` that adds the names with patches to the answer of /v1/models."""

    def __init__(self, backend: VLLMBackend, send: Send) -> None:
        self._backend, self._send = backend, send
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._body += message.get("body", b"")
        if message.get("more_body", False) or self._start is None:
            return
        body = self._body
        if self._start["status"] == 200:
            answer = msgspec.json.decode(body)
            answer["data"] = listed(answer["data"], self._backend.installed())
            body = msgspec.json.encode(answer)
        await self._send({**self._start, "headers": with_length(self._start["headers"], len(body))})
        await self._send({"type": "http.response.body", "body": body})


class EchoSend:
    """A `send` that puts into the answer what was applied. An answer that was made without the patches that the
    client named is thrown away, and an error sent in its place; so the answer's head waits for its first part."""

    def __init__(
        self,
        send: Send,
        patches: ResolvedSet,
        asking: Served,
        broken: Callable[[], Awaitable[bool]],
        choices: int,
        *,
        drop_usage: bool,
        named: bool,
    ) -> None:
        """`broken` tells whether the request's activations were no numbers; `choices` is its n."""
        self._send, self._patches, self._asking, self._broken = send, patches, asking, broken
        self._choices, self._drop_usage, self._named = choices, drop_usage, named
        self._head: Message | None = None
        self._stream: EchoStream | None = None
        self._body: list[bytes] = []
        self._changes = False
        self._refused = False
        self._checked = False
        self.usage: dict[str, int] = {}

    async def __call__(self, message: Message) -> None:
        if self._refused:
            return
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif not self._changes:
            await self._send(message)
        elif self._stream is not None:
            await self._piece(self._stream, message)
        else:
            self._body.append(message.get("body", b""))
            if not message.get("more_body", False):
                await self._whole(b"".join(self._body))

    async def _begin(self, message: Message) -> None:
        kinds = [value for name, value in message["headers"] if name.lower() == b"content-type"]
        kind = kinds[0].partition(b";")[0].strip() if kinds and message["status"] == 200 else b""
        self._changes = kind in (b"application/json", b"text/event-stream")
        if kind == b"text/event-stream":
            self._stream = EchoStream(echo_of(self._patches), self._choices, drop_usage=self._drop_usage)
        if self._changes:
            self._head = message
        elif message["status"] != 200 or await self._arrived():
            await self._send(message)

    async def _piece(self, stream: EchoStream, message: Message) -> None:
        more = message.get("more_body", False)
        if self._head is not None:
            if not await self._arrived():
                return
            await self._send(self._head)
            self._head = None
        data = stream.feed(message.get("body", b""))
        if not more:
            data += stream.end()
            self.usage = stream.usage
        if not self._checked and (not more or data.startswith(_DONE) or b"\n\n" + _DONE in data):
            self._checked = True
            error = await self._error()
            if error is not None:
                data = b"data: " + msgspec.json.encode(as_json(error)) + b"\n\n" + data
        if data or not more:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _whole(self, body: bytes) -> None:
        if self._head is None or not await self._arrived():
            return
        if self._asking.taken:
            error = await self._error()
            if error is not None:
                await self._refuse(error)
                return
            body, self.usage = into_answer(body, echo_of(self._patches))
        elif not self._patches.is_empty and b'"choices"' in body:  # those that are on by default
            await self._refuse(ServerError("BP707", "vLLM lost the patches on the way to its engine"))
            return
        await self._send({**self._head, "headers": with_length(self._head["headers"], len(body))})
        await self._send({"type": "http.response.body", "body": body})

    async def _arrived(self) -> bool:
        """Whether the patches that the client named were taken to the engine. Where not, that is the answer."""
        if self._asking.taken:
            for name in metrics.labels(self._patches):
                metrics.REQUESTS.labels(name).inc()
        elif self._named:
            await self._refuse(
                ServerError("BP707", "the answer was not generated by the model's forward pass")
            )
        return not self._refused

    async def _error(self) -> EngineError | None:
        """Why a patched answer is none: what its numbers became."""
        if self._patches.is_empty:
            return None
        try:
            if not await self._broken():
                return None
        except Exception as error:
            return EngineError(
                "BP508", f"the workers could not be asked about the answer: {type(error).__name__}"
            )
        return EngineError(
            "BP509", f"NaN or infinite activations with the patches {self._patches.to_mapping()}"
        )

    async def _refuse(self, error: BrainPatchError) -> None:
        """Send an error in place of the answer."""
        self._refused = True
        metrics.REFUSED.labels(error.code).inc()
        await failure(error)({"type": "http"}, _nothing, self._send)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
