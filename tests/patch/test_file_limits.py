"""What a file may cost, and what its writer refuses. Reading and writing as such is in test_file."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import brainpatch
import brainpatch.patch
from brainpatch.errors import PatchFormatError, PatchLoadError
from brainpatch.patch import (
    BaseModelSpec,
    Intervention,
    Manifest,
    PatchWarning,
    StrengthSchedule,
    Tensor,
    load_patch,
    load_patch_bytes,
    patch_bytes,
    save_patch,
)
from brainpatch.patch.archive import write_archive
from brainpatch.patch.file import read_patch_file
from brainpatch.patch.tensors import dump, vector


def _sealed(members: dict[str, bytes]) -> bytes:
    """An archive of `members` with right checksums."""
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in members.items()}
    return write_archive({**members, "checksums.json": json.dumps(sums).encode()})


def _refused(code: str, data: bytes, **options: Any) -> str:
    with pytest.raises(PatchFormatError) as caught:
        load_patch_bytes(data, **options)
    assert caught.value.code == code
    return caught.value.reason


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"v": None}, "BP119"),
        ({"v": [1.0, 2.0]}, "BP117"),
        ({"v": [[1.0] * 4]}, "BP117"),
        ({"v": ["1"] * 4}, "BP117"),
        ({"v": [float("nan")] * 4}, "BP118"),
        ({"v": [3.4e38] * 4}, "BP118"),
        ({"x": [1.0] * 3}, "BP117"),
        ({"": [1.0] * 4}, "BP116"),
        ({3: [1.0] * 4}, "BP116"),
        ({f"spare{n}": [1.0] * 4 for n in range(257)}, "BP106"),
    ],
)
def test_vectors_that_cannot_be_written(
    change: dict[Any, Any], code: str, manifest: Manifest, vectors: dict[str, Tensor], tmp_path: Path
) -> None:
    wrong = {key: value for key, value in {**vectors, **change}.items() if value is not None}
    with pytest.raises(PatchFormatError) as caught:
        save_patch(manifest, wrong, tmp_path / "x")
    assert caught.value.code == code
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("name", "A", "BP113"),
        ("description", "\ud800", "BP109"),
        ("evaluation", {"a": float("nan")}, "BP109"),
        ("evaluation", {"a": {1: 2, "b": 3}}, "BP109"),
        ("evaluation", {"a": 2**70}, "BP109"),
        ("description", "x" * 2**20, "BP106"),
        ("schedule", StrengthSchedule({0: 1.0}, default=0.5), "BP114"),
    ],
)
def test_a_manifest_that_cannot_be_written(
    field: str, value: Any, code: str, manifest: Manifest, vectors: dict[str, Tensor]
) -> None:
    setattr(manifest, field, value)
    with pytest.raises(PatchFormatError) as caught:
        patch_bytes(manifest, vectors)
    assert caught.value.code == code


@pytest.mark.parametrize(("readme", "code"), [("\ud800", "BP120"), ("x" * (2**20 + 1), "BP106")])
def test_a_readme_that_cannot_be_written(
    readme: str, code: str, manifest: Manifest, vectors: dict[str, Tensor]
) -> None:
    with pytest.raises(PatchFormatError) as caught:
        patch_bytes(manifest, vectors, readme=readme)
    assert caught.value.code == code


def test_unused_vectors_are_warned_about_and_kept(manifest: Manifest, vectors: dict[str, Tensor]) -> None:
    vectors["spare\x1b"] = vector([1.0] * 4)
    with pytest.warns(PatchWarning, match=r"no intervention uses: spare\\x1b"):
        data = patch_bytes(manifest, vectors)
    with pytest.warns(PatchWarning):
        assert load_patch_bytes(data).vectors == vectors


def test_the_vectors_are_bounded_by_the_manifest(manifest: Manifest, vectors: dict[str, Tensor]) -> None:
    bomb = dump({**vectors, "bomb": vector([0.0] * 2**20, "F64")})
    members = {"manifest.json": manifest.to_json().encode(), "vectors.safetensors": bomb}
    limit = 2**20 + (2 + 256) * 4 * 8
    assert f"at most {limit} " in _refused("BP106", _sealed(members))


def test_the_archive_is_bounded(manifest: Manifest, vectors: dict[str, Tensor], tmp_path: Path) -> None:
    data = patch_bytes(manifest, vectors)
    path = tmp_path / "x.brainpatch"
    path.write_bytes(data)
    load_patch(path, max_archive_bytes=len(data))
    for call in (
        lambda: load_patch(path, max_archive_bytes=len(data) - 1),
        lambda: load_patch_bytes(data, max_archive_bytes=len(data) - 1),
        lambda: read_patch_file(path, len(data) - 1),
    ):
        with pytest.raises(PatchLoadError, match="BP106"):
            call()


def test_the_bound_holds_for_inflated_vectors_too(tmp_path: Path) -> None:
    base_model = BaseModelSpec("m", "", 65536, 1)
    data = patch_bytes(Manifest("m", base_model, [Intervention(0, "v")]), {"v": [0.0] * 65536})
    assert len(data) < 5000
    assert "vectors.safetensors declares" in _refused("BP106", data, max_archive_bytes=5000)


def test_an_honest_vector_may_compress_well() -> None:
    manifest = Manifest("one-hot", BaseModelSpec("m", "", 65536, 1), [Intervention(0, "v")])
    hot = [0.0] * 65536
    hot[7] = 1.0
    data = patch_bytes(manifest, {"v": hot})
    assert len(data) < 65536 * 4 / 200
    assert load_patch_bytes(data).vectors["v"].data == tuple(hot)


def test_a_large_sparse_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.brainpatch"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(PatchLoadError, match="BP106"):
        load_patch(path)


def _open_descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = _open_descriptors()
    for path in (tmp_path, "/dev/zero"):
        with pytest.raises(PatchLoadError):
            load_patch(path)
    assert _open_descriptors() == before


def test_reading_needs_no_numpy_and_no_command_line(
    manifest: Manifest, vectors: dict[str, Tensor], tmp_path: Path
) -> None:
    path = save_patch(manifest, vectors, tmp_path / "x")
    program = (
        "import sys\n"
        "from brainpatch.patch import load_patch, patch_bytes\n"
        f"patch = load_patch({str(path)!r})\n"
        "patch_bytes(patch.manifest, patch.vectors)\n"
        "patch.vectors['v'].data\n"
        "print({'numpy', 'typer', 'rich', 'torch', 'huggingface_hub'} & sys.modules.keys())\n"
    )
    source = str(Path(brainpatch.__file__).parents[1])
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert run.stdout == "set()\n"


def test_the_public_names() -> None:
    missing = [
        name
        for name in brainpatch.patch.__all__
        if name not in brainpatch.patch._FROM_REGISTRY and not hasattr(brainpatch.patch, name)
    ]
    assert missing == []
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = brainpatch.patch.nothing


def test_a_tensor_header_counts_as_untrusted_text(manifest: Manifest, vectors: dict[str, Tensor]) -> None:
    header = json.dumps({"\x1b[2J": {"dtype": "\x1b", "shape": [], "data_offsets": [0, 0]}}).encode()
    members = {
        "manifest.json": manifest.to_json().encode(),
        "vectors.safetensors": struct.pack("<Q", len(header)) + header,
    }
    assert _refused("BP117", _sealed(members)).isprintable()
