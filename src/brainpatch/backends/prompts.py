"""From a prompt to token ids, the same way on every engine with a Hugging Face tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from brainpatch.errors import RequestError
from brainpatch.runtime.requests import Prompt


def prompt_ids(
    tokenizer: Any, prompt: Prompt, *, use_chat_template: bool = True, system: str | None = None
) -> list[int]:
    """Token ids of a prompt, special tokens exactly once.

    A string becomes one user message where the tokenizer has a chat template and `use_chat_template`
    is true; otherwise it is tokenized as plain text. Messages always go through the template. Ids are
    taken as they are. `system` is put before a string's message. Errors: RequestError (BP405).
    """
    if isinstance(prompt, str):
        if not prompt:
            raise RequestError("BP405", "the prompt is empty")
        if use_chat_template and getattr(tokenizer, "chat_template", None):
            head = [] if system is None else [{"role": "system", "content": system}]
            return _templated(tokenizer, [*head, {"role": "user", "content": prompt}])
        if system is not None:
            raise RequestError(
                "BP405", "system was given, but the text goes to the model without a chat template"
            )
        return _plain(tokenizer, prompt)
    if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Sequence):
        raise RequestError("BP405", f"the prompt is {type(prompt).__name__}")
    items = list(prompt)
    if not items:
        raise RequestError("BP405", "the prompt is empty")
    if all(isinstance(item, Mapping) for item in items):
        if system is not None:
            raise RequestError("BP405", "system was given beside messages", "Put it into the messages.")
        return _templated(tokenizer, items)
    size = len(tokenizer)
    ids = []
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < size:
            raise RequestError("BP405", f"token id {item!r} is not an integer in 0..{size - 1}")
        ids.append(item)
    return ids


def _templated(tokenizer: Any, messages: list[Any]) -> list[int]:
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise RequestError("BP405", "a message needs the text fields role and content")
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError(
            "BP405", "messages were given, but this model has no chat template", "Give the prompt as text."
        )
    try:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    except Exception as error:  # a template is a program of the model's author and may refuse anything
        raise RequestError("BP405", f"the chat template refused the messages: {error}") from None
    return [int(token) for token in ids]


def _plain(tokenizer: Any, text: str) -> list[int]:
    ids = [int(token) for token in tokenizer(text)["input_ids"]]
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:  # the text held the token, and the tokenizer added it
        ids = ids[1:]
    if not ids:
        raise RequestError("BP405", "the prompt has no tokens")
    return ids
