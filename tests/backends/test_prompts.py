"""From prompts to ids: special tokens exactly once."""

from __future__ import annotations

import pytest

from brainpatch.backends.prompts import prompt_ids
from brainpatch.errors import RequestError


class FakeTokenizer:
    """Adds BOS to plain text, knows a template that writes BOS itself; one id a character."""

    bos_token_id = 1
    chat_template = "yes"

    def __len__(self):
        return 300

    def _ids(self, text):
        ids = []
        while text:
            ids.append(1 if text.startswith("<s>") else ord(text[0]))
            text = text[3:] if text.startswith("<s>") else text[1:]
        return ids

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [1] * add_special_tokens + self._ids(text)}

    def apply_chat_template(self, messages, add_generation_prompt, return_dict):
        assert add_generation_prompt
        if any(message["role"] == "tool" for message in messages):
            raise ValueError("no tools")
        text = "<s>" + "".join(f"{m['role'][0]}:{m['content']}|" for m in messages) + "a:"
        return self._ids(text)


class Plain(FakeTokenizer):
    chat_template = None


def chars(text):
    return [ord(c) for c in text]


def test_the_template_is_applied_once_and_bos_is_single():
    ids = prompt_ids(FakeTokenizer(), "hi")
    assert ids == [1, *chars("u:hi|a:")]
    assert prompt_ids(FakeTokenizer(), "hi", system="s") == [1, *chars("s:s|u:hi|a:")]


def test_messages_equal_the_string_they_stand_for():
    assert prompt_ids(FakeTokenizer(), [{"role": "user", "content": "hi"}]) == prompt_ids(
        FakeTokenizer(), "hi"
    )


@pytest.mark.parametrize("tokenizer", [FakeTokenizer(), Plain()])
def test_plain_text_gets_one_bos_even_when_it_holds_one(tokenizer):
    assert prompt_ids(tokenizer, "hi", use_chat_template=False) == [1, *chars("hi")]
    assert prompt_ids(tokenizer, "<s>hi", use_chat_template=False) == [1, *chars("hi")]


def test_without_a_template_text_is_plain_and_messages_are_refused():
    assert prompt_ids(Plain(), "hi") == [1, *chars("hi")]
    with pytest.raises(RequestError, match="no chat template"):
        prompt_ids(Plain(), [{"role": "user", "content": "hi"}])
    with pytest.raises(RequestError, match="without a chat template"):
        prompt_ids(Plain(), "hi", system="s")


def test_ids_are_taken_as_they_are():
    assert prompt_ids(FakeTokenizer(), [1, 1, 5]) == [1, 1, 5]
    assert prompt_ids(FakeTokenizer(), (0, 299)) == [0, 299]


@pytest.mark.parametrize(
    "prompt", ["", [], [300], [-1], [True], b"hi", bytearray(b"hi"), None, 5, [1.0], ["a"], [1, "a"]]
)
def test_what_is_no_prompt_is_refused(prompt):
    with pytest.raises(RequestError) as caught:
        prompt_ids(FakeTokenizer(), prompt)
    assert caught.value.code == "BP405"


@pytest.mark.parametrize(
    "message",
    [{"role": "user"}, {"content": "x"}, {"role": 1, "content": "x"}, {"role": "user", "content": None}],
)
def test_a_message_needs_role_and_text(message):
    with pytest.raises(RequestError, match="role and content"):
        prompt_ids(FakeTokenizer(), [message])


def test_what_the_template_refuses_is_said():
    with pytest.raises(RequestError, match="no tools"):
        prompt_ids(FakeTokenizer(), [{"role": "tool", "content": "x"}])
    with pytest.raises(RequestError, match="beside messages"):
        prompt_ids(FakeTokenizer(), [{"role": "user", "content": "x"}], system="s")


class Empty(Plain):
    bos_token_id = None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": []}


def test_a_text_without_tokens_is_refused():
    with pytest.raises(RequestError, match="no tokens"):
        prompt_ids(Empty(), "\u200b")
