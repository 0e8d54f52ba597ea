"""Which forms are known, how a file's is told, and what a writer says of what it wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from brainpatch.convert import FORMATS, Format, Written, convert, formats, readable, writable
from brainpatch.convert.llamacpp import server_arguments
from brainpatch.errors import ConvertError, PatchLoadError
from brainpatch.patch import load_patch, save_patch
from brainpatch.patch.file import LoadedPatch
from tests.factories import make_patch


@pytest.fixture
def patch_file(tmp_path: Path) -> Path:
    """A patch that a control vector can say."""
    patch = make_patch(
        [{"layer": 1}, {"layer": 3}], default_strength=0.5, vectors={"v": [3.0, 4.0, 0.0, 0.0]}
    )
    return save_patch(patch.manifest, patch.vectors, tmp_path / "p.brainpatch")


def test_what_is_known() -> None:
    assert (readable(), writable()) == (["brainpatch"], ["llama.cpp"])
    assert all(name == form.name for name, form in FORMATS.items())
    assert len({form.suffix for form in FORMATS.values()}) == len(FORMATS)


def test_the_patchs_own_strength_is_put_in_unless_another_is_given(patch_file: Path, tmp_path: Path) -> None:
    own = convert(patch_file, tmp_path / "a.gguf")
    assert own.facts["strength"] == 0.5
    assert own.path.read_bytes() == convert(patch_file, tmp_path / "b.gguf", strength=0.5).path.read_bytes()
    assert convert(patch_file, tmp_path / "c.gguf", strength=-2).facts["strength"] == -2.0


def test_what_a_writer_says(patch_file: Path, tmp_path: Path) -> None:
    written = convert(patch_file, tmp_path / "a b.gguf")
    arguments = ["--control-vector-scaled", f"{written.path}:1.0", "--control-vector-layer-range", "1", "3"]
    assert written.facts == {
        "format": "llama.cpp",
        "strength": 0.5,
        "scale": 1.0,
        "layers": [
            {"layer": 1, "tensor": "direction.1", "norm": 2.5},
            {"layer": 3, "tensor": "direction.3", "norm": 2.5},
        ],
        "arguments": arguments,
    }
    assert written.lines == [
        "block 1: direction.1, norm 2.5",
        "block 3: direction.3, norm 2.5",
        "strength 0.5 is in it: at the scale 1.0 llama.cpp adds what the patch adds",
        f"llama-server -m MODEL.gguf --control-vector-scaled '{written.path}:1.0' "
        "--control-vector-layer-range 1 3",
    ]


def test_a_path_that_llama_server_would_take_apart(patch_file: Path, tmp_path: Path) -> None:
    assert server_arguments(Path("a:b.gguf"), 4)[:2] == ["--control-vector", "a:b.gguf"]
    assert not any("comma" in line for line in convert(patch_file, tmp_path / "a:b.gguf").lines)
    assert any("comma" in line for line in convert(patch_file, tmp_path / "a,b.gguf").lines)


def test_a_form_is_told_by_name_and_content(patch_file: Path, tmp_path: Path) -> None:
    renamed = patch_file.with_name("other.zip")
    patch_file.rename(renamed)
    assert convert(renamed, tmp_path / "a.GGUF").path == tmp_path / "a.gguf"
    assert convert(renamed, tmp_path / "b", output_format="llama.cpp").path == tmp_path / "b.gguf"
    damaged = tmp_path / "x.BrainPatch"
    damaged.write_bytes(b"<html>")
    with pytest.raises(PatchLoadError, match="BP102"):
        convert(damaged, tmp_path / "c.gguf")
    renamed.write_bytes(b"")
    with pytest.raises(PatchLoadError, match="BP102"):
        convert(renamed, tmp_path / "c.gguf", source_format="brainpatch")


@pytest.mark.parametrize(
    ("source", "output", "names", "why"),
    [
        ("x.txt", "o.gguf", {}, "x.txt is of no form"),
        ("x.gguf", "o.gguf", {}, "llama.cpp files are not read"),
        ("p.brainpatch", "o.gguf", {"source_format": "llama.cpp"}, "llama.cpp files are not read"),
        ("p.brainpatch", "o.gguf", {"source_format": "pt\x1b"}, r"no form called 'pt\\x1b'"),
        ("p.brainpatch", "o.gguf", {"output_format": "pt"}, "no form called 'pt'"),
        ("p.brainpatch", "o.gguf", {"output_format": "brainpatch"}, "brainpatch files are not written"),
        ("p.brainpatch", "o.brainpatch", {}, "brainpatch files are not written"),
        ("p.brainpatch", "o.pt", {}, "the suffix of .*o.pt is that of no form"),
        ("p.brainpatch", "o", {}, "is that of no form"),
    ],
)
@pytest.mark.usefixtures("patch_file")
def test_what_is_not_known_is_refused_with_what_is(
    source: str, output: str, names: dict[str, Any], why: str, tmp_path: Path
) -> None:
    (tmp_path / "x.txt").write_bytes(b"text")
    (tmp_path / "x.gguf").write_bytes(b"GGUF\x03")
    before = sorted(each.name for each in tmp_path.iterdir())
    with pytest.raises(ConvertError, match=f"{why}.*read: brainpatch; written: llama.cpp") as caught:
        convert(tmp_path / source, tmp_path / output, **names)
    assert caught.value.code == "BP606"
    assert sorted(each.name for each in tmp_path.iterdir()) == before


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", "nobody", ".", "\0"):
        with pytest.raises(PatchLoadError, match="BP101"):
            convert(tmp_path / name, tmp_path / "o.gguf")


def test_a_form_is_one_entry(patch_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A form that is added is told apart, read and written without a change elsewhere."""

    def read(path: Path) -> LoadedPatch:
        return load_patch(path.read_bytes()[3:].decode())

    def write(patch: LoadedPatch, output: Path, strength: float | None, overwrite: bool) -> Written:
        output.write_text(f"{patch.name} {strength} {overwrite}")
        return Written(output, [])

    form = Format("new", ".new", lambda path, head: head.startswith(b"NEW"), read, write)
    monkeypatch.setitem(formats.FORMATS, "new", form)
    (tmp_path / "x").write_text(f"NEW{patch_file}")
    convert(tmp_path / "x", tmp_path / "y.new", strength=2.0, overwrite=True)
    assert (tmp_path / "y.new").read_text() == "p 2.0 True"
    assert (readable(), writable()) == (["brainpatch", "new"], ["llama.cpp", "new"])


def test_the_forms_can_be_listed_without_numpy_and_gguf() -> None:
    code = "import sys, brainpatch.convert as c; c.readable(); sys.exit(not {'numpy', 'gguf'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
