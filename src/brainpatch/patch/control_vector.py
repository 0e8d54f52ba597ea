"""A patch as a control vector of llama.cpp, as far as one can say it. docs/formats.md gives the layout."""

from __future__ import annotations

import os
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from brainpatch.errors import CompileError, PatchWriteError
from brainpatch.patch.atomic import write_atomically
from brainpatch.patch.file import LoadedPatch, check_patch, free_target, load_patch
from brainpatch.patch.identity import meaning_digest
from brainpatch.patch.limits import MAX_ARCHIVE_BYTES
from brainpatch.patch.manifest import Manifest
from brainpatch.patch.strength import EPSILON, finite_strength

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SUFFIX: Final = ".gguf"

_HINTS: Final = (
    ("qwen", "qwen2"),
    ("llama", "llama"),
    ("mistral", "llama"),
    ("gemma", "gemma"),
    ("phi", "phi2"),
)
"""What a manifest's architecture holds -> the model hint of the published export."""

_MAX_LISTED: Final = 20


@dataclass(frozen=True)
class ControlVector:
    """What llama.cpp adds at scale 1. `directions`: block (from 1 on) -> float32 [hidden_size], ascending.

    `strength` is the patch's strength that is in them, clamped to its bound.
    """

    patch: LoadedPatch
    strength: float
    directions: dict[int, NDArray[np.float32]]

    def to_gguf(self) -> bytes:
        """The file's bytes. Equal patches at equal strengths give equal ones.

        Raises CompileError BP605 without the gguf package, PatchWriteError BP122 when there is no room for
        a temporary file.
        """
        try:
            # Here and not above: it is an extra, and slow to import.
            import gguf
        except ImportError as error:
            raise CompileError("BP605", f"gguf: {error}") from None
        try:
            # The package writes to files only.
            with tempfile.TemporaryDirectory(prefix="brainpatch-") as folder:
                path = Path(folder) / "vector.gguf"
                writer = gguf.GGUFWriter(path, "controlvector")
                try:
                    self._fill(writer)
                finally:
                    writer.close()
                return path.read_bytes()
        except OSError as error:
            raise PatchWriteError("BP122", f"a temporary file: {error.strerror}") from None

    def save(self, output: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the file and return where: `output` with its suffix replaced by `.gguf`.

        Parent folders are made; the file is there whole or not at all. Raises what `to_gguf` raises,
        PatchExistsError BP121 and PatchWriteError BP122.
        """
        target = free_target(output, overwrite=overwrite, suffix=SUFFIX)
        write_atomically(target, self.to_gguf(), overwrite=overwrite)
        return target

    def _fill(self, writer: Any) -> None:
        manifest = self.patch.manifest
        writer.add_string("controlvector.model_hint", model_hint(manifest))
        writer.add_uint32("controlvector.layer_count", len(self.directions))
        # llama.cpp reads no key of the file. These tell a person where it came from.
        writer.add_name(manifest.name)
        writer.add_description(manifest.description)
        writer.add_author(", ".join(manifest.authors))
        writer.add_license(manifest.license)
        writer.add_string("brainpatch.name", manifest.name)
        writer.add_string("brainpatch.digest", meaning_digest(self.patch))
        writer.add_string("brainpatch.strength", repr(self.strength))
        writer.add_string("brainpatch.base_model", manifest.base_model.model_id)
        writer.add_string("brainpatch.evidence_level", manifest.evidence_level)
        for block, direction in self.directions.items():
            writer.add_tensor(f"direction.{block}", direction)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def control_vector(patch: LoadedPatch, strength: float = 1.0) -> ControlVector:
    """The patch at `strength` as one direction for each block that it edits, in float32 in file order.

    A strength beyond the patch's bound is clamped with a warning. Raises RequestError BP402 when it is not a
    finite number, CompileError BP604 when the patch does what a control vector cannot, whatever the strength,
    and what `check_patch` raises.
    """
    import numpy as np

    check_patch(patch)
    manifest = patch.manifest
    asked = finite_strength(strength, "strength")
    clamped = manifest.clamp_strength(asked)
    _check_expressible(manifest)
    if clamped != asked:
        warnings.warn(
            f"{manifest.name}: strength {asked:g} is beyond the patch's bound and was clamped to {clamped:g}",
            stacklevel=2,
        )
    multiplier = clamped * (1.0 if manifest.schedule is None else manifest.schedule.strength_at(0))
    vectors = {key: patch.vector_for(key).float32() for key in manifest.vector_keys}
    hidden_size = manifest.base_model.hidden_size
    directions = {block: np.zeros(hidden_size, dtype=np.float32) for block in manifest.layers}
    # As runtime.meaning.ResolvedSet sums: what is below EPSILON counts as nothing.
    with np.errstate(over="ignore", invalid="ignore"):
        for item in manifest.interventions:
            coefficient = multiplier * item.coefficient
            if abs(multiplier) >= EPSILON and abs(coefficient) >= EPSILON:
                directions[item.layer] += np.float32(coefficient) * vectors[item.vector]
    for block, direction in directions.items():
        if not np.isfinite(direction).all():
            raise CompileError(
                "BP604", f"the sum at block {block} is not finite in float32", "Lower the strength."
            )
    return ControlVector(patch, clamped, directions)


def export_llamacpp_control_vector(
    patch_path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    strength: float = 1.0,
    overwrite: bool = False,
) -> Path:
    """Write the patch file at `patch_path` as a control vector of llama.cpp and return where.

    That is `output` with its suffix replaced by `.gguf`. The edit after block L is `direction.L`, with
    `strength` in it: llama.cpp's scale multiplies it once more. Raises what `load_patch`, `control_vector` and
    `ControlVector.save` raise; nothing is written then.
    """
    return control_vector(load_patch(patch_path), strength).save(output, overwrite=overwrite)


def model_hint(manifest: Manifest) -> str:
    """What the file says of the model it is for. llama.cpp does not look at it."""
    architecture = manifest.base_model.architecture.lower()
    return next((hint for part, hint in _HINTS if part in architecture), "unknown")


def _check_expressible(manifest: Manifest) -> None:
    """Refuse what a control vector cannot say, all of it at once."""
    reasons = []
    if 0 in manifest.layers:
        # llama.cpp passes over `direction.0`: it would be a file that does nothing.
        reasons.append("it edits block 0")
    for site in ("prompt", "continuation"):
        blocks = sorted({item.layer for item in manifest.interventions if item.site == site})
        if blocks:
            listed = ", ".join(map(str, blocks[:_MAX_LISTED])) + (", ..." if blocks[_MAX_LISTED:] else "")
            reasons.append(f'it edits the site "{site}" alone, at block {listed}')
    if manifest.schedule is not None and not manifest.schedule.is_constant():
        reasons.append("its schedule changes with the generated token")
    size = 4 * manifest.base_model.hidden_size * len(manifest.layers)
    if size > MAX_ARCHIVE_BYTES:
        # A small file can name one long vector at thousands of blocks.
        reasons.append(f"it needs {size} bytes, and at most {MAX_ARCHIVE_BYTES} are written")
    if reasons:
        raise CompileError("BP604", f"{manifest.name}: {'; '.join(reasons)}")
