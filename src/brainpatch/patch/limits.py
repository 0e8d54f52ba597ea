"""Every limit of the file format, in one place. Exceeding one is refused before it costs anything."""

from __future__ import annotations

from typing import Final

MIB: Final = 1 << 20

MAX_ARCHIVE_BYTES: Final = 256 * MIB
"""Default bound on the file, and on its vectors once inflated; `max_archive_bytes` replaces it."""
MAX_MANIFEST_BYTES: Final = MIB
MAX_README_BYTES: Final = MIB
MAX_CHECKSUMS_BYTES: Final = 4096
"""Four entries of a name and 64 digits need less than 500."""
MAX_TENSOR_HEADER_BYTES: Final = MIB

MAX_JSON_DEPTH: Final = 32
MAX_JSON_KEY_LENGTH: Final = 1024
"""In characters."""
MAX_JSON_NUMBER_LENGTH: Final = 400
"""In characters: longer than any double written out in full needs to be."""

MAX_INTERVENTIONS: Final = 4096
MAX_TENSORS: Final = 4096
MAX_SPARE_TENSORS: Final = 256
"""Tensors that no intervention names."""
MAX_KEYFRAMES: Final = 4096
MAX_JSON_OBJECT_KEYS: Final = MAX_TENSORS + 1
"""A full tensor header holds `__metadata__` as well."""

MAX_HIDDEN_SIZE: Final = 65536
MAX_NUM_LAYERS: Final = 4096
MAX_KEYFRAME_INDEX: Final = 2**31 - 1
MAX_ABS_SCHEDULE_VALUE: Final = 1024.0
MAX_ABS_COEFFICIENT: Final = 1024.0
ABSOLUTE_MAX_STRENGTH: Final = 1024.0
"""The largest `max_abs_strength` that a manifest may declare."""

MAX_PROVENANCE_BYTES: Final = 16384


def max_tensor_file_bytes(hidden_size: int, referenced: int) -> int:
    """The most bytes that vectors.safetensors can need: every tensor F64, and a full header."""
    return MAX_TENSOR_HEADER_BYTES + (referenced + MAX_SPARE_TENSORS) * hidden_size * 8
