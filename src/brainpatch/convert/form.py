"""What a form of file is: how it is recognised, read and written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brainpatch.patch.file import LoadedPatch


@dataclass(frozen=True)
class Written:
    """A file that was made. `lines` say to a person what is in it and how to use it, `facts` to a program."""

    path: Path
    lines: list[str]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Format:
    """One form of file. A form that is only read has no `write`, one that is only written no `read`.

    `recognise`: whether a file is of this form, by its path and its first bytes (at most `HEAD_BYTES`).
    `write` takes the patch, where to, the strength to put in (None: the patch's own default) and whether a
    file that is there may be replaced; it may replace the path's suffix.
    """

    name: str
    suffix: str
    recognise: Callable[[Path, bytes], bool]
    read: Callable[[Path], LoadedPatch] | None = None
    write: Callable[[LoadedPatch, Path, float | None, bool], Written] | None = None


HEAD_BYTES = 4096
