"""Patch files: reading one safely, and writing one reproducibly."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from brainpatch.errors import PatchExistsError, PatchFormatError, PatchLoadError, PatchWriteError
from brainpatch.patch import archive, strict_json, tensors
from brainpatch.patch.archive import CHECKSUMS, MANIFEST, README, VECTORS
from brainpatch.patch.atomic import write_atomically
from brainpatch.patch.limits import (
    MAX_ARCHIVE_BYTES,
    MAX_CHECKSUMS_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_README_BYTES,
    MAX_SPARE_TENSORS,
    max_tensor_file_bytes,
)
from brainpatch.patch.manifest import Manifest, PatchWarning
from brainpatch.patch.tensors import Tensor
from brainpatch.patch.text import visible

SUFFIX: Final = ".brainpatch"


@dataclass
class LoadedPatch:
    """A patch in memory. `source` is the path it was read from, `archive_bytes` the size of that file."""

    manifest: Manifest
    vectors: dict[str, Tensor]
    readme: str | None = None
    source: str | None = None
    archive_bytes: int = 0

    @property
    def name(self) -> str:
        """The patch's name."""
        return self.manifest.name

    def vector_for(self, key: str) -> Tensor:
        """The vector of a key; PatchLoadError BP119 when there is none."""
        if key not in self.vectors:
            raise PatchLoadError("BP119", f'there is no vector "{visible(str(key), 80)}"')
        return self.vectors[key]

    def describe(self) -> dict[str, Any]:
        """A summary as plain data. Its texts are the author's own, not escaped."""
        manifest = self.manifest
        return {
            "name": manifest.name,
            "format_version": manifest.format_version,
            "description": manifest.description,
            "base_model": manifest.base_model.to_dict(),
            "num_interventions": len(manifest.interventions),
            "layers": manifest.layers,
            "num_vectors": len(self.vectors),
            "vector_dtype": _first_dtype(self),
            "evidence_level": manifest.evidence_level,
            "compatibility": manifest.compatibility,
            "archive_bytes": self.archive_bytes,
            "source": self.source,
        }


def load_patch(
    path: str | os.PathLike[str],
    *,
    verify_checksums: bool = True,
    max_archive_bytes: int = MAX_ARCHIVE_BYTES,
) -> LoadedPatch:
    """Read and check a patch file. Nothing in it is executed, extracted or followed.

    `max_archive_bytes` bounds the file, and its vectors once inflated. Without `verify_checksums` the SHA-256
    digests are not compared and checksums.json may be absent; everything else is checked all the same.

    Raises PatchLoadError (BP101 to BP108, BP116 to BP120) for the container and the vectors,
    PatchFormatError (BP109 to BP115) for the manifest.
    """
    data = read_patch_file(path, max_archive_bytes)
    return load_patch_bytes(
        data,
        source=os.fsdecode(path),
        verify_checksums=verify_checksums,
        max_archive_bytes=max_archive_bytes,
    )


def load_patch_bytes(
    data: bytes,
    source: str | None = None,
    *,
    verify_checksums: bool = True,
    max_archive_bytes: int = MAX_ARCHIVE_BYTES,
) -> LoadedPatch:
    """The patch whose file is `data`. Checks and errors as in `load_patch`."""
    if len(data) > max_archive_bytes:
        raise PatchLoadError("BP106", f"{len(data)} bytes; at most {max_archive_bytes} are allowed")
    members = archive.read_directory(data)
    required = {MANIFEST, VECTORS, CHECKSUMS} if verify_checksums else {MANIFEST, VECTORS}
    if missing := required - members.keys():
        raise PatchLoadError("BP105", f"{', '.join(sorted(missing))} is missing")

    # The small members first: the manifest says how large the vectors can be.
    contents = {MANIFEST: archive.read_member(data, members[MANIFEST], MAX_MANIFEST_BYTES)}
    if README in members:
        contents[README] = archive.read_member(data, members[README], MAX_README_BYTES)
    digests: dict[str, str] = {}
    if verify_checksums:
        digests = _digests(archive.read_member(data, members[CHECKSUMS], MAX_CHECKSUMS_BYTES), members)
        _verify(contents, digests)
    manifest = _manifest(contents[MANIFEST])
    readme = _readme(contents.get(README, b""))

    limit = max_tensor_file_bytes(manifest.base_model.hidden_size, len(manifest.vector_keys))
    blob = archive.read_member(data, members[VECTORS], min(limit, max_archive_bytes))
    if verify_checksums:
        _verify({VECTORS: blob}, digests)
    vectors, _ = tensors.load(blob)
    _check_vectors(manifest, vectors)
    return LoadedPatch(manifest, vectors, readme, source, len(data))


