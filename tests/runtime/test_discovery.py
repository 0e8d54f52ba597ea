"""Which engines are there, and that asking costs nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from brainpatch.errors import BackendNotAvailable
from brainpatch.runtime import discovery
from tests.runtime.engine import RecordingBackend


def test_every_engine_is_reported_in_order():
    states = discovery.available_backends()
    assert [state.name for state in states] == ["transformers", "llamacpp", "vllm", "mlx"]
    assert all(state.detail for state in states)
    assert set(states[0].to_dict()) == {"backend", "available", "detail", "capabilities"}


def test_engines_that_this_release_lacks_say_so(monkeypatch):
    monkeypatch.setitem(discovery.ENGINES, "mlx", "brainpatch.backends.not_written")
    state = {s.name: s for s in discovery.available_backends()}["mlx"]
    assert state.available is False
    assert state.capabilities is None
    assert state.to_dict()["capabilities"] is None
    with pytest.raises(BackendNotAvailable, match="mlx"):
        discovery.backend_class("mlx-lm")


@pytest.mark.parametrize("alias", ["hf", "torch", "pytorch", "Transformers"])
def test_aliases(alias):
    assert discovery.backend_class(alias).name == "transformers"


def test_an_unknown_engine_is_refused_naming_the_known():
    with pytest.raises(BackendNotAvailable, match="transformers, llamacpp, vllm, mlx"):
        discovery.backend_class("onnx")


@pytest.fixture
def engines(monkeypatch):
    """Puts classes in place of engines."""

    def put(**classes):
        monkeypatch.setattr(discovery, "ENGINES", dict.fromkeys(classes, "json"))
        monkeypatch.setattr(discovery, "backend_class", lambda name: classes[name])

    return put


class Absent(RecordingBackend):
    name = "absent"

    @classmethod
    def is_available(cls):
        return False, "not here"


class Broken(RecordingBackend):
    @classmethod
    def is_available(cls):
        raise ValueError("boom")


def test_auto_takes_the_first_available(engines):
    engines(broken=Broken, absent=Absent, recording=RecordingBackend)
    assert isinstance(discovery.select_backend(), RecordingBackend)
    assert not isinstance(discovery.select_backend(), Absent)
    broken, absent, recording = discovery.available_backends()
    assert (broken.available, broken.detail) == (False, "ValueError: boom")
    assert (absent.available, recording.available) == (False, True)
    assert recording.to_dict()["capabilities"]["name"] == "recording"


def test_a_named_engine_has_no_substitute(engines):
    engines(absent=Absent, recording=RecordingBackend)
    with pytest.raises(BackendNotAvailable, match="absent: not here"):
        discovery.select_backend("absent")
    assert isinstance(discovery.select_backend("recording"), RecordingBackend)


def test_without_any_engine_all_reasons_are_given(engines):
    engines(absent=Absent, broken=Broken)
    with pytest.raises(BackendNotAvailable, match="absent: not here; broken: ValueError: boom"):
        discovery.select_backend()


def test_the_environment_report_has_the_published_keys():
    assert set(discovery.environment_report()) == {
        "brainpatch_version",
        "python",
        "platform",
        "machine",
        "is_apple_silicon",
        "registry_home",
        "installed_patches",
        "backends",
    }


def test_import_and_discovery_load_no_ml_stack():
    code = (
        "import sys, brainpatch; first = set(sys.modules); brainpatch.available_backends();"
        "brainpatch.environment_report(); heavy = {'torch', 'transformers', 'vllm', 'numpy'};"
        "print(sorted(heavy & first), sorted(heavy & set(sys.modules)), 'msgspec' in first)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[0] == "[] [] False"


def test_public_names_have_one_home():
    import brainpatch

    for name in brainpatch.__all__:
        assert getattr(brainpatch, name) is not None
    assert dir(brainpatch) == sorted(brainpatch.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        brainpatch.nothing  # noqa: B018


def test_a_gguf_is_for_llama_cpp_unless_an_engine_is_named():
    assert discovery.engine_of("a/model.GGUF") == "llamacpp"
    assert discovery.engine_of("owner/repo:file.gguf", "auto") == "llamacpp"
    assert discovery.engine_of("model.gguf", "transformers") == "transformers"
    assert discovery.engine_of("owner/repo") == "auto"
