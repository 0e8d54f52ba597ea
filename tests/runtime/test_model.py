"""BrainPatchedModel and PatchHandle."""

from __future__ import annotations

import pytest

from brainpatch import BaseModelSpec, BrainPatchedModel, GenerationConfig, PatchRegistry, save_patch
from brainpatch.errors import PatchCompatibilityError, PatchFormatError, RegistryError
from brainpatch.runtime.capabilities import Capabilities
from tests.factories import make_patch
from tests.runtime.engine import RecordingBackend


def patch(name="formal", **fields):
    return make_patch([{"layer": 1}], name=name, **fields)


@pytest.fixture
def model(tmp_path):
    return BrainPatchedModel(RecordingBackend(), PatchRegistry(tmp_path / "home"))


def test_install_by_object_path_and_name(model, tmp_path):
    loaded = patch()
    path = save_patch(loaded.manifest, loaded.vectors, tmp_path / "formal.brainpatch")
    assert model.install(loaded).name == "formal"
    assert model.install(path).name == "formal"
    assert model.install(str(path), strength=0.5).strength == 0.5
    model.registry.install_file(path)
    assert model.install("formal", enabled=False).enabled is False


def test_an_unknown_name_is_an_error_and_asks_nobody(model):
    with pytest.raises(RegistryError) as caught:
        model.install("nobody")
    assert caught.value.code == "BP302"


def test_a_corrupt_file_is_not_looked_for_elsewhere(model, tmp_path, monkeypatch):
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "name.brainpatch").write_bytes(b"nonsense")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model.registry, "install_from_hub", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(PatchFormatError):
        model.install("owner/name.brainpatch")


def test_a_hub_reference_goes_to_the_hub(model, monkeypatch, tmp_path):
    loaded = patch()
    path = save_patch(loaded.manifest, loaded.vectors, tmp_path / "formal.brainpatch")
    asked = []
    other = patch("other")
    model.registry.install_file(save_patch(other.manifest, other.vectors, tmp_path / "other.brainpatch"))

    def fetch(ref):
        asked.append(ref)
        return model.registry.install_file(path, source={"repo": "owner/formal", "file": "a.brainpatch"})

    monkeypatch.setattr(model.registry, "install_from_hub", fetch)
    assert model.install("owner/formal").name == "formal"
    assert asked == ["owner/formal"]
    # The next time it is here already.
    assert model.install("owner/formal").name == "formal"
    assert model.install("owner/formal:a.brainpatch").name == "formal"
    assert asked == ["owner/formal"]
    model.registry.uninstall("formal")
    assert model.install("owner/formal").name == "formal"
    assert len(asked) == 2


def test_a_handle_is_a_dial(model):
    handle = model.install(patch())
    handle.strength = 0.4
    handle.enabled = False
    handle.schedule = {0: 1.0, 20: 0.0}
    assert handle.describe() == {
        "name": "formal",
        "strength": 0.4,
        "enabled": False,
        "evidence_level": "none",
        "layers": [1],
        "scheduled": True,
    }
    assert model.backend.patches["formal"].strength == 0.4
    assert handle.schedule.strength_at(20) == 0.0
    handle.schedule = None
    assert handle.schedule is None
    assert handle.manifest.name == "formal"
    assert repr(handle) == "PatchHandle('formal', strength=0.4, enabled=False)"
    assert model.patch("formal").strength == 0.4


def test_handles_of_removed_patches_are_key_errors(model):
    handle = model.install(patch())
    model.remove_patch("formal")
    assert model.list_patches() == []
    for call in (lambda: handle.strength, lambda: handle.describe(), lambda: model.patch("formal")):
        with pytest.raises(KeyError):
            call()


def test_enable_disable_strength_schedule_by_name(model):
    model.install(patch())
    model.disable_patch("formal")
    assert not model.patch("formal").enabled
    model.enable_patch("formal")
    assert model.patch("formal").enabled
    assert model.set_patch_strength("formal", 2) == 2
    model.set_patch_schedule("formal", {"0": 0.5})
    assert model.patch("formal").schedule.strength_at(0) == 0.5


def test_compare_uses_all_installed_ones_and_leaves_states(model):
    model.install(patch("a"), strength=0.5)
    model.install(patch("b", seed=1), enabled=False)
    assert model.compare("hi") == {"baseline": "{}", "patched": "{'a': 0.5, 'b': 1.0}"}
    assert [model.patch(name).enabled for name in "ab"] == [True, False]


CONFIG = GenerationConfig(max_new_tokens=2)


class Published(RecordingBackend):
    """An engine as the published API has it: no per-request patches, `generate` takes no `patches`."""

    @classmethod
    def capabilities(cls):
        return Capabilities("published")

    def generate(self, prompt, config=None, **keywords):
        assert keywords == {"system": "s"}
        assert (prompt, config) == ("hi", CONFIG)
        return ",".join(name for name, active in self.patches.items() if active.enabled)


