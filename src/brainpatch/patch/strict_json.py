"""JSON without the loose ends: one text has one meaning in every parser, and costs what it weighs."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from brainpatch.errors import PatchFormatError
from brainpatch.patch.limits import (
    MAX_JSON_DEPTH,
    MAX_JSON_KEY_LENGTH,
    MAX_JSON_NUMBER_LENGTH,
    MAX_JSON_OBJECT_KEYS,
)
from brainpatch.patch.text import visible

_MAX_INTEGER = 2**64


class _Refused(ValueError):
    """A finding of one of the decoder's hooks."""


def parse(data: bytes, what: str) -> Any:
    """The value of the JSON text `data`, in UTF-8; `what` names it in errors.

    Raises PatchFormatError BP109 for: bytes that are not UTF-8, a byte order mark, a repeated key, NaN,
    Infinity, a number beyond a double or an integer of 2**64 and more, nesting deeper than 32, an object
    of more than 4097 keys, a key longer than 1024 characters, a lone surrogate, text after the value.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _malformed(what, f"byte {error.start} is not UTF-8") from None
    if text.startswith("\ufeff"):
        raise _malformed(what, "it begins with a byte order mark")
    # Before parsing, since parsers recurse.
    if _deeper_than(text, MAX_JSON_DEPTH):
        raise _malformed(what, f"nested deeper than {MAX_JSON_DEPTH}")
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise _malformed(what, f"line {error.lineno} column {error.colno}: {error.msg}") from None
    except _Refused as error:
        raise _malformed(what, str(error)) from None
    if "\\u" in text:
        # UTF-8 cannot hold a surrogate, so only an escape can have made one; a lone one cannot be encoded.
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise _malformed(what, "a lone surrogate in a string") from None
    return value


def canonical(value: Any, *, indent: int | None = 2) -> str:
    """The spelling that files are written in: sorted keys, indented, ASCII, one line break at the end.

    Raises PatchFormatError BP109 for what strict JSON cannot hold.
    """
    try:
        return json.dumps(value, indent=indent, sort_keys=True, allow_nan=False) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise PatchFormatError("BP109", f"cannot be written as JSON: {visible(str(error))}") from None


def _malformed(what: str, why: str) -> PatchFormatError:
    return PatchFormatError("BP109", f"{what}: {why}")


def _deeper_than(text: str, depth: int) -> bool:
    # Without escapes, every second piece between quotes is outside strings. On malformed text the answer
    # may be off, but never by more than brackets in strings: the parser then refuses the rest.
    outside = text.replace("\\\\", "").replace('\\"', "").split('"')[::2]
    level = 0
    for piece in outside:
        for char in piece:
            if char in "[{":
                level += 1
                if level > depth:
                    return True
            elif char in "]}":
                level -= 1
    return False


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_JSON_OBJECT_KEYS:
        raise _Refused(f"an object of {len(pairs)} keys; at most {MAX_JSON_OBJECT_KEYS} are allowed")
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _Refused(f'the key "{visible(twice)}" is repeated')
    for key in value:
        if len(key) > MAX_JSON_KEY_LENGTH:
            raise _Refused(f"a key of {len(key)} characters; at most {MAX_JSON_KEY_LENGTH} are allowed")
    return value


def _float(digits: str) -> float:
    value = float(digits) if len(digits) <= MAX_JSON_NUMBER_LENGTH else math.inf
    if math.isinf(value):
        raise _Refused(f"the number {visible(digits, 40)} is out of range")
    return value


def _int(digits: str) -> int:
    # The length first: converting thousands of digits takes quadratic time.
    value = int(digits) if len(digits) <= 21 else _MAX_INTEGER
    if abs(value) >= _MAX_INTEGER:
        raise _Refused(f"the integer {visible(digits, 40)} is out of range")
    return value


def _constant(name: str) -> NoReturn:
    raise _Refused(f"{name} is not JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_float, parse_int=_int, parse_constant=_constant
)
