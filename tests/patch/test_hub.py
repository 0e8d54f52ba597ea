"""Downloads: the real client against a hub on this machine."""

from __future__ import annotations

import importlib
import posixpath
import sys
import traceback

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brainpatch.errors import BrainPatchError, PatchFormatError, PatchWriteError, RegistryError
from brainpatch.patch import hub, patch_bytes
from brainpatch.patch.hub import is_hub_reference
from brainpatch.patch.limits import MAX_ARCHIVE_BYTES
from brainpatch.patch.registry import PatchRegistry
from tests.factories import make_patch
from tests.patch.hub_stand_in import COMMIT, NEWER, HubStandIn, Repo

TOKEN = "hf_" + "x" * 34


def file_of(name="formal", seed=0):
    patch = make_patch([{"layer": 1}], name=name, seed=seed)
    return patch_bytes(patch.manifest, patch.vectors)


@pytest.fixture
def stand_in(monkeypatch):
    constants = importlib.import_module("huggingface_hub.constants")
    client = importlib.import_module("huggingface_hub")
    server = HubStandIn()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    # Both are read from the environment when the client is imported.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    client.close_session()
    yield server
    client.close_session()
    server.close()


@pytest.fixture
def repo(stand_in):
    stand_in.repos["owner/repo"] = Repo({"README.md": b"hello", "formal.brainpatch": file_of(), "x.py": b"1"})
    return stand_in.repos["owner/repo"]


@pytest.fixture
def registry(tmp_path):
    return PatchRegistry(tmp_path / "home")


def refused(code, call, *arguments, **keywords):
    """The error of a call: coded, of printable lines, without a chain of causes and without the token."""
    with pytest.raises(BrainPatchError) as caught:
        call(*arguments, **keywords)
    error = caught.value
    assert error.code == code
    assert all(char.isprintable() or char == "\n" for char in str(error))
    shown = "".join(traceback.format_exception(error))
    assert shown.count("Traceback") == 1
    assert TOKEN not in shown
    return str(error)


def test_a_patch_is_fetched_checked_and_pinned(registry, stand_in, repo, capfd):
    installed = registry.install_from_hub("owner/repo")
    assert installed.name == "formal"
    assert installed.path.read_bytes() == repo.files["formal.brainpatch"]
    assert registry.get("formal").source == installed.source
    wanted = {
        "origin": "owner/repo",
        "kind": "huggingface",
        "repo": "owner/repo",
        "file": "formal.brainpatch",
        "revision": COMMIT,
        "format_version": "1.0",
        "base_model": "test/model",
        "evidence_level": "none",
    }
    assert {key: value for key, value in installed.source.items() if key != "installed_at"} == wanted
    # Nothing but the listing and the one file, by its commit.
    assert stand_in.paths == ["/api/models/owner/repo", f"/owner/repo/resolve/{COMMIT}/formal.brainpatch"]
    assert {authorization for _, _, authorization in stand_in.asked} == {f"Bearer {TOKEN}"}
    assert capfd.readouterr() == ("", "")


