"""Small things of ASGI that the fronts share: reading a body within bounds, and answering."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from brainpatch.errors import BrainPatchError, ServerError
from brainpatch.server.failures import as_json, headers_of, status_of


class ClientGone(Exception):
    """The client went away before its body was there."""


async def read_body(receive: Receive, limit: int, seconds: float) -> bytes:
    """The whole body. Errors: ServerError (BP703, BP708), ClientGone."""
    try:
        return await asyncio.wait_for(_all_parts(receive, limit), seconds)
    except asyncio.TimeoutError:  # before Python 3.11 not the built-in one
        raise ServerError("BP708", f"the body was not there after {seconds:g} s") from None


async def _all_parts(receive: Receive, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise ServerError("BP703", f"the body is larger than {limit} bytes")
        if not message.get("more_body", False):
            return b"".join(parts)


def replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives a body that was read already, and then what comes."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def json_object(body: bytes) -> dict[str, Any]:
    """A body as a JSON object. ServerError (BP704) for anything else."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ServerError("BP704", f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ServerError("BP704", "the body is JSON, but no object")
    return found


def maybe_json_object(body: bytes) -> dict[str, Any]:
    """As `json_object`, for a body that is not said to be JSON: a route may read it as JSON all the same."""
    try:
        return json_object(body)
    except ServerError:
        return {}


def failure(error: BrainPatchError) -> Response:
    """The answer to a request that is refused."""
    return JSONResponse(as_json(error), status_of(error), headers=headers_of(error))


def header(scope: Scope, name: bytes) -> str | None:
    """A header of the request; of several, the last."""
    found: bytes | None = dict(scope["headers"]).get(name)
    return None if found is None else found.decode("latin-1")


async def refuse(error: BrainPatchError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error."""
    await failure(error)(scope, receive, send)
