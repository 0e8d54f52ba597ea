"""install, uninstall, list, inspect, validate, pack."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import pytest

from brainpatch import Manifest, default_registry, load_patch, save_patch
from brainpatch.cli.output import say_json
from brainpatch.runtime import discovery
from tests.cli.conftest import CONTROLS, outside

ATTACKS = Path(__file__).parent.parent / "attacks"


def test_install_list_inspect_uninstall(brainpatch, patch_file):
    assert brainpatch("list").out == "no patches are installed\n"
    done = brainpatch("install", patch_file)
    assert done.status == 0
    assert done.out.startswith("installed formal at ")
    assert "formal  test/model  1,3" in brainpatch("list").out
    shown = brainpatch("inspect", "formal", "--digest")
    assert shown.status == 0
    for text in ("formal", "Formal.", "test/model", "stated by the author, not checked", "prompt", "# Hello"):
        assert text in shown.out
    assert hashlib.sha256(patch_file.read_bytes()).hexdigest() in shown.out
    assert "meaning      " in shown.out
    assert brainpatch("uninstall", "formal").status == 0
    assert brainpatch("list").out == "no patches are installed\n"


def test_json_of_files(brainpatch, patch_file):
    assert json.loads(brainpatch("install", patch_file, "--json").out)["name"] == "formal"
    listed = json.loads(brainpatch("list", "--json").out)
    assert listed[0]["name"] == "formal"
    assert listed[0]["installed_bytes"] == patch_file.stat().st_size
    manifest = json.loads(brainpatch("inspect", "formal", "--json").out)
    assert manifest == load_patch(patch_file).manifest.to_dict()
    assert json.loads(brainpatch("validate", patch_file, "--json").out)[0]["valid"] is True
    assert json.loads(brainpatch("uninstall", "formal", "--json").out) == {"uninstalled": "formal"}


def test_an_installed_name_needs_force(brainpatch, patch_file):
    assert brainpatch("install", patch_file).status == 0
    again = brainpatch("install", patch_file)
    assert again.status == 1
    assert again.err.startswith("error: BP301 ")
    assert "what to do:" in again.err
    assert again.out == ""
    assert brainpatch("install", patch_file, "--force").status == 0


def test_what_is_not_there_is_status_3(brainpatch):
    for arguments in (
        ("inspect", "nobody"),
        ("install", "nobody"),
        ("uninstall", "nobody"),
        ("validate", "x"),
    ):
        done = brainpatch(*arguments)
        assert done.status == 3, arguments
        done = brainpatch(*arguments, "--json")
        assert done.status == 3
        assert done.err == ""
        document = json.loads(done.out)
        code = document[0]["code"] if isinstance(document, list) else document["error"]["code"]
        assert code in ("BP101", "BP302", "BP303")


def test_one_bad_installed_file_does_not_hide_the_rest(brainpatch, patch_file):
    installed = json.loads(brainpatch("install", patch_file, "--json").out)
    Path(installed["path"]).with_name("broken.brainpatch").write_bytes(b"nonsense")
    done = brainpatch("list")
    assert done.status == 0
    assert "broken  unusable: BP102" in done.out
    assert "formal  test/model" in done.out
    assert json.loads(brainpatch("list", "--json").out)[0]["error"]["code"] == "BP102"


def test_validate_a_folder_goes_on_after_a_bad_file(brainpatch, patch_file):
    (patch_file.parent / "deep").mkdir()
    (patch_file.parent / "deep" / "bad.brainpatch").write_bytes(b"<html>")
    done = brainpatch("validate", patch_file.parent)
    assert done.status == 1
    assert "INVALID" in done.out
    assert "BP102" in done.out
    assert f"valid    {patch_file}" in done.out
    empty = patch_file.parent / "empty"
    empty.mkdir()
    assert brainpatch("validate", empty).status == 0


@pytest.mark.filterwarnings("ignore:vectors that no intervention")
def test_validate_tells_the_warnings_of_each_file(brainpatch, patch_file):
    loaded = load_patch(patch_file)
    spare = {**loaded.vectors, "spare": [0.0] * 4}
    with pytest.warns(UserWarning, match="spare"):
        paths = [save_patch(loaded.manifest, spare, patch_file.with_name(name)) for name in ("a", "b")]
    assert len(paths) == 2
    done = brainpatch("validate", patch_file.parent)
    assert (done.status, done.err) == (0, "")
    assert done.out.count("warning: vectors that no intervention uses: spare") == 2
    results = json.loads(brainpatch("validate", patch_file.parent, "--json").out)
    assert [len(result["warnings"]) for result in results] == [1, 1, 0]


def test_validate_loads_no_model_for_files_that_are_refused(brainpatch, patch_file, monkeypatch):
    monkeypatch.setattr(discovery, "select_backend", lambda name: pytest.fail("too early"))
    patch_file.write_bytes(b"x")
    assert brainpatch("validate", patch_file, "-m", "m").status == 1


def test_validate_a_folder_against_a_model_that_is_not_there(brainpatch, patch_file):
    done = brainpatch("validate", patch_file, "-m", "m", "-b", "nonsense", "--json")
    assert done.status == 3
    assert json.loads(done.out)["error"]["code"] == "BP501"


def test_a_path_is_taken_as_it_was_written(brainpatch, patch_file, monkeypatch):
    """`./formal` is a path, also where a patch called `formal` is installed."""
    monkeypatch.chdir(patch_file.parent)
    brainpatch("install", patch_file)
    Path("formal").write_bytes(b"nonsense")
    assert brainpatch("validate", "formal").status == 0
    assert brainpatch("validate", "./formal").status == 1
    assert brainpatch("inspect", "./formal").status == 1
    assert brainpatch("validate", "x" * 5000).status == 3


def test_list_shows_the_name_that_uninstall_takes(brainpatch, patch_file):
    default_registry().install_file(patch_file, name="other")
    assert "other  test/model" in brainpatch("list").out
    row = json.loads(brainpatch("list", "--json").out)[0]
    assert (row["installed_name"], row["name"]) == ("other", "formal")


def test_inspect_says_all_there_is(brainpatch, tmp_path, patch_file):
    loaded = load_patch(patch_file)
    manifest = Manifest.from_dict(
        {
            **loaded.manifest.to_dict(),
            "schedule": {"0": 1.0, "20": 0.25},
            "provenance": {"discovery_method": "caa"},
            "compatibility": {"vllm": {"status": "experimental"}},
            "authors": ["A. Person"],
            "evidence_level": "predictive",
        }
    )
    path = save_patch(manifest, loaded.vectors, tmp_path / "full", readme="# One\n\n" + "x" * 500)
    out = brainpatch("inspect", path).out
    for text in (
        "1 vectors of 16 bytes",
        "0: 1, 20: 0.25",
        "predictive (stated by the author",
        "discovery_method: caa",
        "vllm: experimental (stated by the author)",
        "by A. Person",
        "1 by default, at most 8 either way",
        "# One\n\nxxx",
        "… (+107 characters)",
    ):
        assert text in out, text
    assert brainpatch("inspect", path, "--json", "--digest").status == 2


def test_validate_tells_a_truncated_file(brainpatch, patch_file):
    whole = patch_file.read_bytes()
    for cut in (len(whole) // 10, len(whole) // 2, len(whole) - 1):
        patch_file.write_bytes(whole[:cut])
        done = brainpatch("validate", patch_file)
        assert done.status == 1
        assert str(cut) in done.out or "truncated" in done.out


@pytest.fixture
def parts(tmp_path, patch_file):
    with zipfile.ZipFile(patch_file) as archive:
        for name in ("manifest.json", "vectors.safetensors"):
            (tmp_path / name).write_bytes(archive.read(name))
    return ["pack", "--manifest", tmp_path / "manifest.json", "--vectors", tmp_path / "vectors.safetensors"]


def test_pack_gives_the_same_bytes(brainpatch, tmp_path, parts, patch_file):
    readme = tmp_path / "README.md"
    readme.write_text("# Hello\n")
    output = tmp_path / "again.brainpatch"
    done = brainpatch(*parts, "--readme", readme, "-o", output)
    assert done.status == 0
    assert output.read_bytes() == patch_file.read_bytes()
    assert hashlib.sha256(output.read_bytes()).hexdigest() in done.out
    assert brainpatch(*parts, "-o", output).status == 1
    assert json.loads(brainpatch(*parts, "-o", output, "--force", "--json").out)["path"] == str(output)


def test_a_path_is_shown_on_one_line(brainpatch, tmp_path, parts):
    output = tmp_path / "a\nwrote b\x1b[2J.brainpatch"
    done = brainpatch(*parts, "-o", output)
    assert output.exists()
    assert "a\\nwrote b\\x1b[2J.brainpatch" in done.out
    assert len(done.out.splitlines()) == 2


def test_json_is_strict():
    with pytest.raises(ValueError, match="not JSON compliant"):
        say_json({"x": float("nan")})


def test_pack_refuses_bad_parts_and_writes_nothing(brainpatch, tmp_path, parts):
    output = tmp_path / "x.brainpatch"
    (tmp_path / "bad.md").write_bytes(b"\xff")
    for change, status in (
        (["--manifest", tmp_path / "none.json"], 3),
        (["--vectors", tmp_path / "manifest.json"], 1),
        (["--manifest", tmp_path / "vectors.safetensors"], 1),
        (["--readme", tmp_path / "bad.md"], 1),
    ):
        assert brainpatch(*parts, *change, "-o", output).status == status
        assert not output.exists()


def hostile():
    verdicts = json.loads((ATTACKS / "verdicts.json").read_text())
    return sorted(
        str(path.relative_to(ATTACKS / "files")) for path in (ATTACKS / "files").rglob("*.brainpatch")
    ), verdicts


def test_nothing_but_escaped_text_reaches_a_terminal(brainpatch, tmp_path):
    """Every hostile file through validate, inspect, install and list; the fixture looks for control characters."""
    names, _ = hostile()
    assert len(names) > 600
    statuses = set()
    for name in names:
        path = ATTACKS / "files" / name
        if path.stat().st_size > 5_000_000:
            continue
        for command in ("validate", "inspect"):
            done = brainpatch(command, path)
            statuses.add(done.status)
            if done.status == 0:
                brainpatch("install", path, "--force")
        assert {entry.name for entry in tmp_path.iterdir()} == set()
    assert statuses == {0, 1, 3}  # 3: what is not a regular file
    assert brainpatch("list").status == 0


def test_a_real_terminal_program_shows_controls_escaped():
    path = next((ATTACKS / "files").rglob("ok-terminal-escape.brainpatch"))
    done = outside("inspect", path)
    assert done.status == 0
    assert "\\x1b" in done.out
    assert not CONTROLS.search(done.out + done.err)