def test_install_goes_to_the_hub_unless_there_is_a_file(registry, repo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert registry.install("owner/repo").source["kind"] == "huggingface"
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner/repo").write_bytes(file_of("local"))
    assert registry.install("owner/repo").name == "local"


def test_a_file_in_a_folder_is_named(registry, stand_in, repo):
    repo.files["more/b.brainpatch"] = file_of("b")
    assert registry.install_from_hub("owner/repo:more/b.brainpatch").source["file"] == "more/b.brainpatch"
    registry.install_from_hub("owner/repo", filename="more/b.brainpatch", overwrite=True)
    registry.install_from_hub("owner/repo:more/b.brainpatch", filename="more/b.brainpatch", overwrite=True)
    # The commit's file is in the cache from the first time.
    assert stand_in.paths.count(f"/owner/repo/resolve/{COMMIT}/more/b.brainpatch") == 1
    assert "two files" in refused("BP303", registry.install_from_hub, "owner/repo:a", filename="b")


def test_not_exactly_one_patch(registry, repo):
    repo.files["evil\x1b[31m\u202e.brainpatch"] = b""
    text = refused("BP305", registry.install_from_hub, "owner/repo")
    assert "evil\\x1b[31m\\u202e.brainpatch, formal.brainpatch" in text
    repo.files.update({f"{i:03}.brainpatch": b"" for i in range(100)})
    assert "019.brainpatch and 82 more" in refused("BP305", registry.install_from_hub, "owner/repo")
    repo.files = {"README.md": b""}
    assert "there: none" in refused("BP305", registry.install_from_hub, "owner/repo")
    assert "no patch b.brainpatch" in refused("BP305", registry.install_from_hub, "owner/repo:b.brainpatch")
    refused("BP305", registry.install_from_hub, "owner/repo:README.md")


def test_a_revision_is_resolved_to_its_commit(registry, stand_in, repo):
    repo.refs["v2/beta"] = NEWER
    installed = registry.install_from_hub("owner/repo", revision="v2/beta")
    assert installed.source["revision"] == NEWER
    assert stand_in.paths[1] == f"/owner/repo/resolve/{NEWER}/formal.brainpatch"
    refused("BP305", registry.install_from_hub, "owner/repo", revision="nope\x1b", overwrite=True)


def test_a_hub_that_answers_for_another_commit_is_refused(registry, stand_in, repo):
    assert registry.install_from_hub("owner/repo", revision=COMMIT).source["revision"] == COMMIT
    repo.commit = NEWER
    text = refused("BP305", registry.install_from_hub, "owner/repo", revision=COMMIT, overwrite=True)
    assert "another commit" in text
    assert len(stand_in.asked) == 3


@pytest.mark.parametrize("commit", ["main", "../../x", "0" * 39])
def test_a_hub_without_a_commit_is_refused(registry, repo, commit):
    repo.commit = commit
    refused("BP305", registry.install_from_hub, "owner/repo")


@pytest.mark.parametrize("info", [b"", b"[]", b"{}", b'{"id": 1, "siblings": [1]}', b"[" * 100000])
def test_a_hub_that_answers_nonsense_is_refused(registry, repo, info):
    repo.info = info or b"\xff"
    refused("BP305", registry.install_from_hub, "owner/repo")


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500, 503])
def test_errors_of_the_hub_are_one_coded_line(registry, repo, status):
    repo.file_status = status
    assert f"answered {status}" in refused("BP305", registry.install_from_hub, "owner/repo")
    repo.info_status = status
    assert f"answered {status}" in refused("BP305", registry.install_from_hub, "owner/repo")
    assert registry.list_patches() == []


def test_unknown_repositories_and_no_connection(registry, stand_in):
    assert "token" in refused("BP305", registry.install_from_hub, "owner/other")
    stand_in.close()
    assert "Check the connection" in refused("BP305", registry.install_from_hub, "owner/repo")


def test_a_token_that_cannot_be_sent_is_not_shown(registry, repo, monkeypatch):
    utilities = importlib.import_module("huggingface_hub.utils")
    monkeypatch.setattr(utilities, "build_hf_headers", lambda: {"authorization": f"Bearer {TOKEN}\r\nx"})
    refused("BP305", registry.install_from_hub, "owner/repo")


def test_a_file_too_large_is_not_asked_for(registry, stand_in, repo):
    repo.sizes["formal.brainpatch"] = MAX_ARCHIVE_BYTES + 1
    refused("BP106", registry.install_from_hub, "owner/repo")
    assert len(stand_in.asked) == 1


@pytest.mark.parametrize("size", [10, -1, 0])
def test_a_file_larger_than_stated_is_cut_off(registry, stand_in, repo, size):
    repo.sizes["formal.brainpatch"] = size
    repo.endless = True
    refused("BP106", registry.install_from_hub, "owner/repo")
    assert stand_in.sent < 64 << 20
    assert list(registry.cache_dir.iterdir()) == []


def test_a_file_of_no_stated_size_has_the_general_limit(registry, repo, monkeypatch):
    repo.sizes["formal.brainpatch"] = None
    assert registry.install_from_hub("owner/repo").name == "formal"
    assert registry.install_from_hub("owner/repo", offline=True, overwrite=True).name == "formal"
    registry.clear_cache()
    monkeypatch.setattr(hub, "MAX_ARCHIVE_BYTES", 100)
    refused("BP106", registry.install_from_hub, "owner/repo")


def test_a_file_shorter_than_stated_is_refused(registry, repo):
    repo.sizes["formal.brainpatch"] = 10**6
    assert "of the 1000000 bytes" in refused("BP305", registry.install_from_hub, "owner/repo")
    repo.sizes.clear()
    repo.cut = True
    refused("BP305", registry.install_from_hub, "owner/repo")


