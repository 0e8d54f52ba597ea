"""The echo in whole answers and in streams, however a stream is cut into pieces."""

from __future__ import annotations

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from brainpatch.server.echo import EchoStream, into_answer

ECHO = {"patches": {"a": 1.0}, "digest": "d"}


def chunk(index, text, reason=None, **more):
    return {
        "id": "c",
        "choices": [{"index": index, "delta": {"content": text}, "finish_reason": reason}],
        **more,
    }


def sse(*events):
    return b"".join(
        b"data: " + (e if isinstance(e, bytes) else json.dumps(e).encode()) + b"\n\n" for e in events
    )


def events(data):
    return [json.loads(one[6:]) for one in data.split(b"\n\n") if one.startswith(b"data: {")]


STREAM = sse(
    chunk(0, ""), chunk(1, ""), chunk(0, "a\u2028b"), chunk(1, "x"), chunk(0, "", "stop"), chunk(1, "y", "length"),
    {"id": "c", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}, b"[DONE]",
)  # fmt: skip


@given(st.lists(st.integers(1, len(STREAM) - 1), max_size=12), st.booleans())
def test_first_and_last_events_of_each_choice(cuts, drop):
    stream = EchoStream(ECHO, 2, drop_usage=drop)
    edges = [0, *sorted(set(cuts)), len(STREAM)]
    out = b"".join(stream.feed(STREAM[a:b]) for a, b in itertools.pairwise(edges)) + stream.end()
    found = events(out)
    assert stream.usage == {"prompt": 3, "completion": 4}
    assert len(found) == (6 if drop else 7)
    echoed = [bool(one["choices"]) and one["choices"][0].get("brainpatch") == ECHO for one in found]
    assert echoed[:6] == [True, True, False, False, True, True]
    assert [one["choices"][0]["delta"]["content"] for one in found[:6]] == ["", "", "a\u2028b", "x", "", "y"]
    assert out.endswith(b"data: [DONE]\n\n")


def test_what_is_no_event_of_ours_passes_as_it_is():
    for data in (b": ping\n\n", b"data: nonsense\n\n", b"data: [1]\n\n", b"event: x\n\n", b"half"):
        stream = EchoStream(ECHO)
        assert stream.feed(data) + stream.end() == data


def test_responses_and_messages():
    created = {"type": "response.created", "response": {"id": "r"}}
    delta = {"type": "response.output_text.delta", "delta": "x"}
    done = {"type": "response.completed", "response": {"usage": {"input_tokens": 1, "output_tokens": 2}}}
    stream = EchoStream(ECHO)
    found = events(stream.feed(sse(created, delta, done)))
    assert [one.get("response", {}).get("brainpatch") for one in found] == [ECHO, None, ECHO]
    assert stream.usage == {"prompt": 1, "completion": 2}
    (start,) = events(EchoStream(ECHO).feed(sse({"type": "message_start", "message": {"id": "m"}})))
    assert start["message"]["brainpatch"] == ECHO


def test_whole_answers():
    body, usage = into_answer(json.dumps({"choices": [{}, {}], "usage": {"prompt_tokens": 1}}).encode(), ECHO)
    assert json.loads(body)["choices"] == [{"brainpatch": ECHO}] * 2
    assert usage == {"prompt": 1}
    assert json.loads(into_answer(b'{"id": "resp"}', ECHO)[0]) == {"id": "resp", "brainpatch": ECHO}
    for other in (b"", b"[1]", b"junk"):
        assert into_answer(other, ECHO) == (other, {})
