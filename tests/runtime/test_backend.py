"""The contract of engines: installed patches, requests, and what is refused before an engine sees it."""

from __future__ import annotations

import threading

import pytest

from brainpatch.errors import (
    CapabilityError,
    PatchCompatibilityError,
    PatchFormatError,
    RequestError,
    UnknownPatchError,
)
from brainpatch.patch.manifest import BaseModelSpec
from brainpatch.patch.schedule import StrengthSchedule
from brainpatch.patch.tensors import vector
from brainpatch.runtime.backend import BrainPatchBackend
from brainpatch.runtime.capabilities import Capabilities
from brainpatch.runtime.config import GenerationConfig
from brainpatch.runtime.meaning import resolve_edits
from tests.factories import make_patch
from tests.runtime.engine import RecordingBackend


@pytest.fixture
def backend():
    return RecordingBackend()


def patch(name="formal", **fields):
    return make_patch([{"layer": 1, "coefficient": 2.0}], name=name, **fields)


def test_install_takes_the_default_strength(backend):
    active = backend.install_patch(patch(default_strength=0.5))
    assert (active.strength, active.enabled) == (0.5, True)
    assert backend.list_patches() == ["formal"]
    assert backend.changes == 1


def test_install_refuses_before_anything_changes(backend):
    with pytest.raises(PatchCompatibilityError, match="hidden"):
        backend.install_patch(patch(hidden=8))
    with pytest.raises(RequestError):
        backend.install_patch(patch(), strength=float("nan"))
    assert backend.patches == {}
    assert backend.changes == 0


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda p: setattr(p.manifest.interventions[0], "site", "promt"), "BP110"),
        (lambda p: setattr(p.manifest.interventions[0], "hook", "mlp"), "BP110"),
        (lambda p: setattr(p.manifest.interventions[0], "coefficient", float("nan")), "BP110"),
        (lambda p: setattr(p.manifest.interventions[0], "layer", -1), "BP110"),
        (lambda p: p.vectors.update(v=vector([1.0])), "BP117"),
        (lambda p: p.vectors.update(v=[1.0] * 4), "BP117"),
        (lambda p: p.vectors.clear(), "BP119"),
    ],
)
def test_a_patch_made_in_memory_is_checked_like_a_file(backend, change, code):
    made = patch()
    change(made)
    with pytest.raises(PatchFormatError) as caught:
        backend.install_patch(made)
    assert caught.value.code == code
    assert backend.patches == {}


def test_installed_patches_go_with_the_model(backend):
    backend.install_patch(patch())
    backend.unload()
    assert backend.list_patches() == []


def test_a_reinstalled_patch_keeps_its_place(backend):
    for name in ("a", "b", "a"):
        backend.install_patch(patch(name, seed=len(name)))
    assert backend.list_patches() == ["a", "b"]


def test_an_explicit_strength_is_stored_as_given_and_clamped_in_use(backend):
    with pytest.warns(UserWarning, match=r"\[brainpatch:recording\] formal: strength 20"):
        active = backend.install_patch(patch(), strength=20)
    assert active.strength == 20
    assert active.multiplier_at(0) == 8.0
    assert backend.resolve_edits()[0].coefficient == 16.0


def test_set_strength_clamps_warns_and_returns(backend):
    backend.install_patch(patch())
    with pytest.warns(UserWarning, match="beyond"):
        assert backend.set_strength("formal", -9) == -8.0
    assert backend.patches["formal"].strength == -8.0
    assert backend.set_strength("formal", 3) == 3.0


def test_unknown_names_are_key_errors(backend):
    for call in (
        lambda: backend.remove_patch("x"),
        lambda: backend.set_enabled("x", True),
        lambda: backend.set_strength("x", 1),
        lambda: backend.set_schedule("x", None),
        lambda: backend.vector_values("x", "v"),
        lambda: backend.generate("hi", patches={"x": 1}),
    ):
        with pytest.raises(KeyError):
            call()
        with pytest.raises(UnknownPatchError, match="installed: none"):
            call()


