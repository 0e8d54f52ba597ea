"""The meaning: property tests against the formula written out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brainpatch.errors import RequestError, UnknownPatchError
from brainpatch.patch.schedule import StrengthSchedule
from brainpatch.runtime.meaning import ActivePatch, ResolvedSet, resolve
from tests.factories import make_patch

HIDDEN, LAYERS = 4, 3

numbers = st.sampled_from([-2.0, -1.0, -0.5, 0.0, 1e-13, 1e-12, 0.25, 1.0, 3.0])
schedules = st.none() | st.builds(
    StrengthSchedule,
    st.dictionaries(st.integers(0, 12), numbers, min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from([1.0, 0.0, -2.0]),
)
interventions = st.lists(
    st.fixed_dictionaries(
        {
            "layer": st.integers(0, LAYERS - 1),
            "vector": st.sampled_from(["v", "w"]),
            "coefficient": numbers,
            "site": st.sampled_from(["all", "prompt", "continuation"]),
        }
    ),
    min_size=1,
    max_size=4,
)


@st.composite
def installed_patches(draw):
    """Up to three patches with strengths (some beyond the bound) and schedules."""
    installed, wish = {}, {}
    for number in range(draw(st.integers(0, 3))):
        name = f"p{number}"
        patch = make_patch(
            draw(interventions), name=name, hidden=HIDDEN, layers=LAYERS, seed=number, max_abs_strength=2.0
        )
        installed[name] = ActivePatch(patch, schedule=draw(schedules))
        wish[name] = draw(numbers)
    return installed, wish


def by_hand(installed, wish, layer, position, prompt_length):
    """delta(layer, p) as docs/semantics.md writes it, in float64, and its list of coefficients."""
    total = np.zeros(HIDDEN)
    for name, strength in wish.items():
        active = installed[name]
        clamped = max(-2.0, min(2.0, strength))
        n = max(0, position - prompt_length)
        multiplier = clamped * (1.0 if active.schedule is None else active.schedule.strength_at(n))
        for item in active.manifest.interventions:
            matches = item.site == "all" or (item.site == "prompt") == (position < prompt_length)
            coefficient = multiplier * item.coefficient
            if item.layer == layer and matches and abs(multiplier) >= 1e-12 and abs(coefficient) >= 1e-12:
                total += coefficient * np.array(active.patch.vector_for(item.vector).data)
    return total


def quiet(_: str) -> None:
    """Clamping is meant here."""


def engine_view(resolved, layer, start, count, prompt_length):
    """What an engine adds at start..start+count-1 when it follows `segments`."""
    added = np.zeros((count, HIDDEN))
    if layer in resolved.layers:
        for first, last, coefficients in resolved.segments(layer, start, count, prompt_length):
            added[first - start : last - start] += resolved.sum(layer, coefficients)
    return added


@given(installed_patches(), st.integers(0, 6), st.integers(1, 8), st.integers(0, LAYERS - 1))
@settings(max_examples=300, deadline=None)
def test_what_is_added_is_the_formula(patches, prompt_length, generated, layer):
    installed, wish = patches
    resolved = resolve(wish, installed, warn=quiet)
    count = prompt_length + generated
    added = engine_view(resolved, layer, 0, count, prompt_length)
    expected = np.array([by_hand(installed, wish, layer, p, prompt_length) for p in range(count)])
    np.testing.assert_allclose(added, expected, rtol=1e-5, atol=1e-6)


@given(installed_patches(), st.integers(0, 6), st.lists(st.integers(1, 5), min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_an_edit_does_not_depend_on_how_positions_are_split(patches, prompt_length, chunks):
    installed, wish = patches
    resolved = resolve(wish, installed, warn=quiet)
    for layer in range(LAYERS):
        whole = engine_view(resolved, layer, 0, sum(chunks), prompt_length)
        parts, start = [], 0
        for chunk in chunks:
            parts.append(engine_view(resolved, layer, start, chunk, prompt_length))
            start += chunk
        np.testing.assert_array_equal(np.concatenate(parts), whole)


@given(installed_patches(), st.integers(0, 6), st.integers(1, 10))
@settings(max_examples=150, deadline=None)
def test_segments_are_ascending_disjoint_and_never_empty(patches, prompt_length, count):
    installed, wish = patches
    resolved = resolve(wish, installed, warn=quiet)
    for layer in resolved.layers:
        end = -1
        for first, last, coefficients in resolved.segments(layer, 0, count, prompt_length):
            assert end <= first < last <= count or (end == -1 and 0 <= first < last <= count)
            assert any(coefficients)
            end = last


def test_padding_gets_nothing():
    resolved = resolve({"p": 1}, {"p": ActivePatch(make_patch([{"layer": 1}]))})
    assert resolved.segments(1, -3, 5, 2) == [(0, 2, (1.0,))]
    assert resolved.segments(1, -3, 2, 2) == []
    assert resolved.segments(1, -3, 3, 2) == []
    sited = resolve({"p": 1}, {"p": ActivePatch(make_patch([{"layer": 1, "site": "prompt"}]))})
    assert sited.segments(1, -3, 6, 2) == [(0, 2, (1.0,))]
    assert sited.segments(1, -3, 3, 2) == []
    assert sited.coefficients(1, np.array([-2, -1, 0, 1, 2]), 2).tolist() == [
        [0.0],
        [0.0],
        [1.0],
        [1.0],
        [0.0],
    ]


def test_opposite_edits_are_still_edits_and_zero_ones_none():
    cancelled = make_patch([{"layer": 1, "coefficient": 1.0}, {"layer": 1, "coefficient": -1.0}])
    resolved = resolve({"p": 1}, {"p": ActivePatch(cancelled)})
    assert resolved.segments(1, 0, 2, 1) == [(0, 2, (1.0, -1.0))]
    assert resolved.sum(1, (1.0, -1.0)).tolist() == [0.0] * HIDDEN
    small = resolve({"p": 1e-7}, {"p": ActivePatch(make_patch([{"layer": 1, "coefficient": 2e-6}]))})
    assert small.is_empty


def test_a_set_without_its_prompt_edits():
    items = [
        {"layer": 0},
        {"layer": 1, "site": "prompt", "vector": "w"},
        {"layer": 2, "site": "continuation", "vector": "x"},
    ]
    active = ActivePatch(make_patch(items), schedule=StrengthSchedule({0: 1.0, 3: 2.0}))
    later = resolve({"p": 0.5}, {"p": active}).continuation_only()
    assert later.layers == (0, 2)
    assert later.segments(0, 0, 8, 4) == [(4, 7, (0.5,)), (7, 8, (1.0,))]
    assert later.to_mapping() == resolve({"p": 0.5}, {"p": active}).to_mapping()


def test_a_constant_patch_is_one_segment():
    resolved = resolve({"p": 0.5}, {"p": ActivePatch(make_patch([{"layer": 1, "coefficient": 3.0}]))})
    assert resolved.segments(1, 0, 1000, 600) == [(0, 1000, (1.5,))]


def test_the_first_generated_token_index_is_zero_and_the_prompt_shares_it():
    patch = make_patch([{"layer": 0}], schedule=StrengthSchedule({0: 2.0, 1: 0.0}))
    resolved = resolve(None, {"p": ActivePatch(patch)})
    assert resolved.segments(0, 0, 6, 4) == [(0, 5, (2.0,))]


@pytest.mark.parametrize(
    ("site", "expected"), [("all", [(0, 6)]), ("prompt", [(0, 4)]), ("continuation", [(4, 6)])]
)
def test_sites_divide_at_the_prompt_length(site, expected):
    resolved = resolve({"p": 1}, {"p": ActivePatch(make_patch([{"layer": 0, "site": site}]))})
    assert [(s.first, s.last) for s in resolved.segments(0, 0, 6, 4)] == expected


@pytest.mark.parametrize(
    ("strength", "coefficient", "schedule"),
    [
        (0.0, 1.0, None),
        (9e-13, 1.0, None),
        (1.0, 0.0, None),
        (1e-6, 1e-7, None),
        (1.0, 1.0, StrengthSchedule({0: 0.0})),
    ],
)
def test_zero_is_nothing(strength, coefficient, schedule):
    active = ActivePatch(make_patch([{"layer": 2, "coefficient": coefficient}]), schedule=schedule)
    resolved = resolve({"p": strength}, {"p": active})
    assert resolved.is_empty
    assert resolved.layers == ()
    assert resolved.digest == ResolvedSet().digest
    assert list(resolved.to_mapping()) == ["p"]


def test_exactly_epsilon_is_applied():
    resolved = resolve({"p": 1e-12}, {"p": ActivePatch(make_patch([{"layer": 2}]))})
    assert resolved.segments(2, 0, 1, 1) == [(0, 1, (1e-12,))]


def test_a_schedule_that_begins_late_holds_its_default_before():
    schedule = StrengthSchedule({5: 0.0})
    resolved = resolve({"p": 1}, {"p": ActivePatch(make_patch([{"layer": 0}]), schedule=schedule)})
    assert not resolved.is_empty
    assert resolved.segments(0, 0, 10, 2) == [(0, 7, (1.0,))]


def test_the_product_is_not_clamped_again():
    patch = make_patch([{"layer": 0}], schedule=StrengthSchedule({0: 50.0}))
    resolved = resolve({"p": 100}, {"p": ActivePatch(patch)}, warn=quiet)
    assert resolved.segments(0, 0, 1, 1) == [(0, 1, (400.0,))]


def test_terms_are_summed_in_float32_in_order():
    vectors = {"v": [1.0, 0, 0, 0], "w": [1e8, 0, 0, 0], "x": [-1e8, 0, 0, 0]}
    patch = make_patch([{"layer": 0, "vector": key} for key in "wvx"], vectors=vectors)
    resolved = resolve({"p": 1}, {"p": ActivePatch(patch)})
    total = resolved.sum(0, (1.0, 1.0, 1.0))
    assert total.dtype == np.float32
    assert total[0] == 0.0  # 1 is lost beside 1e8 in float32
    assert resolved.expected_norm(0, (1.0, 1.0, 1.0)) == 1.0  # and kept in float64


def test_vectors_cannot_be_written():
    active = ActivePatch(make_patch([{"layer": 0}]))
    with pytest.raises(ValueError, match="read-only"):
        active.interventions[0].vector[0] = 1


# --- the digest -------------------------------------------------------------------------------

BASE = {"layer": 1, "vector": "v", "coefficient": 1.0, "site": "all"}


def digest(changes=(), *, strength=1.0, schedule=None, name="p", seed=0, twice=False):
    patch = make_patch([BASE | dict(changes)] * (2 if twice else 1), name=name, seed=seed)
    return resolve({name: strength}, {name: ActivePatch(patch, schedule=schedule)}).digest


def test_the_digest_is_stable():
    assert digest() == digest()
    assert len(digest()) == 64


def test_the_digest_ignores_names():
    assert digest(name="q") == digest()


@pytest.mark.parametrize(
    "other",
    [
        {"changes": {"layer": 2}},
        {"changes": {"coefficient": 2.0}},
        {"changes": {"site": "prompt"}},
        {"strength": 0.5},
        {"strength": -1.0},
        {"seed": 1},
        {"twice": True},
        {"schedule": StrengthSchedule({0: 1.0, 3: 0.0})},
        {"schedule": StrengthSchedule({0: 1.0, 4: 0.0})},
        {"schedule": StrengthSchedule({0: 1.0, 3: 0.5})},
        {"schedule": StrengthSchedule({0: 1.0, 3: 0.0}, interpolate=True)},
        {"schedule": StrengthSchedule({1: 1.0, 3: 0.0}, default=0.25)},
        {"schedule": StrengthSchedule({1: 1.0, 3: 0.0}, default=0.5)},
    ],
    ids=str,
)
def test_the_digest_tells_meanings_apart(other):
    others = [
        {"changes": {"layer": 2}},
        {"schedule": StrengthSchedule({0: 1.0, 3: 0.0})},
        {"schedule": StrengthSchedule({1: 1.0, 3: 0.0}, default=0.25)},
    ]
    assert digest(**other) != digest()
    for candidate in others:
        if candidate != other:
            assert digest(**candidate) != digest(**other)


def test_an_equal_part_at_another_layer_is_another_meaning():
    two = make_patch([BASE, BASE | {"layer": 2}])
    one = make_patch([BASE])
    assert (
        resolve({"p": 1}, {"p": ActivePatch(two)}).digest != resolve({"p": 1}, {"p": ActivePatch(one)}).digest
    )


# --- a request's patches ----------------------------------------------------------------------


@pytest.fixture
def installed():
    on = ActivePatch(make_patch([{"layer": 0}], name="on", seed=1), 0.5)
    off = ActivePatch(make_patch([{"layer": 1}], name="off", seed=2), 2.0, enabled=False)
    plan = ActivePatch(
        make_patch([{"layer": 2}], name="plan", seed=3, schedule=StrengthSchedule({0: 1.0, 9: 0.0})), 1.0
    )
    return {"on": on, "off": off, "plan": plan}


def test_none_means_the_installed_ones_that_are_on(installed):
    resolved = resolve(None, installed)
    assert [patch.name for patch in resolved.patches] == ["on", "plan"]
    assert resolved.layers == (0, 2)


def test_an_empty_mapping_means_nothing(installed):
    assert resolve({}, installed).patches == ()


def test_named_ones_are_used_whether_on_or_not(installed):
    resolved = resolve({"off": -3}, installed)
    assert resolved.to_mapping() == {"off": -3.0}
    assert resolved.layers == (1,)


def test_what_a_request_leaves_out_is_the_installed_value(installed):
    schedule = {"0": 1, "5": 0}
    assert resolve({"off": {}}, installed).to_mapping() == {"off": 2.0}
    changed = resolve({"off": {"schedule": schedule}}, installed).patches[0]
    assert changed.strength == 2.0
    assert changed.schedule == StrengthSchedule({0: 1.0, 5: 0.0})
    kept = resolve({"plan": 2}, installed).patches[0]
    assert kept.schedule == StrengthSchedule({0: 1.0, 9: 0.0})
    assert (
        resolve({"plan": {"strength": 2, "schedule": None}}, installed).patches[0].schedule == kept.schedule
    )


def test_the_mapping_can_be_asked_for_again(installed):
    first = resolve({"plan": {"strength": 0.25, "schedule": {"0": 1, "5": 0}}, "on": 3}, installed)
    assert resolve(first.to_mapping(), installed).digest == first.digest


def test_a_resolved_set_keeps_what_it_was_made_of(installed):
    resolved = resolve(None, installed)
    before = resolved.digest
    installed["on"].strength = 7.0
    installed["plan"].enabled = False
    assert resolved.digest == before
    assert resolved.segments(0, 0, 1, 1) == [(0, 1, (0.5,))]


def test_a_strength_beyond_the_bound_is_clamped_with_a_warning(installed):
    said = []
    resolved = resolve({"on": -99}, installed, warn=said.append)
    assert resolved.to_mapping() == {"on": -8.0}
    assert len(said) == 1
    assert "-99" in said[0]
    assert "-8" in said[0]


def test_within_the_bound_nothing_is_said(installed):
    resolve({"on": 8}, installed, warn=pytest.fail)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, "1", None, [1], 10**400])
def test_a_strength_that_is_no_finite_number_is_refused(installed, value):
    with pytest.raises(RequestError, match=r"patches\['on'\]") as caught:
        resolve({"on": value}, installed)
    assert caught.value.code == "BP402"
    with pytest.raises(RequestError):
        resolve({"on": {"strength": value}}, installed)


def test_an_unknown_patch_is_refused_naming_near_ones(installed):
    with pytest.raises(UnknownPatchError, match="near it: plan") as caught:
        resolve({"plann": 1}, installed)
    assert caught.value.code == "BP401"
    assert isinstance(caught.value, KeyError)
    with pytest.raises(UnknownPatchError, match="installed: on, off, plan"):
        resolve({"zzz": 1}, installed)
    with pytest.raises(UnknownPatchError, match="installed: none"):
        resolve({"zzz": 1}, {})


@pytest.mark.parametrize(
    ("wish", "code"),
    [
        ([("on", 1)], "BP403"),
        ("on", "BP403"),
        ({"on": {"strenght": 1}}, "BP403"),
        ({"on": {"schedule": [1]}}, "BP403"),
        ({"on": {"schedule": {}}}, "BP114"),
        ({"on": {"schedule": {"-1": 1}}}, "BP114"),
        ({"on": {"schedule": {"0": math.nan}}}, "BP114"),
        ({"on": {"schedule": {"0": 2000}}}, "BP114"),
    ],
)
def test_a_wrong_mapping_is_refused_by_code(installed, wish, code):
    with pytest.raises(RequestError) as caught:
        resolve(wish, installed)
    assert caught.value.code == code


def test_depends_on_position(installed):
    assert not resolve({"on": 1}, installed).depends_on_position
    assert resolve({"plan": 1}, installed).depends_on_position
    assert not resolve({"on": {"schedule": {"0": 2}}}, installed).depends_on_position
    sited = {"p": ActivePatch(make_patch([{"layer": 0, "site": "prompt"}]))}
    assert resolve({"p": 1}, sited).depends_on_position
    assert not resolve({"p": 0}, sited).depends_on_position
