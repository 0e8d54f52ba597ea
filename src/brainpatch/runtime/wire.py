"""A resolved set as bytes, for engines whose forward pass runs in another process.

The bytes carry everything that a set means, vectors included, so that a request is whole in itself: no
process has to remember what a request refers to. Names are left out; `ResolvedSet.digest` is kept. The
form is MessagePack, read by a typed decoder: data from a stranger becomes a set or an error.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import msgspec

from brainpatch.errors import PatchFormatError, RequestError
from brainpatch.patch.limits import (
    ABSOLUTE_MAX_STRENGTH,
    MAX_ABS_COEFFICIENT,
    MAX_HIDDEN_SIZE,
    MAX_INTERVENTIONS,
    MAX_NUM_LAYERS,
)
from brainpatch.patch.schedule import StrengthSchedule
from brainpatch.runtime.meaning import PreparedIntervention, ResolvedPatch, ResolvedSet

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

VERSION: Final = 1
_SITES: Final = ("all", "prompt", "continuation")


class _Schedule(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    keyframes: dict[int, float]
    interpolate: bool
    default: float


class _Intervention(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    layer: int
    site: int
    coefficient: float
    vector: int


class _Patch(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    strength: float
    schedule: _Schedule | None
    interventions: list[_Intervention]


class _Set(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    version: int
    vectors: list[bytes]
    patches: list[_Patch]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Set)


@lru_cache(maxsize=64)  # a set is never changed, and the requests of a batch often share one
def encode(patches: ResolvedSet) -> bytes:
    """The set as bytes; equal sets give equal bytes. Vectors that are used twice are carried once."""
    numbers: dict[bytes, int] = {}
    vectors: list[bytes] = []
    carried = []
    effective = {
        (strength, id(schedule), id(item))
        for terms in patches.terms.values()
        for strength, schedule, item in terms
    }
    for patch in patches.patches:
        kept = []
        for item in patch.interventions:
            if (patch.strength, id(patch.schedule), id(item)) in effective:
                number = numbers.setdefault(item.vector_digest, len(vectors))
                if number == len(vectors):
                    vectors.append(item.vector.astype("<f4").tobytes())
                site = _SITES.index(item.site)
                kept.append(_Intervention(item.layer, site, float(item.coefficient), number))
        if kept:
            steps = patch.schedule
            schedule = (
                None if steps is None else _Schedule(dict(steps.keyframes), steps.interpolate, steps.default)
            )
            carried.append(_Patch(float(patch.strength), schedule, kept))
    return _ENCODER.encode(_Set(VERSION, vectors, carried))


@lru_cache(maxsize=64)
def decode(data: bytes) -> ResolvedSet:
    """The set that `encode` wrote. RequestError (BP410) for anything else, numbers that no patch may have included."""
    try:
        found = _DECODER.decode(data)
        if found.version != VERSION:
            raise RequestError("BP410", f"the set is of version {found.version}; {VERSION} is read")
        if any(len(patch.interventions) > MAX_INTERVENTIONS for patch in found.patches):
            raise RequestError("BP410", f"a patch of the set has more than {MAX_INTERVENTIONS} edits")
        vectors = _vectors(found.vectors)
        return ResolvedSet(
            ResolvedPatch(
                name=str(number),
                strength=_bounded("strength", patch.strength, ABSOLUTE_MAX_STRENGTH),
                schedule=None if patch.schedule is None else _schedule(patch.schedule),
                interventions=tuple(_intervention(item, vectors) for item in patch.interventions),
            )
            for number, patch in enumerate(found.patches)
        )
    except RequestError:
        raise
    except (msgspec.MsgspecError, PatchFormatError, ValueError, IndexError, OverflowError) as error:
        raise RequestError("BP410", f"the set cannot be read: {error}") from None


def _schedule(given: _Schedule) -> StrengthSchedule:
    return StrengthSchedule(given.keyframes, given.interpolate, given.default)


def _intervention(
    item: _Intervention, vectors: list[tuple[NDArray[np.float32], bytes]]
) -> PreparedIntervention:
    if not (0 <= item.layer < MAX_NUM_LAYERS and 0 <= item.site < len(_SITES) and item.vector >= 0):
        raise RequestError("BP410", "the set has a layer, a site or a vector number out of range")
    coefficient = _bounded("coefficient", item.coefficient, MAX_ABS_COEFFICIENT)
    return PreparedIntervention(item.layer, _SITES[item.site], coefficient, *vectors[item.vector])


def _bounded(what: str, number: float, limit: float) -> float:
    if not abs(number) <= limit:  # NaN included
        raise RequestError("BP410", f"the set has a {what} of {number:g}; at most {limit:g} is allowed")
    return number


def _vectors(given: list[bytes]) -> list[tuple[NDArray[np.float32], bytes]]:
    """The vectors with the digests of their contents; looked at all together, since a set can have many."""
    import numpy as np

    if not given:
        return []
    width = len(given[0])
    if any(len(raw) != width for raw in given):
        raise RequestError("BP410", "the set's vectors are of different lengths")
    if not 0 < width <= 4 * MAX_HIDDEN_SIZE or width % 4:
        raise RequestError("BP410", f"the set's vectors have {width} bytes")
    table = np.frombuffer(b"".join(given), dtype="<f4").reshape(len(given), -1)
    if not np.isfinite(table).all():
        raise RequestError("BP410", "the set has a vector that is not finite")
    return [(row, hashlib.sha256(raw).digest()) for row, raw in zip(table, given, strict=True)]
