"""The forms that are known, and the way from one to another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from brainpatch.convert import llamacpp, patch_file
from brainpatch.convert.form import HEAD_BYTES, Format, Written
from brainpatch.errors import ConvertError
from brainpatch.patch.file import read_head
from brainpatch.patch.text import visible

FORMATS: Final[dict[str, Format]] = {form.name: form for form in (patch_file.FORMAT, llamacpp.FORMAT)}
"""Name -> form, in the order in which a file is tried for them."""


def readable() -> list[str]:
    """The names of the forms that can be read."""
    return [name for name, form in FORMATS.items() if form.read]


def writable() -> list[str]:
    """The names of the forms that can be written."""
    return [name for name, form in FORMATS.items() if form.write]


def convert(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    source_format: str | None = None,
    output_format: str | None = None,
    strength: float | None = None,
    overwrite: bool = False,
) -> Written:
    """Write what is in the file `source` to `output` in another form.

    Forms that are not named are told by the file itself and by the output's suffix. `strength` is put into a
    form that has no room for one (None: the patch's default). Raises ConvertError BP606 for forms that are not
    known, and what reading and writing raise; nothing is written then.
    """
    # The target first: it costs nothing to look at.
    target = _target(Path(output), output_format)
    origin = _source(Path(source), source_format)
    if origin.read is None:
        raise ConvertError("BP606", f"{origin.name} files are not read here; {_known()}")
    if target.write is None:
        raise ConvertError("BP606", f"{target.name} files are not written here; {_known()}")
    return target.write(origin.read(Path(source)), Path(output), strength, overwrite)


def _source(path: Path, name: str | None) -> Format:
    if name is not None:
        return _named(name)
    head = read_head(path, HEAD_BYTES)
    for form in FORMATS.values():
        if form.recognise(path, head):
            return form
    raise ConvertError("BP606", f"{visible(str(path))} is of no form that is known; {_known()}")


def _target(path: Path, name: str | None) -> Format:
    if name is not None:
        return _named(name)
    for form in FORMATS.values():
        if form.suffix == path.suffix.lower():
            return form
    raise ConvertError("BP606", f"the suffix of {visible(str(path))} is that of no form; {_known()}")


def _named(name: str) -> Format:
    if name not in FORMATS:
        raise ConvertError("BP606", f"there is no form called {visible(repr(name), 40)}; {_known()}")
    return FORMATS[name]


def _known() -> str:
    return f"read: {', '.join(readable())}; written: {', '.join(writable())}"
