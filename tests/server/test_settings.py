"""Keys, and the way of settings through the environment."""

from __future__ import annotations

import pytest

from brainpatch.errors import BrainPatchError
from brainpatch.server.settings import Settings


def status(settings, method, path, key):
    try:
        settings.check_key(method, path, key)
    except BrainPatchError as error:
        return error.code
    return "ok"


def test_who_may_do_what():
    both = Settings(api_keys=["u", "v"], admin_key="a")
    for key, text, reading, change in (
        (None, "BP701", "BP701", "BP701"),
        ("Bearer x", "BP701", "BP701", "BP701"),
        ("Bearer u", "ok", "ok", "BP701"),
        ("bearer v", "ok", "ok", "BP701"),
        ("Basic u", "BP701", "BP701", "BP701"),
        ("Bearer a", "BP701", "ok", "ok"),
        ("Bearer \udcff", "BP701", "BP701", "BP701"),
    ):
        assert status(both, "POST", "/v1/chat/completions", key) == text, key
        assert status(both, "GET", "/brainpatch/patches", key) == reading, key
        assert status(both, "DELETE", "/brainpatch/patches/x", key) == change, key
    assert status(both, "GET", "/health", None) == "ok"
    assert status(both, "OPTIONS", "/v1/models", None) == "ok"
    open_ = Settings()
    assert status(open_, "POST", "/v1/completions", None) == "ok"
    assert status(open_, "GET", "/brainpatch/patches", None) == "ok"
    assert status(open_, "POST", "/brainpatch/patches", "Bearer ") == "BP709"
    assert status(Settings(api_keys=["u"]), "PATCH", "/brainpatch/patches/x", "Bearer u") == "BP709"


def test_the_environment_carries_them():
    given = Settings(patches=["a b.brainpatch", "c@0.5"], default_off=True, admin_key="k", model_id="m",
                     compatibility_mode="architecture", max_requests=7)  # fmt: skip
    assert Settings.from_environment(given.to_environment()) == given
    assert Settings.from_environment({}) == Settings()
    assert Settings.from_environment({"BRAINPATCH_PATCHES": " a  b@1 "}).patches == ("a", "b@1")
    for bad in (
        {"BRAINPATCH_PATCHES": "[1"},
        {"BRAINPATCH_MAX_REQUESTS": "x"},
        {"BRAINPATCH_MAX_REQUESTS": "0"},
    ):
        with pytest.raises(BrainPatchError) as error:
            Settings.from_environment(bad)
        assert error.value.code == "BP404"


def test_empty_keys_are_refused():
    for named in ({"api_keys": [""]}, {"admin_key": ""}):
        with pytest.raises(BrainPatchError):
            Settings(**named)


def test_a_key_shows_nowhere():
    assert "secret" not in repr(Settings(api_keys=["secret1"], admin_key="secret2"))
