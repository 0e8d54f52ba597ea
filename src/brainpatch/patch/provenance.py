"""The rules of a manifest's `provenance`: where a direction came from, in a few words, and no data rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from brainpatch.errors import PatchFormatError
from brainpatch.patch.limits import MAX_PROVENANCE_BYTES
from brainpatch.patch.text import visible

DISCOVERY_METHODS: Final = ("caa", "pca", "probe", "sae_single", "sae_sparse", "handwritten", "other")
EXTRACTION_POSITIONS: Final = ("last_prompt", "cont_mean", "cont_last", "all_tokens", "other")
INJECTION_SITES: Final = ("prompt", "continuation", "all")
FORBIDDEN_KEYS: Final = frozenset(
    ("examples", "prompts", "dataset", "training_data", "samples", "corpus", "responses")
)


def _one_of(names: tuple[str, ...]) -> tuple[Callable[[Any], bool], str]:
    return lambda value: isinstance(value, str) and value in names, "one of " + ", ".join(names)


_RULES: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "discovery_method": _one_of(DISCOVERY_METHODS),
    "extraction_position": _one_of(EXTRACTION_POSITIONS),
    "injection_site": _one_of(INJECTION_SITES),
    "training_dataset_hash": (
        lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None,
        "64 lower-case hexadecimal digits",
    ),
    "discovery_layer": (
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0,
        "an integer of 0 or more",
    ),
    "strength_calibration": (lambda value: isinstance(value, Mapping), "an object"),
}


def check_provenance(provenance: Mapping[str, Any]) -> None:
    """Raise PatchFormatError BP115 unless `provenance` keeps the rules of docs/format.

    Top-level keys alone are looked at; other keys are free. An empty mapping is always right.
    """
    for key in provenance:
        if isinstance(key, str) and key.strip().lower() in FORBIDDEN_KEYS:
            raise PatchFormatError("BP115", f'the key "{visible(key)}" would hold data rows')
    for key, (is_right, wanted) in _RULES.items():
        value = provenance.get(key)
        if value is not None and not is_right(value):
            raise PatchFormatError("BP115", f"{key} is not {wanted}")
    try:
        size = len(json.dumps(provenance, ensure_ascii=False, allow_nan=False).encode("utf-8"))
    except (TypeError, ValueError, RecursionError) as error:
        raise PatchFormatError("BP115", f"not JSON: {visible(str(error))}") from None
    if size > MAX_PROVENANCE_BYTES:
        raise PatchFormatError("BP115", f"{size} bytes; at most {MAX_PROVENANCE_BYTES} are allowed")
