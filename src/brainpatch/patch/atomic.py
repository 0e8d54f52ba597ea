"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path

from brainpatch.errors import PatchExistsError, PatchWriteError
from brainpatch.patch.text import visible

_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def write_atomically(path: Path, data: bytes, *, overwrite: bool) -> None:
    """Write `data` to `path`, making parent folders. Readers and crashes see the old file or the new one.

    Raises PatchExistsError BP121 when `path` is there and `overwrite` is false (also when another process
    was faster), PatchWriteError BP122 when it cannot be stored. Nothing is left behind then.
    """
    if not overwrite and os.path.lexists(path):
        raise _exists(path)
    # A short name, so that a long name of the target does not become too long.
    temporary = path.parent / f".brainpatch-{secrets.token_hex(8)}.tmp"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise _not_written(path, error) from None
    try:
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if overwrite:
                temporary.replace(path)
            else:
                _move_if_absent(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
    except FileExistsError:
        raise _exists(path) from None
    except (OSError, ValueError) as error:
        raise _not_written(path, error) from None
    _sync_folder(path.parent)


def _move_if_absent(temporary: Path, path: Path) -> None:
    # A hard link fails when the name is taken; a rename would replace it.
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        # No hard links on this file system (FAT): look, then rename, with a short moment between.
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "exists", str(path)) from None
        temporary.rename(path)


def _sync_folder(folder: Path) -> None:
    # Makes the new name itself durable. Windows and some file systems cannot; the file is whole anyway.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _exists(path: Path) -> PatchExistsError:
    return PatchExistsError("BP121", f"{visible(str(path))} is there already")


def _not_written(path: Path, error: Exception) -> PatchWriteError:
    # ValueError: a NUL in the path.
    reason = error.strerror if isinstance(error, OSError) else error
    return PatchWriteError("BP122", f"{visible(str(path))}: {reason}")