def test_resolve_edits_filters_layers_and_sites(backend):
    backend.install_patch(make_patch([{"layer": 1, "site": "prompt"}, {"layer": 2, "site": "continuation"}]))
    assert [e.layer for e in backend.resolve_edits()] == [1, 2]
    assert [e.layer for e in backend.resolve_edits(is_prompt_pass=True)] == [1]
    assert [e.layer for e in backend.resolve_edits(is_prompt_pass=False)] == [2]
    assert [e.layer for e in backend.resolve_edits(layer=2)] == [2]
    assert backend.active_layers() == [1, 2]


def test_a_disabled_patch_has_no_edits(backend):
    backend.install_patch(patch(), enabled=False)
    assert backend.resolve_edits() == []
    backend.set_enabled("formal", True)
    assert len(backend.resolve_edits()) == 1
    backend.remove_patch("formal")
    assert backend.resolve_edits() == []


def test_schedules_can_be_set_and_cleared(backend):
    backend.install_patch(patch(schedule=StrengthSchedule({0: 1.0, 4: 0.0})))
    assert [len(backend.resolve_edits(n)) for n in (3, 4)] == [1, 0]
    backend.set_schedule("formal", {"0": 0, "4": 1})
    assert [len(backend.resolve_edits(n)) for n in (3, 4)] == [0, 1]
    backend.set_schedule("formal", None)
    assert [len(backend.resolve_edits(n)) for n in (3, 4)] == [1, 1]
    with pytest.raises(RequestError):
        backend.set_schedule("formal", {"x": 1})


def test_a_refused_change_changes_nothing(backend):
    backend.install_patch(patch(), strength=1)
    backend.frozen = True
    for call in (
        lambda: backend.install_patch(patch("other")),
        lambda: backend.remove_patch("formal"),
        lambda: backend.set_enabled("formal", False),
        lambda: backend.set_strength("formal", 2),
        lambda: backend.set_schedule("formal", {"0": 2}),
    ):
        with pytest.raises(RuntimeError, match="frozen"):
            call()
    active = backend.patches["formal"]
    assert backend.list_patches() == ["formal"]
    assert (active.strength, active.enabled, active.schedule) == (1, True, None)


@pytest.mark.filterwarnings("ignore")
def test_what_the_author_says_of_the_engine_is_only_a_warning(backend):
    with pytest.warns(UserWarning, match="unsupported"):
        backend.install_patch(patch(compatibility={"vllm": {"status": "verified"}}))


def test_vector_values_are_floats(backend):
    backend.install_patch(patch(vectors={"v": [1.0, 2.0, 3.0, 4.0]}))
    assert backend.vector_values("formal", "v") == [1.0, 2.0, 3.0, 4.0]


# --- requests ---------------------------------------------------------------------------------


def test_a_request_is_the_snapshot_of_its_moment(backend):
    backend.install_patch(patch(), strength=1)
    backend.generate("hello")
    backend.set_strength("formal", 2)
    backend.generate("hello")
    first, second = (request.patches for request in backend.seen)
    assert (first.to_mapping(), second.to_mapping()) == ({"formal": 1.0}, {"formal": 2.0})
    assert first.digest != second.digest


def test_several_changes_are_one(backend):
    backend.install_patch(patch(max_abs_strength=2.0))
    before = backend.patches["formal"]
    for bad, code in (
        ({"strength": 1.5, "enabled": "x"}, "BP403"),
        ({"strength": float("nan"), "enabled": False}, "BP402"),
        ({"enabled": False, "schedule": {"0": "x"}}, "BP114"),
        ({"strength": 1.5, "speed": 1}, "BP403"),
        ({}, "BP403"),
    ):
        with pytest.raises(RequestError) as error:
            backend.change_patch("formal", **bad)
        assert error.value.code == code
        assert backend.patches["formal"] is before
        assert (before.strength, before.enabled, before.schedule) == (1.0, True, None)
    changed = backend.change_patch("formal", strength=9, enabled=False, schedule={"0": 1, "3": 0})
    assert (changed.strength, changed.enabled, changed.schedule.strength_at(3)) == (2.0, False, 0.0)
    assert (before.strength, before.enabled, before.schedule) == (1.0, True, None)  # whoever reads it now
    assert backend.change_patch("formal", schedule=None).schedule is None
    with pytest.raises(UnknownPatchError):
        backend.change_patch("nobody", strength=1)


