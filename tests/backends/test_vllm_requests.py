"""What a request may carry into vLLM, and the salts that keep the KV blocks of different states apart."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from brainpatch.backends.vllm_requests import KEY, cache_salt, carried, carry, check_fits
from brainpatch.errors import RequestError
from brainpatch.patch.schedule import StrengthSchedule
from brainpatch.runtime import wire
from brainpatch.runtime.meaning import ActivePatch, ResolvedSet, resolve
from tests.factories import make_patch
from tests.resolved_sets import HIDDEN, POOL, resolved

EMPTY = ResolvedSet()
ITEM = {"layer": 2, "vector": "v0", "coefficient": 1.0, "site": "all"}
SAME = resolved(([ITEM], 1.0, None))
"""The same at every position."""
OTHER = resolved(([ITEM], 2.0, None))
MOVING = resolved(([ITEM], 1.0, StrengthSchedule({0: 1.0, 3: 0.0})))
STATES = [EMPTY, SAME, OTHER, MOVING]


def parameters(extra):
    return SimpleNamespace(extra_args=extra)


# --- what is carried -------------------------------------------------------------------------------


@pytest.mark.parametrize("patches", [p for p in POOL if not p.is_empty][:8])
def test_what_was_put_in_comes_out(patches):
    found = carried(parameters({KEY: carry(patches, tag="t", trace=True), "other": 1}))
    assert found is not None
    assert (found.patches.digest, found.tag, found.trace) == (patches.digest, "t", True)


def test_the_tag_and_the_trace_may_be_left_out():
    found = carried(parameters({KEY: {"set": wire.encode(SAME)}}))
    assert found is not None
    assert (found.patches.digest, found.tag, found.trace) == (SAME.digest, "", False)


def test_a_set_without_effect_is_not_carried():
    assert carry(EMPTY, tag="t", trace=True) is None
    assert carry(resolved(([ITEM], 0.0, None))) is None


@pytest.mark.parametrize("extra", [None, {}, {"kv_transfer_params": {}}])
def test_a_request_of_somebody_elses_carries_nothing(extra):
    assert carried(parameters(extra)) is None
    assert carried(SimpleNamespace()) is None


GOOD = {"set": wire.encode(SAME), "tag": "t", "trace": False}
FORGED = {
    "nothing": None,
    "the bytes alone": GOOD["set"],
    "a list": [GOOD],
    "a text": "formal",
    "an empty mapping": {},
    "no set": {"tag": "t", "trace": True},
    "the set as a text": {**GOOD, "set": GOOD["set"].hex()},
    "the set as numbers, as JSON has them": {**GOOD, "set": list(GOOD["set"])},
    "the set as a bytearray": {**GOOD, "set": bytearray(GOOD["set"])},
    "the set itself": {**GOOD, "set": SAME},
    "bytes that are no set": {**GOOD, "set": b"x"},
    "a set that was cut": {**GOOD, "set": GOOD["set"][:-1]},
    "an unknown key": {**GOOD, "patches": {"formal": 1.0}},
    "a key that is no text": {**GOOD, 1: 1},
    "a trace that is a number": {**GOOD, "trace": 1},
    "a trace that is nothing": {**GOOD, "trace": None},
    "a tag that is a number": {**GOOD, "tag": 1},
    "a tag that is nothing": {**GOOD, "tag": None},
    "a tag of 65 characters": {**GOOD, "tag": "t" * 65},
}


@pytest.mark.parametrize("what", FORGED)
def test_what_carry_does_not_make_is_refused(what):
    with pytest.raises(RequestError) as caught:
        carried(parameters({KEY: FORGED[what]}))
    assert caught.value.code == "BP410"


@pytest.mark.parametrize("extra", [7, "brainpatch", [KEY], 1.5])
def test_arguments_that_are_no_mapping_are_refused(extra):
    with pytest.raises(RequestError, match="BP410"):
        carried(parameters(extra))


def test_a_tag_of_64_characters_is_taken():
    found = carried(parameters({KEY: {**GOOD, "tag": "t" * 64}}))
    assert found is not None
    assert found.tag == "t" * 64


# --- what fits -------------------------------------------------------------------------------------


def test_a_set_fits_a_model_that_has_its_blocks_and_its_width():
    check_fits(SAME, 3, HIDDEN)
    check_fits(EMPTY, 0, 0)
    for num_layers, hidden_size in ((2, HIDDEN), (3, HIDDEN + 1), (3, HIDDEN - 1), (3, 1)):
        with pytest.raises(RequestError) as caught:
            check_fits(SAME, num_layers, hidden_size)
        assert caught.value.code == "BP410"


def test_every_edit_must_fit_not_only_the_first():
    patch = make_patch([{"layer": 0, "site": "all"}, {"layer": 3, "site": "all"}], hidden=HIDDEN)
    patches = resolve({"p": 1.0}, {"p": ActivePatch(patch)})
    check_fits(patches, 4, HIDDEN)
    with pytest.raises(RequestError, match="block 3"):
        check_fits(patches, 3, HIDDEN)


# --- salts -----------------------------------------------------------------------------------------


def meant(patches: ResolvedSet, own: str | None) -> str:
    """A caller's salt, without what `cache_salt` puts before it for these patches; no salt is an empty one."""
    if own is None:
        return ""
    if patches.is_empty:
        return own.removeprefix("brainpatch::")
    before = f"brainpatch:{patches.digest}:"
    if not own.startswith(before):
        return own
    length, colon, rest = own.removeprefix(before).partition(":")
    return rest if colon and all(c in "0123456789" for c in length) else own


