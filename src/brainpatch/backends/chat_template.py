"""Chat messages to text by a model's own template, for engines without a Hugging Face tokenizer.

A template is a program of the model's author: it runs in Jinja's sandbox, and sees the messages and little else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn


def render(template: str, messages: Sequence[Mapping[str, Any]], *, bos: str, eos: str) -> str:
    """The text of `messages`, ready for the model's answer. Raises whatever the template raises."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.globals.update(raise_exception=_refuse, strftime_now=_now)
    environment.filters["tojson"] = _as_json
    return str(
        environment.from_string(template).render(
            messages=messages, add_generation_prompt=True, bos_token=bos, eos_token=eos
        )
    )


def _refuse(reason: str) -> NoReturn:
    raise ValueError(reason)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _as_json(value: Any, indent: int | None = None) -> str:
    """As templates expect it: Jinja's own filter writes HTML entities."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