def test_a_redirect_is_followed_without_the_token(registry, stand_in, repo):
    elsewhere = HubStandIn()
    try:
        elsewhere.repos["owner/repo"] = Repo(repo.files)
        repo.redirect_to = elsewhere.url
        assert registry.install_from_hub("owner/repo").name == "formal"
        assert [authorization for _, _, authorization in elsewhere.asked] == [None]
    finally:
        elsewhere.close()


def test_redirects_that_lead_nowhere(registry, repo, stand_in):
    repo.redirect_to = stand_in.url
    refused("BP305", registry.install_from_hub, "owner/repo")
    repo.redirect_to = "file:///etc/passwd?"
    refused("BP305", registry.install_from_hub, "owner/repo")


def test_a_damaged_file_is_refused_and_not_kept(registry, stand_in, repo):
    good = repo.files["formal.brainpatch"]
    repo.files["formal.brainpatch"] = bytes([good[0] ^ 1]) + good[1:]
    with pytest.raises(PatchFormatError):
        registry.install_from_hub("owner/repo")
    repo.files["formal.brainpatch"] = good
    assert registry.install_from_hub("owner/repo").name == "formal"


def test_offline_answers_from_the_cache_as_the_hub_did(registry, stand_in, repo):
    repo.files["b.brainpatch"] = file_of("b")
    refused("BP306", registry.install_from_hub, "owner/repo:b.brainpatch", offline=True)
    registry.install_from_hub("owner/repo:b.brainpatch", revision="main")
    asked = len(stand_in.asked)
    for revision in ("main", COMMIT):
        installed = registry.install_from_hub(
            "owner/repo:b.brainpatch", revision=revision, offline=True, overwrite=True
        )
        assert installed.source["revision"] == COMMIT
    # The same refusals as online, and what was never fetched is not there.
    refused("BP305", registry.install_from_hub, "owner/repo", revision="main", offline=True)
    refused("BP306", registry.install_from_hub, "owner/repo:b.brainpatch", offline=True)
    refused("BP306", registry.install_from_hub, "owner/repo:formal.brainpatch", revision="main", offline=True)
    refused("BP306", registry.install_from_hub, "owner/other", offline=True)
    assert len(stand_in.asked) == asked


def test_offline_needs_no_client(registry, repo, monkeypatch):
    registry.install("owner/repo")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert registry.install("owner/repo", offline=True, overwrite=True).name == "formal"
    text = refused("BP304", registry.install, "owner/repo", overwrite=True)
    assert "pip install 'brainpatch[hub]'" in text


def test_the_clients_own_offline_switch_counts(registry, stand_in, repo, monkeypatch):
    registry.install("owner/repo")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    asked = len(stand_in.asked)
    assert registry.install("owner/repo", overwrite=True).name == "formal"
    refused("BP306", registry.install, "owner/other")
    assert len(stand_in.asked) == asked


def test_a_spoilt_cache_is_a_miss(registry, stand_in, repo):
    registry.install_from_hub("owner/repo")
    for path in registry.cache_dir.iterdir():
        path.write_bytes(b"[]" if path.suffix == ".json" else b"short")
    refused("BP306", registry.install_from_hub, "owner/repo", offline=True)
    assert registry.install_from_hub("owner/repo", overwrite=True).name == "formal"
    assert stand_in.paths.count(f"/owner/repo/resolve/{COMMIT}/formal.brainpatch") == 2


def test_a_cached_file_that_was_damaged_is_fetched_again(registry, stand_in, repo):
    registry.install_from_hub("owner/repo")
    (cached,) = registry.cache_dir.glob("*.brainpatch")
    good = cached.read_bytes()
    # Of the right size.
    cached.write_bytes(good[:200] + bytes([good[200] ^ 1]) + good[201:])
    text = refused("BP306", registry.install_from_hub, "owner/repo", offline=True, overwrite=True)
    assert "damaged" in text
    assert registry.install_from_hub("owner/repo", overwrite=True).path.read_bytes() == good
    assert cached.read_bytes() == good
    assert len(stand_in.asked) == 4


