"""The container: a strict reader and a reproducible writer of the one ZIP layout that patches use.

A patch's members fill the file: local records back to back from byte 0, then the central directory, then the
end record, and nothing else. Two ZIP readers can then not see two different patches in one file.
"""

from __future__ import annotations

import stat
import struct
import zlib
from collections.abc import Mapping
from typing import Final, NamedTuple

from brainpatch.errors import PatchLoadError
from brainpatch.patch.text import visible

MANIFEST: Final = "manifest.json"
VECTORS: Final = "vectors.safetensors"
CHECKSUMS: Final = "checksums.json"
README: Final = "README.md"
MEMBER_NAMES: Final = frozenset((MANIFEST, VECTORS, CHECKSUMS, README))

# Without the leading signature: version needed, flags, method, time, date, crc, packed size, size, name
# length, extra length. A central record repeats them after its signature and "version made by".
_COMMON = struct.Struct("<5H3I2H")
_LOCAL_SIGNATURE: Final = b"PK\x03\x04"
_CENTRAL_SIGNATURE: Final = b"PK\x01\x02"
_END_SIGNATURE: Final = b"PK\x05\x06"
_ZIP64_SIGNATURE: Final = b"PK\x06\x07"
# comment length, disk, internal attributes, external attributes, offset of the local record
_CENTRAL_TAIL = struct.Struct("<3H2I")
# disk, disk of the directory, entries here, entries, directory's size and offset, comment length
_END = struct.Struct("<4H2IH")
_LOCAL_BYTES: Final = 4 + _COMMON.size
_CENTRAL_BYTES: Final = 6 + _COMMON.size + _CENTRAL_TAIL.size
_END_BYTES: Final = 4 + _END.size

_STORED: Final = 0
_DEFLATED: Final = 8
# Hints about the deflate level (bits 1, 2) and "the name is UTF-8" (bit 11) change nothing here.
_HARMLESS_FLAGS: Final = 0b1000_0000_0110
_FLAG_MEANINGS: Final = {0: "encryption", 3: "a data descriptor", 5: "patched data", 6: "strong encryption"}


class Member(NamedTuple):
    """One member as the directory declares it. Sizes and `start`, of its data, are in bytes."""

    name: str
    method: int
    crc: int
    packed_size: int
    size: int
    start: int


def read_directory(data: bytes) -> dict[str, Member]:
    """The members of the archive `data` by name. Nothing is inflated.

    Raises PatchLoadError BP102 (not an archive, or cut off), BP103 (structure), BP104 (name or kind of a
    member), BP105 (unexpected or repeated member), BP107 (method).
    """
    count, directory, end = _end_record(data)
    members: dict[str, Member] = {}
    extents = []
    position = directory
    for _ in range(count):
        name, record, offset, position = _central_record(data, position, end)
        if name in members:
            raise PatchLoadError("BP105", f"{name} is there twice")
        start = _local_record(data, offset, record, name)
        _, _, method, _, _, crc, packed_size, size, _, _ = _COMMON.unpack(record)
        members[name] = Member(name, method, crc, packed_size, size, start)
        extents.append((offset, start + packed_size, name))
    if position != end:
        raise PatchLoadError("BP103", f"{end - position} bytes between the directory and the end record")
    expected = 0
    for offset, after, name in sorted(extents):
        if offset != expected:
            raise PatchLoadError(
                "BP103", f"{name} begins at byte {offset}, not at {expected}: a gap or an overlap"
            )
        expected = after
    if expected != directory:
        raise PatchLoadError(
            "BP103", f"the members end at byte {expected}, but the directory begins at {directory}"
        )
    return members


def read_member(data: bytes, member: Member, limit: int) -> bytes:
    """The bytes of a member, checked against its declared size and CRC.

    Raises PatchLoadError BP106 when the declared size is over `limit`, before anything is inflated, and BP107
    when the data is not what the archive declares. Never holds more than `limit` + 1 bytes of output.
    """
    if member.size > limit:
        raise PatchLoadError(
            "BP106", f"{member.name} declares {member.size} bytes; at most {limit} are allowed here"
        )
    packed = memoryview(data)[member.start : member.start + member.packed_size]
    if member.method == _STORED:
        content = packed.tobytes()
    else:
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            # One byte more than declared: it lets the stream's end be seen, or the excess.
            content = inflater.decompress(packed, member.size + 1)
        except zlib.error as error:
            raise PatchLoadError("BP107", f"{member.name}: {error}") from None
        if not inflater.eof or inflater.unused_data:
            raise PatchLoadError("BP107", f"{member.name}: its compressed data does not end where it should")
    if len(content) != member.size:
        raise PatchLoadError("BP107", f"{member.name} declares {member.size} bytes and holds another number")
    if zlib.crc32(content) != member.crc:
        raise PatchLoadError("BP107", f"{member.name}: the CRC does not match")
    return content