def hostile_salts() -> list[str | None]:
    """Up to three of the pieces that salts are made of, in every order."""
    before = [f"brainpatch:{patches.digest}:" for patches in STATES[1:]]
    pieces = [
        *before,
        SAME.digest,
        "brainpatch:",
        ":",
        "7",
        "7:",
        "x",
        "٣:",
        "\n",
    ]  # ٣ is a digit, and not ours
    return [None, *sorted({"".join(some) for n in range(4) for some in product(pieces, repeat=n)})]


OWN = hostile_salts()


def test_two_requests_share_a_salt_when_they_are_in_one_state_and_not_else():
    """State: what the patches do, the prompt's length where that depends on it, and the caller's own salt."""
    states: dict[str | None, object] = {}
    salts: dict[object, str | None] = {}
    for patches, length, own in product(STATES, (None, 5, 7, 77), OWN):
        salt = cache_salt(patches, length, own)
        plain = patches.is_empty and own is None  # vLLM takes an empty salt as none; ours is never empty
        moving = length if patches.depends_on_position else None
        state = (patches.digest, moving, meant(patches, own), plain)
        assert states.setdefault(salt, state) == state
        assert salts.setdefault(state, salt) == salt
    assert len(states) > 5000


def test_no_salt_of_a_callers_names_another_state():
    """Whatever a request without these patches says, it does not get at their blocks."""
    for patches, own in product(STATES, OWN[::3]):
        salt = cache_salt(patches, 7, own)
        for others in STATES:
            if others is not patches:
                assert cache_salt(others, 7, salt) != salt
                assert cache_salt(others, 7, f"brainpatch:{patches.digest}:7:{own}") != salt


def test_a_salt_that_was_made_here_is_taken_as_it_was_meant():
    """A caller may give the salt of `VLLMBackend.cache_salt`, made before the prompt's length was known."""
    for patches, earlier, own in product(STATES, (None, 5), OWN):
        made = cache_salt(patches, earlier, own)
        assert cache_salt(patches, 7, made) == cache_salt(patches, 7, own)


def test_a_plain_request_shares_with_plain_ones():
    assert cache_salt(EMPTY, 5, None) is None
    assert cache_salt(resolved(([ITEM], 0.0, None)), 5, None) is None


def test_the_prompts_length_counts_only_where_the_edits_depend_on_the_position():
    assert cache_salt(SAME, 5, "x") == cache_salt(SAME, 6, "x") == cache_salt(SAME, None, "x")
    assert len({cache_salt(MOVING, length, "x") for length in (None, 1, 11, 111)}) == 4


def test_a_salt_that_only_begins_like_ours_stays_a_salt():
    for own in ("secret", "٣:secret", "-1:secret", ""):
        own = f"brainpatch:{SAME.digest}:{own}"
        assert cache_salt(SAME, 5, own) != cache_salt(SAME, 5, None)
        assert cache_salt(SAME, 5, own) != cache_salt(SAME, 5, "secret")


@given(st.text(max_size=5), st.integers(1, 99), st.text(max_size=5), st.integers(1, 99))
@settings(max_examples=100, deadline=None)
def test_length_and_salt_do_not_run_into_each_other(own, length, other, other_length):
    assume((own, length) != (other, other_length))
    assert cache_salt(MOVING, length, own) != cache_salt(MOVING, other_length, other)