def test_a_server_is_not_warned_of_what_clients_ask(backend, recwarn):
    backend.install_patch(patch(max_abs_strength=2.0))
    backend.warns_of_requests = False
    assert backend.resolve_patches({"formal": 9}).patches[0].strength == 2.0
    assert not recwarn


def test_what_is_known_of_a_set_serves_later_requests_until_something_changes(backend):
    backend.install_patch(patch())
    first = backend.resolve_patches({"formal": 0.5})
    assert backend.resolve_patches({"formal": 0.5}) is first
    assert backend.resolve_patches({"formal": 0.25}).digest != first.digest
    assert backend.resolve_patches({"formal": {"strength": 0.5, "schedule": {0: 1, 2: 0}}}) is not first
    backend.set_strength("formal", 0.5)
    assert backend.resolve_patches() is first
    changed = make_patch([{"layer": 1, "coefficient": 3.0}], name="formal")
    backend.install_patch(changed, strength=0.5)  # another patch of the same name
    assert backend.resolve_patches().digest != first.digest
    for x in range(300):  # more than are remembered
        assert backend.resolve_patches({"formal": x / 300}).patches[0].strength == x / 300
    backend.unload()
    assert not backend._known


def test_a_batch_takes_one_mapping_or_one_for_each(backend):
    backend.install_patch(patch(), strength=1)
    backend.generate_batch(["a", "b"], patches={"formal": 3})
    backend.generate_batch(["a", "b", "c"], patches=[None, {}, {"formal": -1}])
    assert [r.patches.to_mapping() for r in backend.seen] == [
        {"formal": 3.0},
        {"formal": 3.0},
        {"formal": 1.0},
        {},
        {"formal": -1.0},
    ]
    with pytest.raises(RequestError, match="2 entries for 1 prompts") as caught:
        backend.generate_batch(["a"], patches=[{}, {}])
    assert caught.value.code == "BP403"


def test_a_batch_takes_one_config_or_one_for_each(backend):
    configs = [GenerationConfig(max_new_tokens=1), GenerationConfig(max_new_tokens=2)]
    backend.generate_batch(["a", "b"], configs)
    assert [r.config.max_new_tokens for r in backend.seen] == [1, 2]
    with pytest.raises(RequestError, match="config has 2 entries") as caught:
        backend.generate_batch(["a"], configs)
    assert caught.value.code == "BP404"


def test_n_answers_are_n_requests_with_their_own_seeds(backend):
    answers = backend.generate_detailed(["a", "b"], GenerationConfig(n=3, seed=5))
    assert len(answers) == 6
    assert [r.config.seed for r in backend.seen] == [5, 6, 7, 5, 6, 7]
    assert {r.config.n for r in backend.seen} == {1}
    backend.seen.clear()
    backend.generate_detailed(["a"], GenerationConfig(n=2, seed=None))
    assert [r.config.seed for r in backend.seen] == [None, None]


def test_calls_that_return_one_text_refuse_more(backend):
    for call in (backend.generate, backend.stream):
        with pytest.raises(RequestError) as caught:
            call("a", GenerationConfig(n=2))
        assert caught.value.code == "BP404"


def test_one_bad_request_is_refused_before_the_engine_works(backend):
    backend.install_patch(patch())
    with pytest.raises(UnknownPatchError):
        backend.generate_batch(["a", "b"], patches=[{"formal": 1}, {"nobody": 1}])
    with pytest.raises(RequestError):
        backend.generate_batch(["a", "b"], [GenerationConfig(), GenerationConfig(temperature=-1)])
    with pytest.raises(RequestError, match="not a list"):
        backend.generate_detailed("a")
    assert backend.seen == []


def test_an_empty_batch_is_an_empty_list(backend):
    assert backend.generate_batch([]) == []
    assert backend.seen == []


