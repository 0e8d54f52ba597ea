"""Fetching one patch file from a Hugging Face hub, with everything that the hub says taken as untrusted."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from brainpatch.errors import (
    BrainPatchError,
    PatchFormatError,
    PatchLoadError,
    PatchWriteError,
    RegistryError,
)
from brainpatch.patch.atomic import write_atomically
from brainpatch.patch.file import SUFFIX, LoadedPatch, load_patch_bytes, read_patch_file
from brainpatch.patch.limits import MAX_ARCHIVE_BYTES
from brainpatch.patch.text import visible

_REFERENCE: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_.-]+)(?::([\w./-]+))?")
_COMMIT: Final = re.compile("[0-9a-f]{40,64}")
_MAX_LISTED: Final = 20
_INFO_TIMEOUT: Final = 10.0
"""Seconds to wait for each part of the answer about a repository."""
_FILE_TIMEOUT: Final = 30.0
"""Seconds to wait for each part of a file."""


@dataclass(frozen=True)
class HubFile:
    """A checked patch from a hub: where it lies there, its bytes, and what they hold."""

    repo: str
    file: str
    commit: str
    data: bytes
    patch: LoadedPatch


@dataclass(frozen=True)
class _Listing:
    """The patches of a repository at a commit: their paths, and their sizes in bytes where they are known."""

    commit: str
    sizes: dict[str, int | None]


def is_hub_reference(ref: str) -> bool:
    """Whether `ref` has the form `owner/repo[:file]`.

    `folder/x.brainpatch` does not count: it is a path, and if mistyped it must not become a download.
    """
    match = _REFERENCE.fullmatch(ref)
    return match is not None and not (match[2] is None and ref.endswith(SUFFIX))


def fetch(
    ref: str,
    cache_dir: Path,
    *,
    filename: str | None = None,
    revision: str | None = None,
    offline: bool = False,
) -> HubFile:
    """Download and check the patch that `ref` names, or take it from `cache_dir`.

    Only that file is fetched. Arguments and errors as in `PatchRegistry.install_from_hub`.
    """
    repo, file = _parse(ref, filename)
    cache = _Cache(cache_dir, repo)
    hub = None if offline else _connect(repo)
    listing = (hub or cache).listing(revision)
    file = _choose(listing, repo, file)
    # Also when the hub chose it: a path that climbs would be another file's address.
    _check_inside(file)
    size = listing.sizes[file]
    if size is not None and size > MAX_ARCHIVE_BYTES:
        raise PatchLoadError(
            "BP106", f"{visible(file)} has {size} bytes; at most {MAX_ARCHIVE_BYTES} are allowed"
        )
    source = f"{repo}:{file}"
    if cached := cache.patch(listing.commit, file, source):
        data, patch = cached
    elif hub is None:
        raise RegistryError("BP306", f"{visible(source)} is not in the cache, or is damaged there")
    else:
        data = hub.file(listing.commit, file, size)
        patch = load_patch_bytes(data, source=source)
    if hub is not None:
        cache.keep(revision, listing, file, data)
    return HubFile(repo, file, listing.commit, data, patch)


def _parse(ref: str, filename: str | None) -> tuple[str, str | None]:
    match = _REFERENCE.fullmatch(ref)
    if match is None:
        raise RegistryError("BP303", f"{visible(ref)} is not owner/repo[:file]")
    repo, file = match.groups()
    if filename is not None and file is not None and file != filename:
        raise RegistryError("BP303", f"two files are named: {visible(file)} and {visible(filename)}")
    file = filename if file is None else file
    if file is not None:
        _check_inside(file)
    return repo, file


def _check_inside(file: str) -> None:
    if "\\" in file or "\0" in file or any(part in ("", ".", "..") for part in file.split("/")):
        raise RegistryError("BP303", f"{visible(file)} is not a path inside a repository")


def _choose(listing: _Listing, repo: str, file: str | None) -> str:
    there = sorted(listing.sizes)
    if file in listing.sizes:
        return file
    if file is None and len(there) == 1:
        return there[0]
    shown = ", ".join(visible(name, 120) for name in there[:_MAX_LISTED]) or "none"
    more = f" and {len(there) - _MAX_LISTED} more" if len(there) > _MAX_LISTED else ""
    wanted = "not exactly one patch" if file is None else f"no patch {visible(file)}"
    raise RegistryError("BP305", f"{repo} holds {wanted}; there: {shown}{more}")


def _size(size: Any) -> int | None:
    return None if size is None else int(size)


class _Cache:
    """Answers of the hub for one repository, as flat files: names made by digests cannot leave the folder."""

    def __init__(self, folder: Path, repo: str) -> None:
        self.folder = folder
        self.repo = repo

    def listing(self, revision: str | None) -> _Listing:
        """What the hub last said about `revision`; RegistryError BP306 when it was never asked."""
        try:
            answer = json.loads(read_patch_file(self._listing_path(revision)))
            sizes = {str(path): _size(size) for path, size in answer["sizes"].items()}
            listing = _Listing(str(answer["commit"]), sizes)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
            at = "" if revision is None else f" at {visible(revision)}"
            raise RegistryError("BP306", f"{self.repo}{at} is not in the cache") from None
        return listing

    def patch(self, commit: str, file: str, source: str) -> tuple[bytes, LoadedPatch] | None:
        """A file's bytes and what they hold, when they are here and whole.

        Only checked files are kept, so one that is refused was damaged here: as good as absent.
        """
        try:
            data = read_patch_file(self._file_path(commit, file))
            return data, load_patch_bytes(data, source=source)
        except PatchFormatError:
            return None

    def keep(self, revision: str | None, listing: _Listing, file: str, data: bytes) -> None:
        """Store what the hub said. A cache that cannot be written (no space) does not stop an install."""
        answer = json.dumps({"commit": listing.commit, "sizes": listing.sizes}).encode("ascii")
        with contextlib.suppress(PatchWriteError):
            write_atomically(self._file_path(listing.commit, file), data, overwrite=True)
            # The commit is what source.json records, so it can be asked for again as well.
            for asked in {revision, listing.commit}:
                write_atomically(self._listing_path(asked), answer, overwrite=True)

    def _listing_path(self, revision: str | None) -> Path:
        return self.folder / f"{self._digest(revision)}.json"

    def _file_path(self, commit: str, file: str) -> Path:
        return self.folder / f"{self._digest(commit, file)}{SUFFIX}"

    def _digest(self, *parts: str | None) -> str:
        return hashlib.sha256(json.dumps([self.repo, *parts]).encode("ascii")).hexdigest()


def _connect(repo: str) -> _Hub | None:
    """The repository at the hub, or None when huggingface_hub is told to stay offline (HF_HUB_OFFLINE)."""
    try:
        # Here and not above: it is an extra, and slow to import.
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise RegistryError("BP304", f"huggingface_hub: {error}") from None
    return None if huggingface_hub.constants.HF_HUB_OFFLINE else _Hub(repo, huggingface_hub)


class _Hub:
    """One repository of the hub that huggingface_hub is set up for (HF_ENDPOINT, its token, proxies)."""

    def __init__(self, repo: str, client: Any) -> None:
        self.repo = repo
        self._client = client

    def listing(self, revision: str | None) -> _Listing:
        """The patches at `revision`, and the commit that it stands for now."""
        with self._errors(self.repo if revision is None else f"{self.repo} at {visible(revision)}"):
            info = self._client.HfApi().model_info(
                self.repo, revision=revision, files_metadata=True, timeout=_INFO_TIMEOUT
            )
            sizes = {
                str(entry.rfilename): _size(entry.size)
                for entry in info.siblings or ()
                if str(entry.rfilename).endswith(SUFFIX)
            }
        if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
            raise RegistryError("BP305", f"the hub names no commit for {self.repo}", _REMEDIES[None])
        if revision is not None and _COMMIT.fullmatch(revision) and info.sha != revision:
            raise RegistryError(
                "BP305", f"the hub answered with another commit of {self.repo}: {info.sha}", _REMEDIES[None]
            )
        return _Listing(info.sha, sizes)

    def file(self, commit: str, file: str, size: int | None) -> bytes:
        """Download a file, and stop as soon as it is larger than `size`."""
        limit = MAX_ARCHIVE_BYTES if size is None else size
        data = bytearray()
        client = self._client
        with self._errors(f"{self.repo}:{visible(file)}"):
            url = client.hf_hub_url(self.repo, file, revision=commit, endpoint=client.HfApi().endpoint)
            headers = {**client.utils.build_hf_headers(), "accept-encoding": "identity"}
            session = client.get_session()
            with session.stream("GET", url, headers=headers, timeout=_FILE_TIMEOUT) as response:
                client.hf_raise_for_status(response)
                # Raw: a compressed answer would not be of the size that was announced.
                for chunk in response.iter_raw(1 << 16):
                    data += chunk
                    if len(data) > limit:
                        raise PatchLoadError(
                            "BP106", f"the hub sends more than the {limit} bytes of {visible(file)}"
                        )
        if size is not None and len(data) != size:
            raise RegistryError("BP305", f"the hub sent {len(data)} of the {size} bytes of {visible(file)}")
        return bytes(data)

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except BrainPatchError:
            raise
        except self._client.errors.HFValidationError:
            raise RegistryError("BP303", f"{what}: the hub does not allow this name") from None
        except Exception as error:
            # Anything: the client has no common base, and a hub's answer may be of any form. Its texts are
            # not repeated, because they can hold signed addresses and the token.
            status = getattr(getattr(error, "response", None), "status_code", None)
            said = f"the hub answered {status}" if status else f"no usable answer ({type(error).__name__})"
            raise RegistryError("BP305", f"{what}: {said}", _REMEDIES.get(status)) from None


_REMEDIES: Final = {
    None: "Check the connection, and HF_ENDPOINT if it is set.",
    401: "Check the name. A private or gated repository needs a token that may read it (`hf auth login`).",
    403: "A private or gated repository needs a token that may read it (`hf auth login`).",
    404: "Check the name, the revision and the file.",
}
