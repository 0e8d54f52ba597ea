"""The container: strict reading, reproducible writing. Most hostile archives are in tests/attacks."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable

import pytest

from brainpatch.errors import PatchLoadError
from brainpatch.patch.archive import read_directory, read_member, write_archive

MEMBERS = {"manifest.json": b"{}" * 50, "vectors.safetensors": bytes(100), "README.md": b"hello"}


def _zip(
    members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED, change: Callable[..., None] | None = None
) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in members.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = method
            if change:
                change(info)
            file.writestr(info, content)
    return buffer.getvalue()


def _read_all(data: bytes) -> dict[str, bytes]:
    return {name: read_member(data, member, 1000) for name, member in read_directory(data).items()}


def _refused(data: bytes, code: str) -> str:
    with pytest.raises(PatchLoadError) as caught:
        _read_all(data)
    assert caught.value.code == code
    return caught.value.reason


def test_writes_what_python_zipfile_would() -> None:
    def as_published(info: zipfile.ZipInfo) -> None:
        info.external_attr = 0o100644 << 16
        info.create_system = 3

    assert write_archive(MEMBERS) == _zip(dict(sorted(MEMBERS.items())), change=as_published)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_reads_other_writers_in_any_order(method: int) -> None:
    data = _zip(MEMBERS, method)
    assert _read_all(data) == MEMBERS


def test_a_member_is_bounded_before_it_is_inflated() -> None:
    data = write_archive({"README.md": bytes(1001)})
    assert "declares 1001 bytes; at most 1000" in _refused(data, "BP106")


def test_a_lie_about_the_size_costs_no_more_than_the_limit() -> None:
    data = bytearray(write_archive({"README.md": bytes(50_000_000)}))
    central = data.rindex(b"PK\x01\x02")
    struct.pack_into("<I", data, 22, 1000)
    struct.pack_into("<I", data, central + 24, 1000)
    assert "does not end" in _refused(bytes(data), "BP107")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("/etc/passwd", "BP104"),
        ("\\x", "BP104"),
        ("../manifest.json", "BP104"),
        ("a\\..\\b", "BP104"),
        ("C:x", "BP104"),
        ("mänifest.json", "BP104"),
        ("a\x1b[2Jb", "BP104"),
        ("sub/", "BP103"),
        ("Manifest.json", "BP105"),
        ("sub/manifest.json", "BP105"),
        ("...", "BP105"),
    ],
)
def test_member_names(name: str, code: str) -> None:
    assert _refused(_zip({name: b""}), code).isprintable()


def test_an_empty_member_name() -> None:
    data = bytearray(_zip({"x": b"y"}))
    data[30:31] = b""
    central = data.rindex(b"PK\x01\x02")
    data[central + 46 : central + 47] = b""
    for at in (26, central + 28):
        struct.pack_into("<H", data, at, 0)
    end = data.rindex(b"PK\x05\x06")
    struct.pack_into("<II", data, end + 12, 46, central)
    _refused(bytes(data), "BP104")


@pytest.mark.parametrize("mode", [0o120777, 0o040755, 0o010644, 0o020644])
def test_only_regular_files(mode: int) -> None:
    def change(info: zipfile.ZipInfo) -> None:
        info.external_attr = mode << 16

    _refused(_zip({"README.md": b"x"}, change=change), "BP104")


@pytest.mark.parametrize("mode", [0, 0o600, 0o104755])
def test_permissions_do_not_matter(mode: int) -> None:
    def change(info: zipfile.ZipInfo) -> None:
        info.external_attr = mode << 16
        info.comment = b"\x1b"

    assert read_directory(_zip({"README.md": b"x"}, change=change)).keys() == {"README.md"}


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_methods_are_refused(method: int) -> None:
    _refused(_zip({"README.md": b"x" * 50}, method), "BP107")


def test_an_extra_field_is_refused() -> None:
    def change(info: zipfile.ZipInfo) -> None:
        info.extra = b"\x99\x99\x00\x00"

    assert "extra field" in _refused(_zip({"README.md": b"x"}, change=change), "BP103")


@pytest.mark.parametrize(
    ("bit", "what"),
    [
        (0, "encryption"),
        (3, "a data descriptor"),
        (5, "patched data"),
        (6, "strong encryption"),
        (13, "flag bit 13"),
    ],
)
def test_flags_that_change_the_meaning_are_refused(bit: int, what: str) -> None:
    data = bytearray(write_archive({"README.md": b"x"}))
    central = data.rindex(b"PK\x01\x02")
    for at in (6, central + 8):
        struct.pack_into("<H", data, at, 1 << bit)
    assert what in _refused(bytes(data), "BP103")


@pytest.mark.parametrize("at", range(4, 30))
def test_every_field_of_the_two_records_must_agree(at: int) -> None:
    data = bytearray(write_archive({"README.md": b"x"}))
    data[at] ^= 1
    assert "disagree" in _refused(bytes(data), "BP103")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: b"#!/bin/sh\n" + data, "data before the archive"),
        (lambda data: data + b"x", "1 bytes after the archive's end"),
        (lambda data: data[:-2] + b"\x03\x00abc", "comment of 3 bytes"),
        (lambda data: data + data, "right before the end record"),
        (lambda data: data[:-22] + b"PK\x06\x07" + bytes(16) + data[-22:], "ZIP64"),
        (lambda data: data[:-22] + bytes(30) + data[-22:], "right before the end record"),
        (lambda data: data[:-18] + b"\x01\x00" + data[-16:], "several disks"),
        (lambda data: data[:-14] + b"\xff\xff" * 2 + data[-10:], "ZIP64"),
        (lambda data: data[:-14] + b"\x02\x00" + data[-12:], "several disks"),
        (lambda data: data[:-14] + b"\x02\x00" * 2 + data[-10:], "no directory entry"),
        (lambda data: data[:-6] + b"\xff" * 4 + data[-2:], "ZIP64"),
    ],
)
def test_nothing_but_the_archive_is_in_the_file(change: Callable[[bytes], bytes], why: str) -> None:
    data = write_archive({"README.md": b"x"})
    assert why in _refused(change(data), "BP103")


def test_bytes_between_directory_and_end() -> None:
    data = bytearray(write_archive({"README.md": b"x"}))
    end = len(data) - 22
    (size,) = struct.unpack_from("<I", data, end + 12)
    struct.pack_into("<I", data, end + 12, size + 3)
    assert "3 bytes between" in _refused(bytes(data[:end] + b"abc" + data[end:]), "BP103")


def test_a_gap_before_the_directory() -> None:
    data = bytearray(write_archive({"README.md": b"x"}))
    central = data.rindex(b"PK\x01\x02")
    struct.pack_into("<I", data, len(data) - 6, central + 3)
    assert "the members end at" in _refused(bytes(data[:central] + b"abc" + data[central:]), "BP103")


def test_a_gap_between_members() -> None:
    data = bytearray(write_archive({"README.md": b"x", "manifest.json": b"{}"}))
    second = data.index(b"PK\x03\x04", 4)
    central = data.index(b"PK\x01\x02")
    struct.pack_into("<I", data, len(data) - 6, central + 3)
    struct.pack_into("<I", data, data.rindex(b"PK\x01\x02") + 42, second + 3)
    assert "a gap or an overlap" in _refused(bytes(data[:second] + b"abc" + data[second:]), "BP103")


def test_a_directory_entry_that_runs_over() -> None:
    data = bytearray(write_archive({"README.md": b"x"}))
    struct.pack_into("<H", data, data.rindex(b"PK\x01\x02") + 32, 500)
    assert "runs over" in _refused(bytes(data), "BP103")


@pytest.mark.parametrize("offset", [1, 10**6])
def test_a_local_record_that_is_not_there(offset: int) -> None:
    data = bytearray(write_archive({"README.md": b"x"}))
    struct.pack_into("<I", data, data.rindex(b"PK\x01\x02") + 42, offset)
    assert "no record at byte" in _refused(bytes(data), "BP103")


def test_a_size_that_says_zip64() -> None:
    data = bytearray(write_archive({"README.md": b"x"}))
    struct.pack_into("<I", data, data.rindex(b"PK\x01\x02") + 24, 0xFFFFFFFF)
    assert "ZIP64" in _refused(bytes(data), "BP103")


def test_a_name_twice() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("README.md", b"a")
        with pytest.warns(UserWarning, match="Duplicate name"):
            file.writestr("README.md", b"b")
    assert "twice" in _refused(buffer.getvalue(), "BP105")


def test_damage_is_found() -> None:
    stored = bytearray(_zip({"README.md": b"hello"}, zipfile.ZIP_STORED))
    stored[40] ^= 1
    assert "CRC" in _refused(bytes(stored), "BP107")
    packed = bytearray(write_archive({"README.md": bytes(range(256))}))
    packed[39:60] = b"\xff" * 21
    _refused(bytes(packed), "BP107")


@pytest.mark.parametrize(
    ("data", "why", "remedy"),
    [
        (b"", "empty (0 bytes)", None),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
            "a git-lfs pointer",
            "git lfs pull",
        ),
        (b"\n <!DOCTYPE html><html>", "a web page", None),
        (struct.pack("<Q", 2) + b"{}", "a bare safetensors file (10 bytes)", "brainpatch pack"),
        (b"\x80\x04\x95.", "a Python pickle", None),
        (zlib.compress(b"x", wbits=31), "a gzip stream", None),
        (b"GGUF\x03\0\0\0", "a GGUF file", "brainpatch convert"),
        (b"\x93NUMPY\x01", "a NumPy array", "brainpatch convert"),
        (write_archive(MEMBERS)[:-1], "cut off", None),
        (write_archive(MEMBERS)[:100], "cut off: its end is missing (100 bytes", None),
        (write_archive(MEMBERS)[:-2] + b"\x05\x00", "cut off: an archive comment of 5 bytes", None),
        (b"hello", "not a ZIP archive (5 bytes)", None),
    ],
)
def test_other_files_are_named(data: bytes, why: str, remedy: str | None) -> None:
    with pytest.raises(PatchLoadError) as caught:
        read_directory(data)
    assert caught.value.code == "BP102"
    assert why in caught.value.reason
    assert remedy is None or remedy in caught.value.remedy


def test_an_empty_archive() -> None:
    assert "empty" in _refused(_zip({}), "BP105")
