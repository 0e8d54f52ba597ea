"""A file is there whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from brainpatch.errors import PatchExistsError, PatchWriteError
from brainpatch.patch.atomic import write_atomically


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("overwrite", [False, True])
def test_writes_and_leaves_nothing_else(overwrite: bool, tmp_path: Path) -> None:
    path = tmp_path / "a" / ("x" * 250)
    write_atomically(path, b"data", overwrite=overwrite)
    assert path.read_bytes() == b"data"
    assert _names(path.parent) == [path.name]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask
    assert path.stat().st_nlink == 1


def test_overwrites_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(PatchExistsError, match="BP121"):
        write_atomically(path, b"new", overwrite=False)
    assert path.read_bytes() == b"old"
    write_atomically(path, b"new", overwrite=True)
    assert path.read_bytes() == b"new"
    assert _names(tmp_path) == ["x"]


def test_a_dangling_link_counts_as_there(tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to(tmp_path / "absent")
    with pytest.raises(PatchExistsError):
        write_atomically(tmp_path / "x", b"new", overwrite=False)
    assert not (tmp_path / "absent").exists()


def test_another_process_was_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"theirs")
    monkeypatch.setattr(os.path, "lexists", lambda path: False)
    with pytest.raises(PatchExistsError):
        write_atomically(path, b"ours", overwrite=False)
    assert path.read_bytes() == b"theirs"
    assert _names(tmp_path) == ["x"]


def _no_links(*arguments: object) -> None:
    raise OSError(errno.EPERM, "no links here")


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", _no_links)
    write_atomically(tmp_path / "x", b"one", overwrite=False)
    assert (tmp_path / "x").read_bytes() == b"one"
    answers = iter([False, True])  # appears between the first look and the second
    monkeypatch.setattr(os.path, "lexists", lambda path: next(answers))
    with pytest.raises(PatchExistsError):
        write_atomically(tmp_path / "x", b"two", overwrite=False)
    assert (tmp_path / "x").read_bytes() == b"one"
    assert _names(tmp_path) == ["x"]


def test_failures_leave_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for target, overwrite in ((path, True), (tmp_path / "y", False)):
        with pytest.raises(OSError, match="No space left") as caught:
            write_atomically(target, b"new", overwrite=overwrite)
        assert isinstance(caught.value, PatchWriteError)
        assert caught.value.code == "BP122"
    assert path.read_bytes() == b"old"
    assert _names(tmp_path) == ["x"]


def test_a_link_that_fails_for_another_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(os, "link", broken)
    with pytest.raises(PatchWriteError, match="broken disk"):
        write_atomically(tmp_path / "x", b"new", overwrite=False)
    assert _names(tmp_path) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_places_that_cannot_be_written(overwrite: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    targets = [
        tmp_path / "file" / "x",
        tmp_path / "file" / "y" / "x",
        tmp_path / "a\0b",
        tmp_path / "a\0b" / "x",
    ]
    if overwrite:
        targets.append(tmp_path / "folder")
    for target in targets:
        with pytest.raises(PatchWriteError, match="BP122"):
            write_atomically(target, b"x", overwrite=overwrite)
    assert _names(tmp_path) == ["file", "folder"]