def patch_bytes(
    manifest: Manifest, vectors: Mapping[str, Tensor | Iterable[float]], *, readme: str | None = None
) -> bytes:
    """The file of a patch. Equal arguments give equal bytes; a loaded patch gives those it was read from,
    when they were written here.

    `vectors`: name -> Tensor, or numbers or a one-dimensional array, which are stored as F32. Raises
    PatchFormatError for whatever a reader would refuse.
    """
    manifest.validate()
    packed = {key: _as_tensor(key, value) for key, value in vectors.items()}
    members = {MANIFEST: manifest.to_json().encode("ascii"), VECTORS: tensors.dump(packed)}
    if readme:
        try:
            members[README] = readme.encode("utf-8")
        except UnicodeEncodeError:
            raise PatchFormatError("BP120", "the README holds a lone surrogate") from None
    checksums = {name: hashlib.sha256(content).hexdigest() for name, content in members.items()}
    members[CHECKSUMS] = strict_json.canonical(checksums).encode("ascii")
    data = archive.write_archive(members)
    # What is written can be read: by asking the reader, rather than by a second set of rules.
    load_patch_bytes(data)
    return data


def save_patch(
    manifest: Manifest,
    vectors: Mapping[str, Tensor | Iterable[float]],
    path: str | os.PathLike[str],
    *,
    readme: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a patch and return where: `path` with its suffix replaced by `.brainpatch`.

    Parent folders are made; the file is there whole or not at all. Raises what `patch_bytes` raises,
    PatchExistsError (a FileExistsError) BP121 and PatchWriteError (an OSError) BP122.
    """
    target = free_target(path, overwrite=overwrite)
    write_atomically(target, patch_bytes(manifest, vectors, readme=readme), overwrite=overwrite)
    return target


def free_target(path: str | os.PathLike[str], *, overwrite: bool, suffix: str = SUFFIX) -> Path:
    """Where `save_patch` would write, for those who would know before they work. Errors BP121 and BP122.

    `suffix`: that of a file of another form.
    """
    target = Path(path)
    if not target.name:
        raise PatchWriteError("BP122", f"{visible(str(target))} does not name a file")
    target = target.with_suffix(suffix)
    if not overwrite and os.path.lexists(target):
        raise PatchExistsError("BP121", f"{visible(str(target))} is there already")
    return target


def patch_size_report(loaded: LoadedPatch) -> dict[str, Any]:
    """Sizes of a patch: archive_bytes, archive_kb (of 1024 bytes), num_vectors, vector_payload_bytes,
    hidden_size, dtype (of the first vector)."""
    return {
        "archive_bytes": loaded.archive_bytes,
        "archive_kb": round(loaded.archive_bytes / 1024, 2),
        "num_vectors": len(loaded.vectors),
        "vector_payload_bytes": sum(tensor.nbytes for tensor in loaded.vectors.values()),
        "hidden_size": loaded.manifest.base_model.hidden_size,
        "dtype": _first_dtype(loaded),
    }


def _first_dtype(patch: LoadedPatch) -> str | None:
    return next((tensor.dtype for tensor in patch.vectors.values()), None)


def read_patch_file(path: str | os.PathLike[str], max_archive_bytes: int = MAX_ARCHIVE_BYTES) -> bytes:
    """The bytes of a regular file of at most `max_archive_bytes`; not looked at.

    Raises PatchLoadError BP101 when it cannot be read, or is a folder, a FIFO or a device, and BP106 when it
    is too large, before it is read.
    """
    with _regular_file(path) as (file, size):
        if size > max_archive_bytes:
            raise PatchLoadError(
                "BP106",
                f"{visible(os.fsdecode(path))} has {size} bytes; at most {max_archive_bytes} are allowed",
            )
        # One more, so that a file that grows meanwhile is not taken for whole.
        return file.read(size + 1)


def read_head(path: str | os.PathLike[str], count: int) -> bytes:
    """The first `count` bytes of a regular file of any size. PatchLoadError BP101 as `read_patch_file`."""
    with _regular_file(path) as (file, _):
        return file.read(count)


@contextlib.contextmanager
def _regular_file(path: str | os.PathLike[str]) -> Iterator[tuple[BinaryIO, int]]:
    """The file, open, and its size."""
    shown = visible(os.fsdecode(path))
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise PatchLoadError("BP101", f"{shown} is not a regular file")
            yield file, status.st_size
    except OSError as error:
        raise PatchLoadError("BP101", f"{shown}: {error.strerror}") from None
    except ValueError as error:
        if isinstance(error, PatchLoadError):
            raise
        raise PatchLoadError("BP101", f"{shown}: {error}") from None  # a NUL in the path


def _open_without_waiting(path: str, flags: int) -> int:
    # A FIFO would wait for its writer.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _digests(content: bytes, members: Mapping[str, archive.Member]) -> dict[str, str]:
    digests = strict_json.parse(content, CHECKSUMS)
    wanted = members.keys() - {CHECKSUMS}
    if not isinstance(digests, dict) or digests.keys() != wanted:
        raise PatchLoadError("BP108", f"{CHECKSUMS} does not list exactly {', '.join(sorted(wanted))}")
    return digests


def _verify(contents: Mapping[str, bytes], digests: Mapping[str, str]) -> None:
    for name, content in contents.items():
        if hashlib.sha256(content).hexdigest() != digests[name]:
            raise PatchLoadError("BP108", f"{name} does not have the SHA-256 that {CHECKSUMS} lists")


def _manifest(content: bytes) -> Manifest:
    data = strict_json.parse(content, MANIFEST)
    # `Manifest.from_dict` has a default for it, but a file says which format it is in.
    if isinstance(data, dict) and "format_version" not in data:
        raise PatchFormatError("BP112", "format_version is missing")
    return Manifest.from_dict(data)


def _readme(content: bytes) -> str | None:
    try:
        return content.decode("utf-8") or None
    except UnicodeDecodeError as error:
        raise PatchLoadError("BP120", f"{README}: byte {error.start} is not UTF-8") from None


def check_patch(patch: LoadedPatch) -> None:
    """Check a patch that may have been made in memory by the rules of one that was read.

    Raises PatchFormatError (BP110 to BP115) for the manifest, BP117 and BP119 for the vectors.
    """
    patch.manifest.validate()
    for key, tensor in patch.vectors.items():
        if not isinstance(tensor, Tensor):
            raise PatchFormatError(
                "BP117", f'"{visible(str(key), 80)}" is {type(tensor).__name__}, not a Tensor'
            )
    _check_shapes(patch.manifest, patch.vectors)


def _check_vectors(manifest: Manifest, vectors: Mapping[str, Tensor]) -> None:
    _check_shapes(manifest, vectors)
    spare = sorted(vectors.keys() - set(manifest.vector_keys))
    if len(spare) > MAX_SPARE_TENSORS:
        raise PatchLoadError(
            "BP106", f"{len(spare)} vectors are not used; at most {MAX_SPARE_TENSORS} may be"
        )
    if spare:
        warnings.warn(
            f"vectors that no intervention uses: {visible(', '.join(spare))}", PatchWarning, stacklevel=3
        )


def _check_shapes(manifest: Manifest, vectors: Mapping[str, Tensor]) -> None:
    hidden_size = manifest.base_model.hidden_size
    for key, tensor in vectors.items():
        if tensor.shape != (hidden_size,):
            raise PatchLoadError(
                "BP117",
                f'"{visible(key, 80)}" has shape {list(tensor.shape)}, and hidden_size is {hidden_size}',
            )
    for key in manifest.vector_keys:
        if key not in vectors:
            raise PatchLoadError(
                "BP119", f'there is no vector "{visible(key, 80)}", which an intervention names'
            )


def _as_tensor(key: Any, value: Tensor | Iterable[float]) -> Tensor:
    if not isinstance(key, str):
        raise PatchFormatError("BP116", f"a vector's name is a text, not {visible(repr(key), 40)}")
    if isinstance(value, Tensor):
        return value
    try:
        return tensors.vector(value)
    except PatchFormatError as error:
        raise PatchFormatError(error.code, f'"{visible(key, 80)}": {error.reason}') from None
