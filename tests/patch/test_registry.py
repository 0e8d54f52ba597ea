"""The registry as one process sees it: names, files, listing, what a bad file may do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from datetime import datetime, timezone
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brainpatch.errors import PatchFormatError, PatchLoadError, RegistryError
from brainpatch.patch import InstalledPatch, PatchRegistry, default_registry, registry_home, save_patch
from brainpatch.patch import registry as module
from tests.factories import make_patch

BAD_NAMES = ["", "..", "../x", "a/b", "/etc/x", "A", "a\n", "a\0", "con", ".hidden", "a" * 65, "a\\b"]


@pytest.fixture
def registry(tmp_path):
    return PatchRegistry(tmp_path / "home")


@pytest.fixture
def make(tmp_path):
    def write(name="formal", seed=0):
        patch = make_patch([{"layer": 1}], name=name, seed=seed)
        return save_patch(patch.manifest, patch.vectors, tmp_path / f"{name}-{seed}", overwrite=True)

    return write


def refused(code, call, *arguments, **keywords):
    with pytest.raises(RegistryError) as caught:
        call(*arguments, **keywords)
    assert caught.value.code == code
    return str(caught.value)


def below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_the_layout_is_the_published_one(registry, make):
    assert registry.list_patches() == []
    assert not registry.home.exists()
    path = make()
    installed = registry.install_file(str(path))
    assert below(registry.home) == [
        ".lock",
        "cache",
        "patches",
        "patches/formal.brainpatch",
        "patches/formal.source.json",
    ]
    assert registry.config_path == registry.home / "config.json"
    assert installed.path.read_bytes() == path.read_bytes()
    assert installed.size_bytes == path.stat().st_size
    assert installed.load().name == "formal"

    text = (registry.patches_dir / "formal.source.json").read_text()
    source = json.loads(text)
    assert text == json.dumps(source, indent=2, sort_keys=True) + "\n"
    age = datetime.now(timezone.utc) - datetime.fromisoformat(source.pop("installed_at"))
    assert 0 <= age.total_seconds() < 60
    assert source == {
        "origin": str(path),
        "kind": "file",
        "format_version": "1.0",
        "base_model": "test/model",
        "evidence_level": "none",
    }
    assert registry.get("formal") == installed == registry.list_patches()[0]


def test_the_home_is_found(monkeypatch, tmp_path):
    assert default_registry().home == registry_home() == Path(os.environ["BRAINPATCH_HOME"])
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("BRAINPATCH_HOME", "~/here")
    assert registry_home() == tmp_path / "here"
    assert PatchRegistry("~/there").home == tmp_path / "there"
    for value in ("", None):
        monkeypatch.setenv("BRAINPATCH_HOME", "") if value == "" else monkeypatch.delenv("BRAINPATCH_HOME")
        assert registry_home() == tmp_path / ".brainpatch"
    refused("BP307", PatchRegistry, "~no-such-user-here/x")


def test_importing_it_is_cheap():
    code = (
        "import sys, brainpatch.patch.registry;"
        "print([m for m in ('numpy', 'huggingface_hub', 'torch') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"[]\n"


def test_a_name_is_taken_once(registry, make):
    registry.install_file(make(seed=0))
    assert "formal is installed" in refused("BP301", registry.install_file, make(seed=1))
    assert registry.get("formal").path.read_bytes() == make(seed=0).read_bytes()
    assert registry.get("formal").source["origin"] == str(make(seed=0))
    registry.install_file(make(seed=1), overwrite=True)
    assert registry.get("formal").path.read_bytes() == make(seed=1).read_bytes()
    assert registry.get("formal").source["origin"] == str(make(seed=1))


def test_another_name_and_more_about_the_origin(registry, make):
    installed = registry.install_file(make(), name="other", source={"kind": "mirror", "note": "é"})
    assert (installed.name, installed.load().name) == ("other", "formal")
    assert registry.get("other").source["kind"] == "mirror"
    assert registry.get("other").source["note"] == "é"


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names_touch_no_path(registry, make, name):
    path = make()
    calls = [
        lambda: registry.path_for(name),
        lambda: registry.uninstall(name),
        lambda: registry.install_file(path, name=name),
        # Before the file is read.
        lambda: registry.install_file("/no/such/file", name=name),
    ]
    for call in calls:
        with pytest.raises(PatchFormatError) as caught:
            call()
        assert caught.value.code == "BP113"
    assert not registry.is_installed(name)
    refused("BP302", registry.get, name)
    assert not registry.home.exists()


@settings(max_examples=500, deadline=None)
@given(st.text(max_size=70) | st.text(st.sampled_from("./\\a1-_:~\0\n"), max_size=70))
def test_a_name_is_one_plain_file_name_or_is_refused(name):
    registry = PatchRegistry("/nowhere/home")
    try:
        path = registry.path_for(name)
    except PatchFormatError:
        return
    assert name.isascii()
    assert str(path) == os.path.normpath(path) == f"/nowhere/home/patches/{name}.brainpatch"


def test_a_refused_file_leaves_nothing(registry, make, tmp_path):
    bad = tmp_path / "bad.brainpatch"
    bad.write_bytes(make().read_bytes()[:-1])
    for path in (bad, tmp_path, tmp_path / "missing"):
        with pytest.raises(PatchLoadError):
            registry.install_file(path)
    assert not registry.home.exists()


def test_the_bytes_that_were_checked_are_those_that_are_stored(registry, make, monkeypatch):
    path = make(seed=0)
    good = path.read_bytes()
    check = module.load_patch_bytes

    def check_and_swap(data, source):
        path.write_bytes(b"something else")
        return check(data, source=source)

    monkeypatch.setattr(module, "load_patch_bytes", check_and_swap)
    assert registry.install_file(path).path.read_bytes() == good


def test_listing_is_sorted_and_survives_what_lies_about(registry, make):
    for name in ("b", "a-2", "a"):
        registry.install_file(make(name))
    folder = registry.patches_dir
    registry.path_for("damaged").write_bytes(b"nonsense")
    (folder / "damaged.source.json").write_bytes(b"\xff")
    (folder / "a.source.json").write_text("[" * 100000)
    (folder / "b.source.json").write_text("[]")
    (folder / "Upper Case.brainpatch").write_bytes(b"")
    (folder / ".brainpatch").write_bytes(b"")
    (folder / ".brainpatch-00.tmp").write_bytes(b"")
    (folder / "notes.txt").write_bytes(b"")
    (folder / "folder.brainpatch").mkdir()
    listed = registry.list_patches()
    assert [patch.name for patch in listed] == ["a", "a-2", "b", "damaged"]
    assert [bool(patch.source) for patch in listed] == [False, True, False, False]
    with pytest.raises(PatchFormatError):
        listed[-1].load()


def test_links_are_not_followed_out_of_the_folder(registry, make, tmp_path):
    outside = make()
    registry.ensure_dirs()
    link = registry.path_for("formal")
    link.symlink_to(outside)
    secret = tmp_path / "secret.json"
    secret.write_text('{"secret": 1}')
    (registry.patches_dir / "other.source.json").symlink_to(secret)
    assert not registry.is_installed("formal")
    assert registry.list_patches() == []
    # The name is not free, and a replacement replaces the link.
    refused("BP301", registry.install_file, outside)
    before = outside.read_bytes()
    registry.install_file(make(seed=1), overwrite=True)
    assert not link.is_symlink()
    assert outside.read_bytes() == before
    link.unlink()
    link.symlink_to(tmp_path / "missing")
    (registry.patches_dir / "formal.source.json").write_text("{}")
    refused("BP301", registry.install_file, outside)
    assert (registry.patches_dir / "formal.source.json").exists()
    # The same for the record; and removing removes a link, not its target.
    registry.path_for("other").write_bytes(before)
    assert registry.get("other").source == {}
    registry.install_file(outside, name="other", overwrite=True)
    assert secret.read_text() == '{"secret": 1}'
    link.unlink()
    link.symlink_to(outside)
    registry.uninstall("formal")
    assert outside.exists()
    assert not os.path.lexists(link)


def test_resolve_looks_for_a_name_then_for_a_path(registry, make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("formal").write_bytes(b"a file of that name")
    assert registry.resolve("formal") == Path("formal")
    registry.install_file(make())
    assert registry.resolve("formal") == registry.path_for("formal")
    assert registry.resolve("./formal") == Path("./formal")
    assert registry.resolve(make()) == make()
    for ref in ("missing", "a\0b", "", str(tmp_path), "formal/x", "../x"):
        refused("BP302", registry.resolve, ref)


def test_corrupt_or_forbidden_is_not_absent(registry, make, monkeypatch, tmp_path):
    registry.install_file(make())
    registry.path_for("formal").write_bytes(b"")
    assert registry.resolve("formal") == registry.path_for("formal")
    os.mkfifo(tmp_path / "fifo")
    assert registry.resolve(tmp_path / "fifo") == tmp_path / "fifo"
    # A file below a folder that may not be entered (as root nothing is forbidden, but a loop is as good).
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert registry.resolve(loop) == loop
    with pytest.raises(PatchLoadError):
        registry.install(str(loop))


def test_unknown_names_come_with_near_ones(registry, make):
    for name in ("formal", "formal-2", "brief"):
        registry.install_file(make(name))
    assert "did you mean formal-2, formal?" in refused("BP302", registry.get, "formal_2")
    assert "did you mean brief?" in refused("BP302", registry.uninstall, "breif")
    text = refused("BP302", registry.resolve, "zzz\x1b[31m")
    assert "zzz\\x1b[31m" in text
    assert "did you mean" not in text
    refused("BP302", registry.resolve, "x" * 100000)


def test_install_takes_paths(registry, make):
    assert registry.install(make()).name == "formal"
    refused("BP301", registry.install, str(make()))
    assert registry.install(str(make()), overwrite=True).source["kind"] == "file"
    for missing in ("missing", Path("owner/repo"), "folder/x.brainpatch"):
        refused("BP303", registry.install, missing)


def test_uninstall(registry, make):
    refused("BP302", registry.uninstall, "formal")
    assert not registry.home.exists()
    installed = registry.install_file(make())
    registry.uninstall("formal")
    assert below(registry.patches_dir) == []
    refused("BP302", registry.uninstall, "formal")
    refused("BP302", lambda: installed.size_bytes)
    registry.path_for("folder").mkdir()
    refused("BP307", registry.uninstall, "folder")


def test_uninstalled_by_another_in_between(registry, make, monkeypatch):
    registry.install_file(make())
    sweep = PatchRegistry._sweep

    def rival(self):
        sweep(self)
        registry.path_for("formal").unlink()

    monkeypatch.setattr(PatchRegistry, "_sweep", rival)
    refused("BP302", registry.uninstall, "formal")


def test_taken_by_another_where_there_is_no_lock(registry, make, monkeypatch):
    write = module.write_atomically

    def rival(path, data, *, overwrite):
        path.write_bytes(b"rival")
        write(path, data, overwrite=overwrite)

    monkeypatch.setattr(module, "write_atomically", rival)
    refused("BP301", registry.install_file, make())
    assert registry.path_for("formal").read_bytes() == b"rival"


def test_the_lock_of_windows(registry, make, monkeypatch):
    locked = []
    fake = types.SimpleNamespace(LK_LOCK=1, locking=lambda *arguments: locked.append(arguments))
    monkeypatch.setitem(sys.modules, "msvcrt", fake)
    monkeypatch.setattr(module, "sys", types.SimpleNamespace(platform="win32"))
    registry.install_file(make())
    assert [(mode, count) for _, mode, count in locked] == [(1, 1)]

    def busy(*_):
        raise OSError(36, "Resource deadlock avoided")

    fake.locking = busy
    refused("BP307", registry.install_file, make(), overwrite=True)


@pytest.mark.parametrize("at", [1, 2])
def test_killed_at_any_write_no_patch_has_the_record_of_another(registry, make, monkeypatch, at):
    class Killed(BaseException):
        pass

    registry.install_file(make(seed=0))
    write = module.write_atomically
    writes = []

    def die(path, data, *, overwrite):
        writes.append(path)
        if len(writes) == at:
            raise Killed
        write(path, data, overwrite=overwrite)

    monkeypatch.setattr(module, "write_atomically", die)
    with pytest.raises(Killed):
        registry.install_file(make(seed=1), overwrite=True)
    assert registry.get("formal").path.read_bytes() == make(seed=at - 1).read_bytes()
    assert registry.get("formal").source == {}


def test_leftovers_of_a_killed_install_are_swept(registry, make):
    registry.install_file(make())
    leftover = registry.patches_dir / ".brainpatch-0011223344556677.tmp"
    leftover.write_bytes(b"half")
    assert [patch.name for patch in registry.list_patches()] == ["formal"]
    registry.install_file(make("other"))
    assert not leftover.exists()


def test_a_registry_that_cannot_be_used(make, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_bytes(b"")
    registry = PatchRegistry(file)
    for call in (
        registry.ensure_dirs,
        registry.list_patches,
        lambda: registry.install_file(make()),
        lambda: registry.install_from_hub("owner/repo"),
    ):
        refused("BP307", call)
    registry = PatchRegistry(tmp_path / "home")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left" in refused("BP307", registry.install_file, make_patch_file(tmp_path))
    assert registry.list_patches() == []
    assert below(registry.patches_dir) == []


def make_patch_file(folder):
    from brainpatch.patch import patch_bytes

    patch = make_patch([{"layer": 1}])
    path = folder / "p.brainpatch"
    path.write_bytes(patch_bytes(patch.manifest, patch.vectors))
    return path


def test_clear_cache_stays_in_its_folder(registry, tmp_path):
    assert registry.clear_cache() == 0
    registry.ensure_dirs()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_bytes(b"12345")
    (registry.cache_dir / "models--a--b/blobs").mkdir(parents=True)
    (registry.cache_dir / "models--a--b/blobs/x").write_bytes(b"123")
    (registry.cache_dir / "models--a--b/link").symlink_to(outside / "keep")
    (registry.cache_dir / "folder-link").symlink_to(outside)
    assert registry.clear_cache() == 3
    assert list(registry.cache_dir.iterdir()) == []
    assert below(outside) == ["keep"]


def test_installed_patch_as_published(tmp_path):
    assert InstalledPatch("a", tmp_path, {"kind": "file"}).source == {"kind": "file"}
