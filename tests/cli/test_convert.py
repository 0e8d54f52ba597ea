"""convert."""

from __future__ import annotations

import json
import sys

import gguf
import pytest

from brainpatch import save_patch
from tests.cli.conftest import outside
from tests.factories import make_patch


@pytest.fixture
def plain(tmp_path):
    """A patch that a control vector can say."""
    loaded = make_patch([{"layer": 1, "coefficient": 2.0}, {"layer": 3}], name="plain", default_strength=0.5)
    return save_patch(loaded.manifest, loaded.vectors, tmp_path / "plain.brainpatch")


def test_convert_says_what_it_wrote_and_how_to_use_it(brainpatch, plain, tmp_path):
    output = tmp_path / "plain.gguf"
    done = brainpatch("convert", plain, output)
    assert (done.status, done.err) == (0, "")
    first, *_, last = done.out.splitlines()
    assert first == f"wrote {output}"
    assert last == (
        f"llama-server -m MODEL.gguf --control-vector-scaled {output}:1.0 --control-vector-layer-range 1 3"
    )
    for text in ("block 1: direction.1, norm ", "block 3: direction.3, norm ", "strength 0.5 is in it"):
        assert text in done.out
    assert [each.name for each in gguf.GGUFReader(output).tensors] == ["direction.1", "direction.3"]


def test_convert_with_every_option(brainpatch, plain, tmp_path):
    brainpatch("install", plain)
    output = tmp_path / "named"
    options = ["--from", "brainpatch", "--to", "llama.cpp", "--strength", "-0.25", "--json"]
    document = json.loads(brainpatch("convert", "plain", output, *options).out)
    assert document["path"] == f"{output}.gguf"
    assert (document["format"], document["strength"], document["scale"]) == ("llama.cpp", -0.25, 1.0)
    assert [row["tensor"] for row in document["layers"]] == ["direction.1", "direction.3"]
    assert document["arguments"][0] == "--control-vector-scaled"
    again = brainpatch("convert", "plain", output, "--to", "llama.cpp")
    assert again.status == 1
    assert again.err.startswith("error: BP121 ")
    assert brainpatch("convert", "plain", output, "--to", "llama.cpp", "--force").status == 0


def test_convert_refuses_what_cannot_be_said(brainpatch, patch_file, tmp_path):
    output = tmp_path / "x.gguf"
    done = brainpatch("convert", patch_file, output)
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith(
        'error: BP604 cannot be said as a control vector: formal: it edits the site "prompt"'
    )
    assert "what to do: " in done.err
    assert json.loads(brainpatch("convert", patch_file, output, "--json").out)["error"]["code"] == "BP604"
    assert not output.exists()


def test_exit_statuses_of_convert(brainpatch, plain, tmp_path, monkeypatch):
    output = tmp_path / "x.gguf"
    (tmp_path / "x.txt").write_bytes(b"text")
    for arguments, status, code in (
        (["nobody", output], 3, "BP302"),
        ([tmp_path / "x.txt", output], 2, "BP606"),
        ([plain, tmp_path / "x.pt"], 2, "BP606"),
        ([plain, output, "--to", "vllm"], 2, "BP606"),
        ([plain, output, "--from", "llama.cpp"], 2, "BP606"),
        ([plain, output, "--strength", "nan"], 2, "BP402"),
        ([plain, output, "--strength", "much"], 2, "usage"),
        ([plain], 2, "usage"),
    ):
        done = brainpatch("convert", *arguments, "--json")
        assert (done.status, json.loads(done.out)["error"]["code"]) == (status, code), arguments
    monkeypatch.setitem(sys.modules, "gguf", None)
    done = brainpatch("convert", plain, output)
    assert done.status == 3
    assert "what to do: pip install 'brainpatch[convert]'" in done.err
    assert not output.exists()


def test_a_clamped_strength_is_told(plain, tmp_path):
    done = outside("convert", plain, tmp_path / "x.gguf", "--strength", "100")
    assert done.status == 0
    assert done.err == ("warning: plain: strength 100 is beyond the patch's bound and was clamped to 8\n")
    assert "strength 8 is in it" in done.out