def test_compare_on_an_engine_of_the_published_api():
    model = BrainPatchedModel(Published())
    model.install(patch("a"))
    model.install(patch("b", seed=1), enabled=False)
    assert model.compare("hi", CONFIG, system="s") == {"baseline": "", "patched": "a,b"}
    assert [model.patch(name).enabled for name in "ab"] == [True, False]


def test_an_engine_of_the_published_api_is_not_given_what_it_does_not_know():
    model = BrainPatchedModel(Published())
    model.install(patch("a"))
    assert model.generate("hi", CONFIG, system="s") == "a"


def test_a_mode_for_one_patch_reaches_the_engine(model):
    stranger = patch(base_model=BaseModelSpec("other/model", "Test", 4, 4))
    with pytest.raises(PatchCompatibilityError):
        model.install(stranger)
    with pytest.warns(UserWarning, match="other/model"):
        model.install(stranger, compatibility_mode="architecture")


def test_states_are_restored_when_generation_fails():
    model = BrainPatchedModel(Published())
    model.install(patch("a"))
    model.backend.generate = lambda *a, **k: 1 / 0
    with pytest.raises(ZeroDivisionError):
        model.compare("hi")
    assert model.patch("a").enabled


def test_text_calls_pass_everything_on(model):
    model.install(patch(), enabled=False)
    config = GenerationConfig(max_new_tokens=3)
    assert model.generate("hi", config, patches={"formal": 1.5}) == "{'formal': 1.5}"
    assert model.generate_batch(["a", "b"], config, patches=[{}, {"formal": 1}]) == ["{}", "{'formal': 1.0}"]
    assert list(model.stream("hi", config, patches={"formal": 2})) == ["{'formal': 2.0}"]
    assert [g.patches for g in model.generate_detailed(["a"], config)] == [{}]
    assert model.generate_detailed(["a"], config, patches={"formal": 4})[0].patches == {"formal": 4.0}
    assert model.trace("hi", config, patches={"formal": 3}) == []
    assert model.backend.seen[-1].patches.to_mapping() == {"formal": 3.0}
    assert all(request.config == config for request in model.backend.seen)


def test_every_call_passes_the_chat_arguments_on(model):
    config = GenerationConfig(max_new_tokens=3)
    chat = {"use_chat_template": False, "system": "s"}
    model.generate("a", config, **chat)
    model.generate_batch(["b"], config, **chat)
    model.generate_detailed(["c"], config, **chat)
    list(model.stream("d", config, **chat))
    model.trace("e", config, **chat)
    model.compare("f", config, **chat)
    assert model.backend.encoded == [{"prompt": prompt, **chat} for prompt in "abcdeff"]
    assert {request.config.max_new_tokens for request in model.backend.seen} == {3}
    model.backend.encoded.clear()
    model.generate("a")
    list(model.stream("d"))
    model.trace("e")
    assert model.backend.encoded == [{"prompt": p, "use_chat_template": True, "system": None} for p in "ade"]


def test_describe_names_the_model_and_its_patches(model):
    model.install(patch())
    about = model.describe()
    assert about["backend"] == "recording"
    assert about["model"] == "test/model"
    assert (about["hidden_size"], about["num_layers"], about["architecture"]) == (4, 4, "Test")
    assert (about["revision"], about["compatibility_mode"]) == (None, "strict")
    assert [entry["name"] for entry in about["patches"]] == ["formal"]
    assert model.capabilities().name == "recording"
    with model:
        pass


def test_from_pretrained_hands_arguments_to_the_engine(monkeypatch):
    monkeypatch.setattr("brainpatch.runtime.model.select_backend", lambda name: RecordingBackend())
    model = BrainPatchedModel.from_pretrained(
        "m", backend="x", device="cpu", dtype="float32", compatibility_mode="unsafe", special=1
    )
    assert model.backend.arguments == {
        "model": "m",
        "revision": None,
        "dtype": "float32",
        "device": "cpu",
        "special": 1,
    }
    assert model.compatibility_mode == "unsafe"
    model.compatibility_mode = "architecture"
    assert model.backend.compatibility_mode == "architecture"
    asked = []
    monkeypatch.setattr(
        "brainpatch.runtime.model.select_backend", lambda name: (asked.append(name), RecordingBackend())[1]
    )
    registry = PatchRegistry("somewhere")
    plain = BrainPatchedModel.from_pretrained("m", revision="r", registry=registry)
    assert plain.backend.arguments == {"model": "m", "revision": "r", "dtype": "auto"}
    assert (plain.registry, plain.compatibility_mode, asked) == (registry, "strict", ["auto"])
    BrainPatchedModel.from_pretrained("m", backend="vllm")
    assert asked == ["auto", "vllm"]


def test_the_default_registry_is_found_when_needed(tmp_path, monkeypatch):
    monkeypatch.setenv("BRAINPATCH_HOME", str(tmp_path))
    assert BrainPatchedModel(RecordingBackend()).registry.home == tmp_path
