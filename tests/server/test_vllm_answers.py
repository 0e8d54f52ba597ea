"""What is done to answers of vLLM's server, on made-up ones: what a real server cannot be made to show."""

from __future__ import annotations

import asyncio
import json

import pytest

from brainpatch.backends.vllm_plugin import Served
from brainpatch.runtime.meaning import ActivePatch, resolve
from brainpatch.server.vllm_answers import EchoSend, Numbers
from tests.factories import make_patch

SET = resolve(None, {"formal": ActivePatch(make_patch([{"layer": 1}], name="formal"))})
ANSWER = json.dumps(
    {"choices": [{"index": 0}], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
).encode()
STREAM = [
    b'data: {"choices":[{"index":0,"finish_reason":null}]}\n\n',
    b'data: {"choices":[{"index":0,"finish_reason":"stop"}]}\n\n',
    b"data: [DONE]\n\n",
    b"",
]


def answered(kind, bodies, *, taken=1, broken=False, named=True, status=200):
    """What a client gets of an answer: (status, body)."""
    sent = []

    async def send(message):
        sent.append(message)

    async def is_broken():
        return broken

    asking = Served(None)
    asking.taken = taken

    async def run():
        echo = EchoSend(send, SET, asking, is_broken, 1, drop_usage=False, named=named)
        head = [(b"content-type", kind), (b"content-length", b"1")]
        await echo({"type": "http.response.start", "status": status, "headers": head})
        for i, body in enumerate(bodies):
            await echo({"type": "http.response.body", "body": body, "more_body": i + 1 < len(bodies)})

    asyncio.run(run())
    starts = [one for one in sent if one["type"] == "http.response.start"]
    assert len(starts) == 1
    body = b"".join(one.get("body", b"") for one in sent[1:])
    lengths = [value for name, value in starts[0]["headers"] if name == b"content-length"]
    if kind == b"application/json" and status == 200:
        assert lengths == [str(len(body)).encode()]
    return starts[0]["status"], body


def code(body):
    return json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    ("kind", "bodies"),
    [(b"application/json", [ANSWER]), (b"text/event-stream", STREAM), (b"audio/x", [b"x"])],
)
def test_patches_that_never_reached_the_engine_are_an_error(kind, bodies):
    status, body = answered(kind, bodies, taken=0)
    assert (status, code(body)) == (400, "BP707")


def test_without_named_patches_any_route_answers():
    assert answered(b"application/json", [b'{"tokens": [1]}'], taken=0, named=False) == (
        200,
        b'{"tokens": [1]}',
    )
    assert answered(b"audio/x", [b"x"], taken=0, named=False) == (200, b"x")


def test_an_answer_in_pieces_and_an_error_of_vllms():
    _, body = answered(b"application/json", [ANSWER[:5], ANSWER[5:]])
    assert json.loads(body)["choices"][0]["brainpatch"]["digest"] == SET.digest
    assert answered(b"application/json", [b'{"error": 1}'], taken=0, status=404) == (404, b'{"error": 1}')


def test_broken_numbers_are_no_answer():
    assert code(answered(b"application/json", [ANSWER], broken=True)[1]) == "BP509"
    _, body = answered(b"text/event-stream", STREAM, broken=True)
    events = [one for one in body.split(b"\n\n") if one]
    assert code(events[-2].removeprefix(b"data: ")) == "BP509"
    assert events[-1] == b"data: [DONE]"
    _, body = answered(b"text/event-stream", STREAM[:2], broken=True)  # an API without [DONE]
    assert b"BP509" in body


def test_requests_that_end_together_are_asked_about_together():
    asked = []

    class Backend:
        async def broken(self, tags):
            asked.append(sorted(tags))
            await asyncio.sleep(0.01)
            if "bad" in tags:
                raise RuntimeError
            return {"b"} & set(tags)

    async def run():
        numbers = Numbers(Backend())
        first = await asyncio.gather(*(numbers.broken(tag) for tag in "abc"))
        second = await asyncio.gather(numbers.broken("bad"), return_exceptions=True)
        return first, second, await numbers.broken("b")

    first, second, third = asyncio.run(run())
    assert first == [False, True, False]
    assert isinstance(second[0], RuntimeError)
    assert third is True
    assert asked == [["a", "b", "c"], ["bad"], ["b"]]