def write_archive(members: Mapping[str, bytes]) -> bytes:
    """An archive of `members`, in the order of their names, deflated, dated 1980-01-01, mode 0644.

    Equal members give equal bytes, with one build of zlib.
    """
    records, directory, offset = [], [], 0
    for name in sorted(members):
        content = members[name]
        deflater = zlib.compressobj(zlib.Z_DEFAULT_COMPRESSION, zlib.DEFLATED, -zlib.MAX_WBITS)
        packed = deflater.compress(content) + deflater.flush()
        raw = name.encode("ascii")
        common = _COMMON.pack(
            20, 0, _DEFLATED, 0, 0x0021, zlib.crc32(content), len(packed), len(content), len(raw), 0
        )
        records += [_LOCAL_SIGNATURE, common, raw, packed]
        # Made by Unix (3), version 2.0.
        tail = _CENTRAL_TAIL.pack(0, 0, 0, (stat.S_IFREG | 0o644) << 16, offset)
        directory += [_CENTRAL_SIGNATURE, b"\x14\x03", common, tail, raw]
        offset += _LOCAL_BYTES + len(raw) + len(packed)
    central = b"".join(directory)
    end = _END.pack(0, 0, len(members), len(members), len(central), offset, 0)
    return b"".join((*records, central, _END_SIGNATURE, end))


def _end_record(data: bytes) -> tuple[int, int, int]:
    """The number of entries, the directory's offset and the end record's offset."""
    end = len(data) - _END_BYTES
    if end < 0 or data[end : end + 4] != _END_SIGNATURE:
        raise _without_end_record(data)
    disk, directory_disk, here, count, size, offset, comment = _END.unpack_from(data, end + 4)
    if disk or directory_disk or here != count:
        raise PatchLoadError("BP103", "the archive claims to be split over several disks")
    if 0xFFFF in (here, count) or 0xFFFFFFFF in (size, offset):
        raise PatchLoadError("BP103", "the archive uses ZIP64")
    if comment:
        raise PatchLoadError(
            "BP102", f"the file is cut off: an archive comment of {comment} bytes is missing"
        )
    if data[max(0, end - 20) : max(0, end - 16)] == _ZIP64_SIGNATURE:
        raise PatchLoadError("BP103", "the archive uses ZIP64")
    if not count:
        raise PatchLoadError("BP105", "the archive is empty")
    if not data.startswith(_LOCAL_SIGNATURE):
        raise PatchLoadError(
            "BP103", "the file does not begin with a member: there is data before the archive"
        )
    if offset + size != end:
        raise PatchLoadError("BP103", "the directory does not lie right before the end record")
    return count, offset, end


def _central_record(data: bytes, position: int, end: int) -> tuple[str, bytes, int, int]:
    """Name, common fields, offset of the local record, and where the next central record begins."""
    if position + _CENTRAL_BYTES > end or data[position : position + 4] != _CENTRAL_SIGNATURE:
        raise PatchLoadError("BP103", f"no directory entry at byte {position}, though one is counted")
    common_at = position + 6
    record = data[common_at : common_at + _COMMON.size]
    _, flags, method, _, _, _, packed_size, size, name_length, extra = _COMMON.unpack(record)
    comment, disk, _, attributes, offset = _CENTRAL_TAIL.unpack_from(data, common_at + _COMMON.size)
    name_at = position + _CENTRAL_BYTES
    after = name_at + name_length + extra + comment
    if after > end:
        raise PatchLoadError("BP103", "a directory entry runs over the directory's end")
    name = _member_name(data[name_at : name_at + name_length])
    kind = stat.S_IFMT(attributes >> 16)
    if kind not in (0, stat.S_IFREG):
        raise PatchLoadError("BP104", f"{name} is marked as something other than a regular file")
    if flags & ~_HARMLESS_FLAGS:
        bit = (flags & ~_HARMLESS_FLAGS).bit_length() - 1
        raise PatchLoadError("BP103", f"{name} uses {_FLAG_MEANINGS.get(bit, f'flag bit {bit}')}")
    if 0xFFFFFFFF in (packed_size, size, offset):
        raise PatchLoadError("BP103", f"{name} uses ZIP64")
    if extra or disk:
        raise PatchLoadError("BP103", f"{name} has an extra field or is on another disk")
    if method not in (_STORED, _DEFLATED):
        raise PatchLoadError("BP107", f"{name} is compressed with method {method}")
    return name, record, offset, after


