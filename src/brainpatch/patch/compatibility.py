"""Does a patch fit a model? Compared by geometry and by name, before anything is installed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from brainpatch.errors import PatchCompatibilityError
from brainpatch.patch.manifest import Manifest
from brainpatch.patch.text import visible

MODES = ("strict", "architecture", "unsafe")


@dataclass
class ModelDescriptor:
    """A model as an engine sees it. `revision` is None when the engine does not know it."""

    model_id: str
    hidden_size: int
    num_layers: int
    architecture: str = ""
    revision: str | None = None


@dataclass
class CompatibilityReport:
    """The answer: `errors` keep the patch out, `warnings` do not. Their texts are safe to print."""

    ok: bool
    mode: str
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def raise_if_failed(self) -> None:
        """Raise PatchCompatibilityError BP201, listing every error, unless `ok`."""
        if not self.ok:
            raise PatchCompatibilityError("BP201", "; ".join(self.errors))

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return asdict(self)


def check_compatibility(
    manifest: Manifest, model: ModelDescriptor, *, mode: str = "strict"
) -> CompatibilityReport:
    """Compare a patch with a model; every finding is listed, not only the first.

    - "unsafe": the hidden size is equal and every patched layer exists;
    - "architecture": also the number of blocks, and the architecture where both name one;
    - "strict": also the model id, and the revision where the patch pins one.

    Texts are compared exactly. PatchCompatibilityError (a ValueError) BP202 for another mode.
    """
    if mode not in MODES:
        raise PatchCompatibilityError("BP202", f"{visible(repr(mode), 40)} is not a mode")
    made_for = manifest.base_model
    errors: list[str] = []
    warnings: list[str] = []

    def compare(what: str, wanted: Any, found: Any, findings: list[str]) -> None:
        if wanted != found:
            findings.append(
                f"{what}: the patch is for {visible(str(wanted))}, the model has {visible(str(found))}"
            )

    compare("hidden_size", made_for.hidden_size, model.hidden_size, errors)
    errors += [
        f"layer {layer}: the model has {model.num_layers} blocks, counted from 0"
        for layer in manifest.layers
        if layer >= model.num_layers
    ]
    if mode != "unsafe":
        compare("num_layers", made_for.num_layers, model.num_layers, errors)
        if made_for.architecture and model.architecture:
            compare("architecture", made_for.architecture, model.architecture, errors)
    compare("model_id", made_for.model_id, model.model_id, errors if mode == "strict" else warnings)
    if mode == "strict" and made_for.revision:
        if model.revision is None:
            warnings.append(
                f"revision: the patch pins {visible(made_for.revision)}, the model's is not known"
            )
        else:
            compare("revision", made_for.revision, model.revision, errors)
    return CompatibilityReport(not errors, mode, errors, warnings)
