"""The patch file itself."""

from __future__ import annotations

from pathlib import Path

from brainpatch.convert.form import Format
from brainpatch.patch.file import SUFFIX, load_patch


def _recognise(path: Path, head: bytes) -> bool:
    # By its name as well: one that is damaged is refused for what is wrong with it.
    return path.suffix.lower() == SUFFIX or head.startswith(b"PK")


FORMAT = Format("brainpatch", SUFFIX, _recognise, read=load_patch)