def _local_record(data: bytes, offset: int, record: bytes, name: str) -> int:
    """Where the member's data begins, when its local record says what the directory says."""
    start = offset + _LOCAL_BYTES + len(name)
    if data[offset : offset + 4] != _LOCAL_SIGNATURE:
        raise PatchLoadError("BP103", f"{name}: no record at byte {offset}")
    if (
        data[offset + 4 : offset + _LOCAL_BYTES] != record
        or data[offset + _LOCAL_BYTES : start] != name.encode()
    ):
        raise PatchLoadError("BP103", f"{name}: its own record and the directory disagree")
    return start


def _member_name(raw: bytes) -> str:
    shown = visible(raw.decode("utf-8", "backslashreplace"), 80)
    if raw.endswith(b"/"):
        raise PatchLoadError("BP103", f'"{shown}" is a directory entry')
    name = raw.decode("ascii", "replace")
    if name in MEMBER_NAMES:
        return name
    slashed = name.replace("\\", "/")
    if not name.isprintable() or not name.isascii() or slashed.startswith("/") or ".." in slashed.split("/"):
        raise PatchLoadError("BP104", f'the member name "{shown}" is refused')
    if not name or name[1:2] == ":":
        raise PatchLoadError("BP104", f'the member name "{shown}" is refused')
    raise PatchLoadError("BP105", f'"{shown}" does not belong into a patch')


_PICKLES: Final = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_OTHER_KINDS: Final = (
    (b"version https://git-lfs", "a git-lfs pointer, not the file it points to", "Run `git lfs pull`."),
    (b"\x1f\x8b", "a gzip stream", "Unpack it first; what is inside may be the patch."),
    (_PICKLES, "a Python pickle. Pickles are never opened here", None),
    (b"GGUF", "a GGUF file", "`brainpatch convert` makes patches of other tools' files."),
    (b"\x93NUMPY", "a NumPy array", "`brainpatch convert` makes patches of other tools' files."),
)


def _without_end_record(data: bytes) -> PatchLoadError:
    """What to say of bytes that do not end with an end record: what they look like, or what is wrong."""
    size = f"{len(data)} bytes"
    if not data:
        return PatchLoadError("BP102", "the file is empty (0 bytes)")
    for magic, what, remedy in _OTHER_KINDS:
        if data.startswith(magic):
            return PatchLoadError("BP102", f"this is {what} ({size})", remedy)
    if data[:256].lstrip()[:1] == b"<":
        return PatchLoadError("BP102", f"this is a web page, not the file itself ({size})")
    if len(data) > 9 and data[8:9] == b"{" and int.from_bytes(data[:8], "little") <= len(data):
        remedy = "Add a manifest with `brainpatch pack --manifest m.json --vectors v.safetensors`."
        return PatchLoadError("BP102", f"this is a bare safetensors file ({size})", remedy)
    found = data.rfind(_END_SIGNATURE, max(0, len(data) - _END_BYTES - 0xFFFF))
    if found < 0 or found + _END_BYTES > len(data):
        if data.startswith(_LOCAL_SIGNATURE):
            return PatchLoadError("BP102", f"the archive is cut off: its end is missing ({size} are here)")
        return PatchLoadError("BP102", f"not a ZIP archive ({size})")
    (comment,) = struct.unpack_from("<H", data, found + _END_BYTES - 2)
    if found + _END_BYTES + comment == len(data):
        return PatchLoadError("BP103", f"the archive has a comment of {comment} bytes")
    return PatchLoadError("BP103", f"{len(data) - found - _END_BYTES} bytes after the archive's end")
