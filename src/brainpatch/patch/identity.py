"""What a patch means, as a digest: two files that do the same have the same one."""

from __future__ import annotations

import hashlib
import struct

from brainpatch.patch.file import LoadedPatch

_PREFIX = b"brainpatch meaning 1\n"
_SITES = {"all": 0, "prompt": 1, "continuation": 2}


def meaning_digest(patch: LoadedPatch) -> str:
    """SHA-256, as 64 hexadecimal digits, of what the patch does: its interventions in order, with their
    vectors as float32, its schedule and its bound. docs/format.md gives the layout byte by byte.

    Names, texts, evidence, `default_strength` and unused vectors do not count, nor does the dtype a vector
    is stored in beyond its values in float32.
    """
    manifest = patch.manifest
    seal = hashlib.sha256(_PREFIX)
    seal.update(struct.pack("<d", manifest.max_abs_strength))
    keyframes = {} if manifest.schedule is None else manifest.schedule.keyframes
    seal.update(struct.pack("<I", len(keyframes)))
    for index, value in keyframes.items():
        seal.update(struct.pack("<Id", index, value))
    seal.update(struct.pack("<I", len(manifest.interventions)))
    for item in manifest.interventions:
        values = patch.vector_for(item.vector).float32().astype("<f4", copy=False)
        seal.update(struct.pack("<IBdI", item.layer, _SITES[item.site], item.coefficient, values.size))
        seal.update(values.tobytes())
    return seal.hexdigest()
