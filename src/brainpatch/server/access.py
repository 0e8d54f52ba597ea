"""A line of JSON for each request that asks for something, under an id that its answer carries: `brainpatch.access`.

The lines have no prompts and no answers. The id is the client's `X-Request-Id` where it is plain, or a new one.
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from typing import Any, Final

from starlette.types import Message, Scope, Send

from brainpatch.server.http import header

_HEADER: Final = b"x-request-id"
_PLAIN: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_log = logging.getLogger("brainpatch.access")


class Access:
    """One request: a `send` that puts the id into the answer and notes the status."""

    def __init__(self, scope: Scope, send: Send) -> None:
        given = header(scope, _HEADER) or ""
        self.id = given if _PLAIN.fullmatch(given) else uuid.uuid4().hex
        self.notes: dict[str, Any] = {}
        """More for the line: patches, digest, usage, code."""
        self._scope, self._send = scope, send
        self._started = time.perf_counter()
        self._status: int | None = None
        self._whole = False

    def scope(self) -> Scope:
        """The request with its id as a header, for whoever reads it there."""
        kept = [(name, value) for name, value in self._scope["headers"] if name.lower() != _HEADER]
        return {**self._scope, "headers": [*kept, (_HEADER, self.id.encode())]}

    async def send(self, message: Message) -> None:
        """ASGI."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            kept = [(name, value) for name, value in message["headers"] if name.lower() != _HEADER]
            message = {**message, "headers": [*kept, (_HEADER, self.id.encode())]}
        elif message["type"] == "http.response.body":
            self._whole = not message.get("more_body", False)
        await self._send(message)

    def close(self) -> None:
        """The request is over. `whole` is false where the client went away first."""
        line = {
            "request": self.id,
            "method": self._scope["method"],
            "path": self._scope["path"],
            "status": self._status,
            "whole": self._whole,
            "seconds": round(time.perf_counter() - self._started, 4),
        }
        _log.info("%s", json.dumps({**line, **self.notes}))