def test_a_stream_is_checked_at_once_and_yields(backend):
    with pytest.raises(UnknownPatchError):
        backend.stream("a", patches={"nobody": 1})
    assert list(backend.stream("a", patches={})) == ["{}"]


def test_what_an_engine_cannot_do_is_checked_before_it_works(backend):
    backend.install_patch(patch(max_abs_strength=3.0))
    assert backend.checked == [{"formal": 3.0}]  # at its largest, so that a default of 0 hides nothing
    config = GenerationConfig(max_new_tokens=4)
    backend.generate("a", config, patches={"formal": 2})
    assert backend.checked[1:] == [config, {"formal": 2.0}]


def test_a_request_warns_of_a_clamped_strength_in_the_engines_name(backend):
    backend.install_patch(patch())
    with pytest.warns(UserWarning, match=r"\[brainpatch:recording\] formal: strength 50 .* clamped to 8"):
        backend.generate("a", patches={"formal": 50})


def test_a_mode_for_one_patch_goes_before_the_engines(backend):
    stranger = patch(base_model=BaseModelSpec("other/model", "Test", 4, 4))
    with pytest.raises(PatchCompatibilityError, match="other/model"):
        backend.install_patch(stranger)
    with pytest.warns(UserWarning, match="other/model"):
        backend.install_patch(stranger, mode="architecture")
    backend.compatibility_mode = "unsafe"
    with pytest.raises(PatchCompatibilityError):
        backend.install_patch(stranger, mode="strict")


def test_an_author_who_says_nothing_of_engines_is_no_warning(backend, recwarn):
    backend.install_patch(patch())
    backend.install_patch(patch("b", compatibility={"recording": {"status": "verified"}}))
    assert len(recwarn) == 0
    with pytest.warns(UserWarning, match="implemented"):
        backend.install_patch(patch("c", compatibility={"recording": {"status": "implemented"}}))


def test_edits_are_those_at_index_0_unless_told(backend):
    backend.install_patch(patch("off"), enabled=False)
    backend.install_patch(patch(schedule=StrengthSchedule({0: 1.0, 1: 0.0})))
    assert backend.resolve_edits() == [(1, "residual_post", "v", 2.0, "formal")]
    assert backend.active_layers() == [1]
    assert backend.resolve_edits(1) == []
    assert resolve_edits(backend.patches.values()) == backend.resolve_edits(0)


def test_without_a_model_the_engine_is_named(backend):
    error = backend._nothing_loaded()
    assert (error.code, "recording" in error.reason) == ("BP407", True)


def test_trace_needs_the_capability(backend, monkeypatch):
    monkeypatch.setattr(type(backend), "capabilities", classmethod(lambda cls: Capabilities("recording")))
    with pytest.raises(CapabilityError, match="trace") as caught:
        backend.trace("a")
    assert caught.value.code == "BP502"
    assert isinstance(caught.value, NotImplementedError)


def test_a_trace_follows_one_answer(backend):
    assert backend.trace("a", patches={}) == []
    with pytest.raises(RequestError) as caught:
        backend.trace("a", GenerationConfig(n=2))
    assert caught.value.code == "BP404"


def test_an_engine_without_text_says_so(backend):
    for call in (
        lambda: BrainPatchBackend._run(backend, []),
        lambda: BrainPatchBackend._run_trace(backend, None),
        lambda: BrainPatchBackend._encode(backend, "a", use_chat_template=True, system=None),
    ):
        with pytest.raises(CapabilityError):
            call()


def test_the_lock_is_not_held_over_generation(backend):
    backend.install_patch(patch())
    entered, leave = threading.Event(), threading.Event()
    run = backend._run

    def slow(requests):
        entered.set()
        assert leave.wait(10)
        return run(requests)

    backend._run = slow
    thread = threading.Thread(target=backend.generate, args=("a",))
    thread.start()
    assert entered.wait(10)
    backend.set_strength("formal", 4)  # would hang if the lock were held
    leave.set()
    thread.join(10)
    assert not thread.is_alive()
    assert backend.seen[0].patches.to_mapping() == {"formal": 1.0}


def test_a_backend_is_a_context_manager(backend):
    with backend as same:
        assert same is backend
