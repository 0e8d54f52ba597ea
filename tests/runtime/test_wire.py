"""A set as bytes: the round trip keeps the meaning, and no bytes make anything but a set or an error."""

from __future__ import annotations

import pickle
import struct

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from brainpatch.errors import RequestError
from brainpatch.patch.limits import MAX_HIDDEN_SIZE, MAX_INTERVENTIONS, MAX_KEYFRAMES, MAX_NUM_LAYERS
from brainpatch.patch.schedule import StrengthSchedule
from brainpatch.runtime import wire
from brainpatch.runtime.meaning import ActivePatch, ResolvedPatch, ResolvedSet, resolve
from tests.factories import make_patch
from tests.resolved_sets import POOL, VECTORS, resolved, sets

MESSAGES = [wire.encode(patches) for patches in POOL[:12]]
VECTOR = struct.pack("<3f", 1.0, -2.0, 0.5)
NAN, INFINITY = float("nan"), float("inf")


def message(**changes) -> list:
    """A good message of one patch, with `changes` to its parts."""
    parts = {
        "version": 1,
        "vectors": [VECTOR],
        "layer": 1,
        "site": 0,
        "coefficient": 2.0,
        "vector": 0,
        "strength": 0.5,
        "schedule": [{0: 1.0, 4: 0.0}, True, 1.0],
        **changes,
    }
    item = [parts["layer"], parts["site"], parts["coefficient"], parts["vector"]]
    return [parts["version"], parts["vectors"], [[parts["strength"], parts["schedule"], [item]]]]


def packed(value) -> bytes:
    return msgspec.msgpack.encode(value)


def read_or_refused(data: bytes) -> ResolvedSet | None:
    """What `decode` makes of it: a set that can be used, or BP410."""
    try:
        found = wire.decode(data)
    except RequestError as error:
        assert error.code == "BP410"
        assert error.__cause__ is None
        return None
    for layer, terms in found.terms.items():
        assert 0 <= layer < MAX_NUM_LAYERS
        for strength, schedule, item in terms:
            assert item.site in ("all", "prompt", "continuation")
            assert np.isfinite([strength, item.coefficient]).all()
            assert np.isfinite(item.vector).all()
            assert schedule is None or np.isfinite([schedule.default, *schedule.keyframes.values()]).all()
    again = wire.decode(wire.encode(found))
    assert again.digest == found.digest
    return found


@given(sets)
@settings(max_examples=100, deadline=None)
def test_the_round_trip_keeps_what_the_set_means(patches):
    data = wire.encode(patches)
    found = wire.decode(data)
    assert found.digest == patches.digest
    assert found.layers == patches.layers
    assert found.depends_on_position == patches.depends_on_position
    positions = np.arange(14)
    for layer in patches.layers:
        assert found.vectors(layer).tobytes() == patches.vectors(layer).tobytes()
        wanted = patches.coefficients(layer, positions, 3)
        np.testing.assert_array_equal(found.coefficients(layer, positions, 3), wanted)
    assert wire.encode(found) == data


@given(st.lists(st.sampled_from(sorted(VECTORS)), min_size=1, max_size=3), st.sampled_from([-1, 0, 1, 3]))
@settings(max_examples=50, deadline=None)
def test_equal_sets_give_equal_bytes_whatever_made_them(vectors, strength):
    """Names, and whether a number was written as 1 or as 1.0, are not part of a set."""

    def made(number: type, prefix: str) -> ResolvedSet:
        items = [
            {"layer": i, "vector": vector, "coefficient": number(2), "site": "all"}
            for i, vector in enumerate(vectors)
        ]
        schedule = StrengthSchedule({4: number(2), 0: number(1)}, default=number(1))
        return resolved((items, number(strength), schedule), (items, number(1), None), prefix=prefix)

    whole, broken = made(int, "p"), made(float, "q")
    assert whole.digest == broken.digest
    assert wire.encode(whole) == wire.encode(broken)


def test_a_strength_at_a_bound_that_is_a_whole_number_gives_the_same_bytes():
    def at_bound(bound: float, strength: float) -> bytes:
        patch = make_patch([{"layer": 0, "site": "all"}], max_abs_strength=bound)
        return wire.encode(resolve({"p": strength}, {"p": ActivePatch(patch)}, warn=lambda _: None))

    assert at_bound(2, 5) == at_bound(2.0, 5.0) == at_bound(2.0, 2)


def test_a_vector_that_is_used_often_is_carried_once():
    items = [{"layer": layer, "vector": "v", "site": "all"} for layer in range(4)]
    patch = make_patch(items, hidden=512)
    once = wire.encode(resolve({"p": 1.0}, {"p": ActivePatch(patch)}))
    assert 4 * 512 < len(once) < 5 * 512


def test_what_has_no_effect_is_not_carried():
    item = {"layer": 0, "vector": "v0", "coefficient": 1.0, "site": "all"}
    without = wire.encode(resolved(([item], 1.0, None)))
    nothing = [{**item, "vector": "v1", "coefficient": 0.0}]
    off = StrengthSchedule({0: 0.0})
    assert (
        wire.encode(resolved(([item, *nothing], 1.0, None), ([item], 0.0, None), ([item], 1.0, off)))
        == without
    )
    assert wire.decode(wire.encode(resolved((nothing, 1.0, None)))).is_empty
    assert wire.decode(wire.encode(ResolvedSet())).digest == ResolvedSet().digest


def test_a_vector_that_was_read_cannot_be_written_to():
    ((term,),) = wire.decode(packed(message())).terms.values()
    assert not term.item.vector.flags.writeable


