"""Installed patches: a folder of plain files, found by name."""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from brainpatch.errors import (
    PatchExistsError,
    PatchFormatError,
    PatchLoadError,
    PatchWriteError,
    RegistryError,
)
from brainpatch.patch import hub
from brainpatch.patch.atomic import write_atomically
from brainpatch.patch.file import SUFFIX, LoadedPatch, load_patch, load_patch_bytes, read_patch_file
from brainpatch.patch.limits import MAX_MANIFEST_BYTES
from brainpatch.patch.names import check_patch_name
from brainpatch.patch.text import visible

_SOURCE_SUFFIX: Final = ".source.json"


def registry_home() -> Path:
    """The registry's folder: `BRAINPATCH_HOME`, or `~/.brainpatch` when that is unset or empty."""
    return _home(os.environ.get("BRAINPATCH_HOME") or "~/.brainpatch")


def default_registry() -> PatchRegistry:
    """The registry at `registry_home()`."""
    return PatchRegistry()


@dataclass
class InstalledPatch:
    """A patch of the registry. `source` says where it came from; it is empty when that is not known."""

    name: str
    path: Path
    source: dict[str, Any] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Size of the file; RegistryError BP302 when it was uninstalled meanwhile."""
        try:
            return self.path.stat().st_size
        except OSError:
            raise RegistryError("BP302", f"{self.name} is not installed any more") from None

    def load(self) -> LoadedPatch:
        """Read and check the file. Errors as in `load_patch`."""
        return load_patch(self.path)


class PatchRegistry:
    """Installs, finds and removes patches below `home` (default: `registry_home()`).

    There is no index: what lies in `patches_dir` is what is installed. Threads and processes may share a
    registry; a process that is killed leaves each patch whole or absent.
    """

    def __init__(self, home: str | os.PathLike[str] | None = None) -> None:
        self.home = registry_home() if home is None else _home(home)
        self.patches_dir = self.home / "patches"
        self.cache_dir = self.home / "cache"
        self.config_path = self.home / "config.json"

    def ensure_dirs(self) -> None:
        """Make the folders. RegistryError BP307 when that fails."""
        with _registry_errors():
            self.patches_dir.mkdir(parents=True, exist_ok=True)
            self.cache_dir.mkdir(parents=True, exist_ok=True)

    def path_for(self, name: str) -> Path:
        """Where the patch of that name lies or would lie. PatchFormatError BP113 for an illegal name."""
        return self.patches_dir / (check_patch_name(name) + SUFFIX)

    def list_patches(self) -> list[InstalledPatch]:
        """What is installed, sorted by name. Files are not opened, so a damaged one is listed as well.

        RegistryError BP307 when the folder is there and cannot be read.
        """
        with _registry_errors():
            try:
                files = [path.name for path in self.patches_dir.iterdir()]
            except FileNotFoundError:
                return []
        names = sorted(file.removesuffix(SUFFIX) for file in files if file.endswith(SUFFIX))
        return [self._installed(name) for name in names if self.is_installed(name)]

    def is_installed(self, name: str) -> bool:
        """Whether a patch of that name is there: a regular file, not a link to one."""
        try:
            return _is_regular(self.path_for(name))
        except PatchFormatError:
            return False

    def get(self, name: str) -> InstalledPatch:
        """The installed patch of that name; RegistryError BP302 when there is none."""
        if not self.is_installed(name):
            raise self._unknown(name)
        return self._installed(name)

    def resolve(self, ref: str | os.PathLike[str]) -> Path:
        """The file of an installed name, else of a path. What is in it is not looked at.

        RegistryError BP302 when there is neither.
        """
        text = os.fsdecode(ref)
        if self.is_installed(text):
            return self.path_for(text)
        if _is_path(text):
            return Path(text)
        raise self._unknown(text)

    def find(self, ref: str) -> Path | None:
        """As `resolve`; None when `ref` is a hub's name for a patch and neither a patch nor a path has it."""
        try:
            return self.resolve(ref)
        except RegistryError as error:
            if error.code != "BP302" or not hub.is_hub_reference(ref):
                raise
            return None

    def install_file(
        self,
        path: str | os.PathLike[str],
        *,
        name: str | None = None,
        overwrite: bool = False,
        source: Mapping[str, Any] | None = None,
    ) -> InstalledPatch:
        """Check a patch file and store a copy under `name` (default: the patch's own).

        `source`: entries to add to what is recorded about its origin. Errors: those of `load_patch`;
        RegistryError BP301 when the name is taken and `overwrite` is false, BP307 when it cannot be stored.
        """
        if name is not None:
            check_patch_name(name)
        origin = os.fsdecode(path)
        # Read once: what is stored is what was checked, whatever happens to the file meanwhile.
        data = read_patch_file(path)
        patch = load_patch_bytes(data, source=origin)
        record = {"origin": origin, "kind": "file", **(source or {})}
        return self._store(data, patch, name or patch.name, record, overwrite)

    def install_from_hub(
        self,
        ref: str,
        *,
        filename: str | None = None,
        revision: str | None = None,
        overwrite: bool = False,
        offline: bool = False,
    ) -> InstalledPatch:
        """Download one patch of a hub repository, check it and store it under its own name.

        `ref`: `owner/repo` or `owner/repo:file`; `filename` names the file instead. Without a file the
        repository must hold exactly one patch. `revision`: branch, tag or commit (default: the repository's
        default branch); the commit it stands for is recorded. `offline`: answer from the cache only.

        Errors: RegistryError BP303 to BP306, BP301 and BP307; those of `load_patch` for the file.
        """
        self.ensure_dirs()
        found = hub.fetch(ref, self.cache_dir, filename=filename, revision=revision, offline=offline)
        record = {
            "origin": ref,
            "kind": "huggingface",
            "repo": found.repo,
            "file": found.file,
            "revision": found.commit,
        }
        return self._store(found.data, found.patch, found.patch.name, record, overwrite)

    def install(
        self, ref: str | os.PathLike[str], *, overwrite: bool = False, offline: bool = False
    ) -> InstalledPatch:
        """Install a file, or else what a hub reference names. An existing file wins.

        Errors: those of `install_file` and `install_from_hub`; RegistryError BP303 when `ref` is neither.
        """
        if _is_path(os.fsdecode(ref)):
            return self.install_file(ref, overwrite=overwrite)
        if isinstance(ref, str) and hub.is_hub_reference(ref):
            return self.install_from_hub(ref, overwrite=overwrite, offline=offline)
        raise RegistryError(
            "BP303", f"{visible(os.fsdecode(ref))} is neither a file that exists nor owner/repo[:file]"
        )

    def uninstall(self, name: str) -> None:
        """Remove a patch. RegistryError BP302 when it is not installed, BP307 when it cannot be removed."""
        path = self.path_for(name)
        if not os.path.lexists(path):
            raise self._unknown(name)
        with self._alone():
            # The record goes first, so that it never stands beside another patch of this name.
            self._source_path(name).unlink(missing_ok=True)
            try:
                path.unlink()
            except FileNotFoundError:
                raise self._unknown(name) from None

    def clear_cache(self) -> int:
        """Delete all downloads; returns how many bytes that freed. Installed patches stay."""
        freed = 0
        with _registry_errors():
            for folder, folders, files in os.walk(self.cache_dir, topdown=False):
                for entry in (Path(folder, name) for name in (*files, *folders)):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.lstat()
                        if stat.S_ISDIR(status.st_mode):
                            entry.rmdir()
                            continue
                        entry.unlink()
                        freed += status.st_size if stat.S_ISREG(status.st_mode) else 0
        return freed

    def _store(
        self, data: bytes, patch: LoadedPatch, name: str, record: Mapping[str, Any], overwrite: bool
    ) -> InstalledPatch:
        path = self.path_for(name)
        manifest = patch.manifest
        source = {
            "installed_at": datetime.now(timezone.utc).isoformat(),
            "format_version": manifest.format_version,
            "base_model": manifest.base_model.model_id,
            "evidence_level": manifest.evidence_level,
            **record,
        }
        text = json.dumps(source, indent=2, sort_keys=True) + "\n"
        with self._alone():
            if not overwrite and os.path.lexists(path):
                raise _taken(name)
            # Killed between these steps, a patch has no record; it never has the record of another.
            self._source_path(name).unlink(missing_ok=True)
            try:
                write_atomically(path, data, overwrite=overwrite)
            except PatchExistsError:
                # Only by a program that does not take the lock.
                raise _taken(name) from None
            write_atomically(self._source_path(name), text.encode("ascii"), overwrite=True)
        return InstalledPatch(name, path, source)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the registry's lock, and turn the system's errors into BP307.

        The system frees the lock when its holder dies.
        """
        self.ensure_dirs()
        with _registry_errors(), (self.home / ".lock").open("ab") as lock:
            _lock(lock.fileno())
            self._sweep()
            yield

    def _sweep(self) -> None:
        # Nobody else is writing, so a temporary file belongs to a process that was killed.
        for leftover in self.patches_dir.glob(".brainpatch-*.tmp"):
            leftover.unlink(missing_ok=True)

    def _source_path(self, name: str) -> Path:
        return self.patches_dir / (name + _SOURCE_SUFFIX)

    def _installed(self, name: str) -> InstalledPatch:
        return InstalledPatch(name, self.path_for(name), self._source(name))

    def _source(self, name: str) -> dict[str, Any]:
        path = self._source_path(name)
        if not _is_regular(path):
            return {}
        try:
            source = json.loads(read_patch_file(path, MAX_MANIFEST_BYTES))
        except (PatchLoadError, ValueError, RecursionError):
            return {}
        return source if isinstance(source, dict) else {}

    def _unknown(self, ref: str) -> RegistryError:
        names = [patch.name for patch in self.list_patches()]
        near = difflib.get_close_matches(ref[:200], names)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        return RegistryError("BP302", f"there is no {visible(ref)}{hint}")


def _home(path: str | os.PathLike[str]) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise RegistryError("BP307", f"{visible(os.fsdecode(path))}: {error}") from None


def _lock(descriptor: int) -> None:
    """Wait until this process alone holds the lock on the file; closing it frees it."""
    if sys.platform == "win32":
        import msvcrt

        # Gives up after ten seconds with an OSError; the lock is never held for as long.
        msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _taken(name: str) -> RegistryError:
    return RegistryError("BP301", f"{name} is installed")


def _is_regular(path: Path) -> bool:
    # A link could lead out of the registry, so it is not followed.
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _is_path(ref: str) -> bool:
    """Whether something other than a folder is at that path.

    One that cannot be looked at counts as there: it is refused when it is read, not sought elsewhere.
    """
    try:
        return not stat.S_ISDIR(Path(ref).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG


@contextlib.contextmanager
def _registry_errors() -> Iterator[None]:
    try:
        yield
    except PatchWriteError as error:
        raise RegistryError("BP307", error.reason) from None
    except OSError as error:
        where = visible(os.fsdecode(error.filename)) + ": " if error.filename else ""
        raise RegistryError("BP307", f"{where}{error.strerror}") from None