@pytest.mark.parametrize(
    "listing",
    [
        '{"commit": 5, "sizes": {"formal.brainpatch": "x"}}',
        '{"commit": "a", "sizes": [["formal.brainpatch", 1]]}',
        '{"commit": "a", "sizes": {"formal.brainpatch": 1e999}}',
        '{"commit": "a", "sizes": {"formal.brainpatch": []}}',
        '{"commit": "a"}',
        "[" * 100000,
    ],
)
def test_a_spoilt_listing_is_a_miss(registry, repo, listing):
    registry.install_from_hub("owner/repo")
    for path in registry.cache_dir.glob("*.json"):
        path.write_text(listing)
    refused("BP306", registry.install_from_hub, "owner/repo", offline=True)


def test_a_cache_that_cannot_be_written_does_not_matter(registry, repo, monkeypatch):
    def full(path, data, *, overwrite):
        raise PatchWriteError("BP122", "no space")

    monkeypatch.setattr(hub, "write_atomically", full)
    assert registry.install_from_hub("owner/repo").name == "formal"
    assert list(registry.cache_dir.iterdir()) == []


def test_clearing_the_cache_frees_what_it_says(registry, repo):
    registry.install_from_hub("owner/repo")
    held = sum(path.stat().st_size for path in registry.cache_dir.iterdir())
    assert held > len(repo.files["formal.brainpatch"])
    assert registry.clear_cache() == held
    assert registry.clear_cache() == 0
    refused("BP306", registry.install_from_hub, "owner/repo", offline=True)
    assert registry.is_installed("formal")


def test_a_name_that_is_taken(registry, repo):
    registry.install_from_hub("owner/repo")
    with pytest.raises(RegistryError) as caught:
        registry.install_from_hub("owner/repo")
    assert caught.value.code == "BP301"


@pytest.mark.parametrize(
    "file",
    ["../x.brainpatch", "a/../b", "/etc/passwd", "a//b", "./a", "a\\..\\b", "..", "", "a/", "a\0b"],
)
def test_paths_that_leave_the_repository_are_refused_unasked(registry, stand_in, repo, file):
    refused("BP303", registry.install_from_hub, "owner/repo", filename=file)
    assert stand_in.asked == []


@pytest.mark.parametrize("file", ["../../other/x.brainpatch", "/x.brainpatch", "a//b.brainpatch"])
def test_a_path_that_leaves_the_repository_is_not_fetched_when_the_hub_lists_it(
    registry, stand_in, repo, file
):
    repo.files = {file: file_of()}
    refused("BP303", registry.install_from_hub, "owner/repo")
    assert stand_in.paths == ["/api/models/owner/repo"]


@settings(max_examples=300, deadline=None)
@given(
    st.text(st.sampled_from("./\\aB:%\0\n\x1b~\u202e "), max_size=8).map(lambda text: text + ".brainpatch")
)
def test_what_passes_is_below_the_repository(file):
    try:
        _, parsed = hub._parse("owner/repo", file)
    except RegistryError:
        return
    assert parsed == file
    assert "\\" not in file
    assert posixpath.normpath("/root/" + file) == "/root/" + file


@pytest.mark.parametrize("ref", ["formal", "owner/repo\n", "a b/c", "https://x/y", "o/r:", ""])
def test_references_of_another_form(registry, stand_in, ref):
    assert not is_hub_reference(ref)
    refused("BP303", registry.install_from_hub, ref)
    refused("BP303", registry.install, ref)
    assert stand_in.asked == []


def test_what_ends_like_a_file_is_a_path_unless_the_hub_is_meant(registry, stand_in):
    stand_in.repos["owner/x.brainpatch"] = Repo({"formal.brainpatch": file_of()})
    refused("BP303", registry.install, "owner/x.brainpatch")
    assert stand_in.asked == []
    assert registry.install("owner/x.brainpatch:formal.brainpatch").name == "formal"
    assert registry.install_from_hub("owner/x.brainpatch", overwrite=True).name == "formal"


@pytest.mark.parametrize("ref", ["o/r", "Owner-1/re.po_2", "o/r:x.brainpatch", "o/r:a/b-c.brainpatch", "9/a"])
def test_references(ref):
    assert is_hub_reference(ref)


@pytest.mark.parametrize("ref", ["owner/..", "owner/a--b", "owner/" + "r" * 200])
def test_names_that_the_hub_does_not_allow(registry, stand_in, ref):
    refused("BP303", registry.install_from_hub, ref)
    assert stand_in.asked == []