def test_a_good_message_is_read():
    found = read_or_refused(packed(message()))
    assert found is not None
    ((strength, schedule, item),) = found.terms[1]
    assert (strength, schedule) == (0.5, StrengthSchedule({0: 1.0, 4: 0.0}, interpolate=True))
    assert (item.layer, item.site, item.coefficient, item.vector.tolist()) == (
        1,
        "all",
        2.0,
        [1.0, -2.0, 0.5],
    )


REFUSED = {
    "an older version": message(version=0),
    "a newer version": message(version=2),
    "true for 1": message(version=True),
    "a strength that is no number": message(strength=NAN),
    "an infinite strength": message(strength=-INFINITY),
    "a strength that no patch may have": message(strength=1024.5),
    "a coefficient that no patch may have": message(coefficient=-1024.5),
    "a strength as a text": message(strength="1"),
    "a coefficient that is no number": message(coefficient=NAN),
    "an infinite coefficient": message(coefficient=INFINITY),
    "a layer below 0": message(layer=-1),
    "a layer beyond the limit": message(layer=MAX_NUM_LAYERS),
    "a layer beyond 64 bits": message(layer=2**64 - 1),
    "a layer that is not whole": message(layer=0.5),
    "a site below 0": message(site=-1),
    "a site beyond the last": message(site=3),
    "a vector's number below 0": message(vector=-1),
    "a vector's number beyond the last": message(vector=1),
    "an empty vector": message(vectors=[b""]),
    "a vector beyond the limit": message(vectors=[bytes(4 * (MAX_HIDDEN_SIZE + 1))]),
    "more edits than a patch may have": [
        1,
        [VECTOR],
        [[1.0, None, [[0, 0, 1.0, 0]] * (MAX_INTERVENTIONS + 1)]],
    ],
    "a vector of half a number": message(vectors=[VECTOR[:-2]]),
    "a vector with NaN": message(vectors=[struct.pack("<2f", 1.0, NAN)]),
    "a vector with infinity": message(vectors=[struct.pack("<2f", -INFINITY, 1.0)]),
    "a spare vector with NaN": message(vectors=[VECTOR, struct.pack("<3f", 1.0, NAN, 0.0)]),
    "vectors of two lengths": message(vectors=[VECTOR, VECTOR[:-4]]),
    "a vector as a text": message(vectors=["abcd"]),
    "a keyframe with NaN": message(schedule=[{0: NAN}, False, 1.0]),
    "a keyframe beyond the limit": message(schedule=[{0: 1025.0}, False, 1.0]),
    "a default that is infinite": message(schedule=[{0: 1.0}, False, INFINITY]),
    "a negative index": message(schedule=[{-1: 1.0}, False, 1.0]),
    "an index beyond the limit": message(schedule=[{2**31: 1.0}, False, 1.0]),
    "no keyframe": message(schedule=[{}, False, 1.0]),
    "too many keyframes": message(schedule=[dict.fromkeys(range(MAX_KEYFRAMES + 1), 1.0), False, 1.0]),
    "interpolate as a number": message(schedule=[{0: 1.0}, 1, 1.0]),
    "a schedule with a part too many": message(schedule=[{0: 1.0}, False, 1.0, 0]),
    "a schedule that lacks a part": message(schedule=[{0: 1.0}, False]),
    "a set with a part too many": [*message(), 0],
    "a set that lacks a part": message()[:2],
    "a mapping": {"version": 1, "vectors": [], "patches": []},
    "nothing": None,
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_forged_message_is_refused(what):
    with pytest.raises(RequestError) as caught:
        wire.decode(packed(REFUSED[what]))
    assert caught.value.code == "BP410"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        packed(message()) + b"\0",
        pickle.dumps(message()),
        b"\x93\x01\xdd\xff\xff\xff\xff",  # four thousand million vectors are announced
        b"\x93\x01\x91\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,
    ],
    ids=["nothing", "something after it", "pickle", "many vectors", "a long vector", "depth"],
)
def test_bytes_that_are_no_message_are_refused(data):
    assert read_or_refused(data) is None


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_set_or_an_error(data):
    read_or_refused(data)


@given(st.sampled_from(MESSAGES), st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_bytes_are_a_set_or_an_error(data, draw):
    damaged = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.integers(0, max(0, len(damaged) - 1)))
        piece = draw.draw(st.binary(max_size=9))
        kind = draw.draw(st.sampled_from(["put", "insert", "cut"]))
        if kind == "cut":
            del damaged[at : at + len(piece)]
        else:
            damaged[at : at + (len(piece) if kind == "put" else 0)] = piece
    read_or_refused(bytes(damaged))


wild = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.integers(-2, 4)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=8)
    | st.sampled_from([VECTOR, [VECTOR], [VECTOR, VECTOR], [], {}, [{0: 1.0}, True, 0.0]])
)
parts = sorted({"version", "vectors", "layer", "site", "coefficient", "vector", "strength", "schedule"})


@given(st.dictionaries(st.sampled_from(parts), wild, min_size=1, max_size=3))
@example({"strength": 1e308, "coefficient": 1e308, "schedule": None})
@settings(max_examples=150, deadline=None)
def test_a_message_with_wild_parts_is_a_set_or_an_error(changes):
    read_or_refused(packed(message(**changes)))


def test_an_error_is_not_remembered_as_a_set():
    for _ in range(2):
        with pytest.raises(RequestError):
            wire.decode(packed(message(version=9)))


def test_one_intervention_in_two_patches_is_carried_for_those_that_act():
    """Patches may share their interventions, and only one of them be on."""
    item = {"layer": 0, "vector": "v0", "coefficient": 1.0, "site": "all"}
    (on,) = resolved(([item], 1.0, None)).patches
    off = ResolvedPatch("off", 0.0, None, on.interventions)
    assert wire.encode(ResolvedSet([on, off])) == wire.encode(ResolvedSet([on]))
