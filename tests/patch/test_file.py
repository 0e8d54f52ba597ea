"""Reading and writing whole files."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from brainpatch.errors import (
    PatchExistsError,
    PatchFormatError,
    PatchLoadError,
    PatchWriteError,
)
from brainpatch.patch import (
    BaseModelSpec,
    Intervention,
    LoadedPatch,
    Manifest,
    load_patch,
    patch_size_report,
    save_patch,
)
from brainpatch.patch.file import load_patch_bytes, patch_bytes
from brainpatch.patch.tensors import vector
from tests.factories import make_patch


def simple(**fields: object) -> LoadedPatch:
    return make_patch(
        [{"layer": 1, "coefficient": 0.5}, {"layer": 2, "vector": "w", "site": "prompt"}], **fields
    )


def written(patch: LoadedPatch, readme: str | None = None) -> bytes:
    return patch_bytes(patch.manifest, patch.vectors, readme=readme)


def members(data: bytes, tmp_path: Path) -> dict[str, bytes]:
    path = tmp_path / "members.zip"
    path.write_bytes(data)
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def rebuilt(parts: dict[str, bytes], tmp_path: Path, *, checksums: bool = True) -> bytes:
    """An archive of these members as the published writer makes it, with right checksums unless told."""
    parts = dict(parts)
    if checksums:
        digests = {n: hashlib.sha256(c).hexdigest() for n, c in parts.items() if n != "checksums.json"}
        parts["checksums.json"] = json.dumps(digests).encode()
    path = tmp_path / "rebuilt.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(parts):
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o100644 << 16
            archive.writestr(info, parts[name])
    return path.read_bytes()


def refused(data: bytes, code: str, **arguments: bool) -> PatchFormatError:
    with pytest.raises(PatchFormatError) as caught:
        load_patch_bytes(data, **arguments)
    assert caught.value.code == code
    return caught.value


# --- round trips ------------------------------------------------------------------------------


def test_a_written_file_follows_the_published_rules(tmp_path: Path) -> None:
    """Read by zipfile, json and the safetensors library, with nothing of ours."""
    patch = simple(description="Zoë", authors=["a"])
    parts = members(written(patch, "# Read me\n"), tmp_path)
    assert list(parts) == ["README.md", "checksums.json", "manifest.json", "vectors.safetensors"]
    manifest = json.loads(parts["manifest.json"])
    assert len(manifest) == 14
    assert parts["manifest.json"].decode("ascii") == json.dumps(manifest, indent=2, sort_keys=True) + "\n"
    assert json.loads(parts.pop("checksums.json")) == {
        n: hashlib.sha256(c).hexdigest() for n, c in parts.items()
    }
    arrays = safetensors.numpy.load(parts["vectors.safetensors"])
    assert {key: array.tolist() for key, array in arrays.items()} == {
        key: list(tensor.data) for key, tensor in patch.vectors.items()
    }
    header_length = struct.unpack("<Q", parts["vectors.safetensors"][:8])[0]
    header = json.loads(parts["vectors.safetensors"][8 : 8 + header_length])
    assert header["__metadata__"] == {"format": "brainpatch-vectors-v1"}
    with zipfile.ZipFile(tmp_path / "members.zip") as archive:
        for info in archive.infolist():
            assert (info.date_time, info.external_attr) == ((1980, 1, 1, 0, 0, 0), 0o100644 << 16)
            assert (info.create_system, info.create_version, info.flag_bits, info.extra) == (3, 20, 0, b"")


def test_what_is_written_loads_as_it_was_and_writes_the_same_bytes() -> None:
    patch = simple(schedule={"0": 1, "9": 0.5}, max_abs_strength=2.0)
    data = written(patch, "text")
    back = load_patch_bytes(data)
    assert back.manifest == patch.manifest
    assert back.vectors == patch.vectors
    assert back.readme == "text"
    assert back.archive_bytes == len(data)
    assert written(back, back.readme) == data


@given(
    st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**99), max_value=2.0**99),
        min_size=1,
        max_size=8,
    ),
    st.floats(-1024, 1024),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)
@settings(max_examples=60, deadline=None)
def test_any_patch_survives(values: list[float], coefficient: float, text: str) -> None:
    model = BaseModelSpec("m", "A", len(values), 3)
    manifest = Manifest("p", model, [Intervention(1, "v", coefficient)], description=text, authors=[text])
    data = patch_bytes(manifest, {"v": values}, readme=text)
    back = load_patch_bytes(data)
    assert back.manifest == manifest
    assert back.vectors["v"].data == tuple(values)
    assert back.readme == (text or None)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_damaged_file_is_refused_or_the_same_patch(data: st.DataObject) -> None:
    whole = written(simple(), "A readme of some length.")
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "swap"]))
    at = data.draw(st.integers(0, len(whole) - 1))
    if kind == "flip":
        damaged = whole[:at] + bytes([whole[at] ^ (1 << data.draw(st.integers(0, 7)))]) + whole[at + 1 :]
    elif kind == "cut":
        damaged = whole[:at]
    elif kind == "insert":
        damaged = whole[:at] + data.draw(st.binary(min_size=1, max_size=4)) + whole[at:]
    else:
        other = data.draw(st.integers(0, len(whole) - 1))
        low, high = sorted((at, other))
        damaged = whole[:low] + whole[high:] + whole[low:high]
    try:
        loaded = load_patch_bytes(damaged)
    except PatchFormatError as error:
        assert error.code.startswith("BP1")
    else:
        assert loaded.vectors == simple().vectors
        assert loaded.manifest == simple().manifest


# --- what a reader refuses --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["manifest.json", "vectors.safetensors", "checksums.json"])
def test_a_missing_member_is_named(name: str, tmp_path: Path) -> None:
    parts = members(written(simple()), tmp_path)
    del parts[name]
    assert name in refused(rebuilt(parts, tmp_path, checksums=name != "checksums.json"), "BP105").reason


def test_without_checksums_only_when_asked(tmp_path: Path) -> None:
    parts = members(written(simple(), "x"), tmp_path)
    del parts["checksums.json"]
    bare = rebuilt(parts, tmp_path, checksums=False)
    assert load_patch_bytes(bare, verify_checksums=False).readme == "x"
    parts["checksums.json"] = b"{}"
    wrong = rebuilt(parts, tmp_path, checksums=False)
    refused(wrong, "BP108")
    assert load_patch_bytes(wrong, verify_checksums=False).name == "p"


@pytest.mark.parametrize("change", ["upper", "surplus", "itself", "missing", "wrong", "list"])
def test_checksums_must_list_exactly_the_members(change: str, tmp_path: Path) -> None:
    parts = members(written(simple()), tmp_path)
    digests = json.loads(parts["checksums.json"])
    changed: dict[str, object] = {
        "upper": {name: digest.upper() for name, digest in digests.items()},
        "surplus": digests | {"README.md": "0" * 64},
        "itself": digests | {"checksums.json": "0" * 64},
        "missing": {"manifest.json": digests["manifest.json"]},
        "wrong": digests | {"vectors.safetensors": "0" * 64},
        "list": list(digests),
    }
    parts["checksums.json"] = json.dumps(changed[change]).encode()
    refused(rebuilt(parts, tmp_path, checksums=False), "BP108")


@pytest.mark.parametrize(
    ("edit", "code"),
    [
        (lambda m: m.pop("format_version"), "BP112"),
        (lambda m: m.update(format_version="2.0"), "BP112"),
        (lambda m: m["interventions"][0].update(vector="gone"), "BP119"),
        (lambda m: m["base_model"].update(hidden_size=5), "BP117"),
        (lambda m: m["interventions"][0].update(layer=99), "BP111"),
    ],
)
def test_manifest_and_vectors_must_agree(edit: Callable[[dict], object], code: str, tmp_path: Path) -> None:
    parts = members(written(simple()), tmp_path)
    manifest = json.loads(parts["manifest.json"])
    edit(manifest)
    parts["manifest.json"] = json.dumps(manifest).encode()
    refused(rebuilt(parts, tmp_path), code)


def test_a_readme_is_utf8_and_an_empty_one_is_none(tmp_path: Path) -> None:
    parts = members(written(simple()), tmp_path)
    assert load_patch_bytes(rebuilt(parts | {"README.md": b""}, tmp_path)).readme is None
    refused(rebuilt(parts | {"README.md": b"\xff"}, tmp_path), "BP120")


def test_unused_vectors_are_kept_with_a_warning_up_to_a_limit() -> None:
    patch = simple()
    spare = patch.vectors | {"spare": vector([0.0] * 4)}
    with pytest.warns(UserWarning, match="spare"):
        data = patch_bytes(patch.manifest, spare)
    with pytest.warns(UserWarning, match="spare"):
        back = load_patch_bytes(data)
    assert back.vectors == spare


def test_a_file_is_bounded_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.brainpatch"
    path.write_bytes(written(simple()))
    size = path.stat().st_size
    assert load_patch(path, max_archive_bytes=size).name == "p"
    for call in (
        lambda: load_patch(path, max_archive_bytes=size - 1),
        lambda: load_patch_bytes(path.read_bytes(), max_archive_bytes=size - 1),
    ):
        with pytest.raises(PatchLoadError) as caught:
            call()
        assert caught.value.code == "BP106"


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", tmp_path / "none", Path("/dev/null"), Path("a\0b")):
        with pytest.raises(PatchLoadError) as caught:
            load_patch(path)
        assert caught.value.code == "BP101"


# --- what a writer refuses --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vectors", "code"),
    [
        ({"v": [1.0] * 4}, "BP119"),
        ({"v": [1.0] * 3, "w": [1.0] * 4}, "BP117"),
        ({"v": [float("nan")] * 4, "w": [1.0] * 4}, "BP118"),
        ({"v": ["a"] * 4, "w": [1.0] * 4}, "BP117"),
        ({1: [1.0] * 4, "w": [1.0] * 4}, "BP116"),
    ],
)
def test_a_writer_refuses_what_a_reader_would(vectors: dict, code: str, tmp_path: Path) -> None:
    with pytest.raises(PatchFormatError) as caught:
        save_patch(simple().manifest, vectors, tmp_path / "x")
    assert caught.value.code == code
    assert list(tmp_path.iterdir()) == []


def test_a_readme_with_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(PatchFormatError) as caught:
        written(simple(), "\ud800")
    assert caught.value.code == "BP120"


def test_arrays_and_lists_are_stored_as_float32() -> None:
    data = patch_bytes(simple().manifest, {"v": np.arange(4.0), "w": [1, 2, 3, 4]})
    assert {t.dtype for t in load_patch_bytes(data).vectors.values()} == {"F32"}


def test_save_forces_the_suffix_makes_folders_and_keeps_what_is_there(tmp_path: Path) -> None:
    patch = simple()
    path = save_patch(patch.manifest, patch.vectors, tmp_path / "a" / "b" / "x.zip")
    assert path == tmp_path / "a" / "b" / "x.brainpatch"
    before = path.read_bytes()
    with pytest.raises(FileExistsError) as caught:
        save_patch(simple(seed=1).manifest, simple(seed=1).vectors, path)
    assert isinstance(caught.value, PatchExistsError)
    assert path.read_bytes() == before
    save_patch(simple(seed=1).manifest, simple(seed=1).vectors, path, overwrite=True)
    assert path.read_bytes() != before
    assert [p.name for p in path.parent.iterdir()] == ["x.brainpatch"]
    loaded = load_patch(path)
    assert loaded.source == str(path)
    report = patch_size_report(loaded)
    assert report["archive_bytes"] == path.stat().st_size
    assert (report["num_vectors"], report["vector_payload_bytes"], report["dtype"]) == (2, 32, "F32")
    assert loaded.describe()["layers"] == [1, 2]
    with pytest.raises(PatchLoadError) as missing:
        loaded.vector_for("nothing")
    assert missing.value.code == "BP119"


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    patch = simple()
    (tmp_path / "file").write_bytes(b"")
    for path in (Path(), tmp_path / "file" / "x", tmp_path / "a\0b", tmp_path / ("n" * 300)):
        with pytest.raises(PatchWriteError) as caught:
            save_patch(patch.manifest, patch.vectors, path)
        assert caught.value.code == "BP122"
        assert isinstance(caught.value, OSError)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_reading_a_good_file_warns_of_nothing() -> None:
    data = written(simple())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_patch_bytes(data)
