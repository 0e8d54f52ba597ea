"""Putting what was applied into an answer: `brainpatch: {"patches", "digest"}` at each choice.

A JSON answer is read and written again. Of a stream, only the events that begin and end a choice are; all
others pass as they are, since an answer has as many events as tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from brainpatch.runtime.meaning import ResolvedSet
from brainpatch.server.asked import FIELD

_END: Final = b"\n\n"
_DATA: Final = b"data: "
_RESPONSE_EVENTS: Final = ("response.created", "response.completed", "response.incomplete", "response.failed")


def echo_of(patches: ResolvedSet) -> dict[str, Any]:
    """What a client is told: the patches with the strengths and schedules that were used, and the digest."""
    return {"patches": patches.to_mapping(), "digest": patches.digest}


def into_answer(body: bytes, echo: dict[str, Any]) -> tuple[bytes, dict[str, int]]:
    """A JSON answer with the echo, and its usage (see `usage_of`). Other bodies come back as they are."""
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body, {}
    if not isinstance(answer, dict):
        return body, {}
    choices = answer.get("choices")
    for place in choices if isinstance(choices, list) else [answer]:
        if isinstance(place, dict):
            place[FIELD] = echo
    return msgspec.json.encode(answer), usage_of(answer)


def usage_of(answer: dict[str, Any]) -> dict[str, int]:
    """prompt and completion tokens of an answer or an event of any of the APIs; empty where it says nothing."""
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return {}
    found = {}
    for name, others in (
        ("prompt", ("prompt_tokens", "input_tokens")),
        ("completion", ("completion_tokens", "output_tokens")),
    ):
        counts = [usage[key] for key in others if isinstance(usage.get(key), int)]
        if counts:
            found[name] = counts[0]
    return found


class EchoStream:
    """Takes the bytes of a stream of server-sent events and gives them back with the echo.

    `choices`: how many the request asked for. `drop_usage`: leave out the event that has usage and no choices,
    which the server asked for and not the client. `usage` is there when the stream has said it.
    """

    def __init__(self, echo: dict[str, Any], choices: int = 1, *, drop_usage: bool = False) -> None:
        self.usage: dict[str, int] = {}
        self._echo = echo
        self._unseen = set(range(choices))
        self._drop_usage = drop_usage
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """The events that are whole now."""
        *events, self._rest = (self._rest + data).split(_END)
        return b"".join(self._events(events))

    def end(self) -> bytes:
        """What is left at the end."""
        rest, self._rest = self._rest, b""
        return rest

    def _events(self, events: list[bytes]) -> Iterator[bytes]:
        for event in events:
            changed = self._event(event)
            if changed is not None:
                yield changed + _END

    def _event(self, event: bytes) -> bytes | None:
        if not self._matters(event):
            return event
        head, data, text = event.partition(_DATA)
        try:
            content = msgspec.json.decode(text)
        except msgspec.DecodeError:  # "[DONE]"
            return event
        if not data or not isinstance(content, dict):
            return event
        inner = content.get("response")
        usage = usage_of(content) or (usage_of(inner) if isinstance(inner, dict) else {})
        self.usage |= usage
        choices = content.get("choices")
        if isinstance(choices, list):
            if not choices and usage and self._drop_usage:
                return None
            changed = self._into_choices(choices)
        else:
            changed = self._into_event(content)
        return head + data + msgspec.json.encode(content) if changed else event

    def _matters(self, event: bytes) -> bool:
        if self._unseen:
            return True
        return b'"finish_reason":null' not in event.replace(b'": ', b'":') or b'"usage":{' in event

    def _into_choices(self, choices: list[Any]) -> bool:
        changed = False
        for choice in choices:
            if isinstance(choice, dict):
                number = choice.get("index", 0)
                if number in self._unseen or choice.get("finish_reason") is not None:
                    self._unseen.discard(number)
                    choice[FIELD] = self._echo
                    changed = True
        return changed

    def _into_event(self, content: dict[str, Any]) -> bool:
        for kinds, key in ((_RESPONSE_EVENTS, "response"), (("message_start",), "message")):
            inner = content.get(key)
            if content.get("type") in kinds and isinstance(inner, dict):
                self._unseen.clear()
                inner[FIELD] = self._echo
                return True
        return False
