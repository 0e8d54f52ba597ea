"""The middleware around vLLM's application where no engine is needed: starting, or not, and what a body counts for."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from brainpatch.server.vllm_front import BrainPatchMiddleware, _ask_for_usage, _choices


async def called(middleware, scope, *messages):
    """What an ASGI call sends."""
    sent, given = [], list(messages)

    async def receive():
        return given.pop(0)

    async def send(message):
        sent.append(message)

    try:
        await middleware(scope, receive, send)
    except SystemExit as end:
        sent.append({"type": "exit", "status": end.code})
    return sent


async def passes(scope, receive, send):
    """An application that answers."""
    await send({"type": "http.response.start", "status": 200, "headers": []})


def test_whatever_goes_wrong_at_the_start_ends_the_server():
    """uvicorn would take an exception for an application without a lifespan, and serve without patches."""
    middleware = BrainPatchMiddleware(passes)
    scope = {"type": "lifespan", "app": SimpleNamespace(state=SimpleNamespace())}  # vLLM's state is not there
    sent = asyncio.run(called(middleware, scope, {"type": "lifespan.startup"}))
    assert [one["type"] for one in sent] == ["lifespan.startup.failed", "exit"]
    assert sent[1]["status"] == 1


def test_what_has_not_started_answers_nothing():
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    sent = asyncio.run(called(BrainPatchMiddleware(passes), scope))
    assert sent[0]["status"] == 503
    assert json.loads(sent[1]["body"])["error"]["code"] == "BP706"
    inner = asyncio.run(called(BrainPatchMiddleware(passes), {**scope, "brainpatch": True}))
    assert inner[0]["status"] == 200  # another one of us stands outside


@pytest.mark.parametrize(
    ("body", "choices"),
    [
        ({}, 1), ({"n": 3}, 3), ({"n": "x"}, 1), ({"n": -1}, 1), ({"prompt": "a"}, 1), ({"prompt": [1, 2]}, 1),
        ({"prompt": ["a", "b"]}, 2), ({"prompt": [[1], [2], [3]], "n": 2}, 6), ({"prompt": []}, 1),
    ],
)  # fmt: skip
def test_how_many_choices_an_answer_has(body, choices):
    assert _choices(body) == choices


def test_usage_is_asked_for_where_the_client_did_not():
    chat = "/v1/chat/completions"
    for body, asked, options in (
        ({"stream": True}, True, {"include_usage": True}),
        ({"stream": True, "stream_options": {"include_usage": True}}, False, {"include_usage": True}),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, True, {"include_usage": True}),
        ({"stream": False}, False, None),
        ({"stream": True, "stream_options": 7}, False, 7),
    ):
        assert _ask_for_usage(chat, body) is asked
        assert body.get("stream_options") == options
    assert not _ask_for_usage("/v1/responses", {"stream": True})
