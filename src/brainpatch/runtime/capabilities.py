"""What an engine can do, as data that a person and a program can ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from brainpatch.errors import CapabilityError

CAPABILITY_FLAGS: tuple[str, ...] = (
    "static_intervention",
    "dynamic_schedule",
    "multiple_patches",
    "streaming",
    "cpu",
    "cuda",
    "mps",
    "apple_silicon",
    "server",
    "concurrent_requests",
    "quantization",
    "per_request_strength",
)
"""The flags of the published API, in its order."""

ALL_FLAGS: tuple[str, ...] = (*CAPABILITY_FLAGS, "sites", "trace")


@dataclass(frozen=True)
class Capabilities:
    """What one engine can do. `notes` says in words what a flag cannot."""

    name: str
    static_intervention: bool = False
    dynamic_schedule: bool = False
    multiple_patches: bool = False
    streaming: bool = False
    cpu: bool = False
    cuda: bool = False
    mps: bool = False
    apple_silicon: bool = False
    server: bool = False
    concurrent_requests: bool = False
    per_request_strength: bool = False
    quantization: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    sites: bool = False
    trace: bool = False

    def supports(self, flag: str) -> bool:
        """Whether the engine has `flag` (one of ALL_FLAGS; another name is a ValueError)."""
        if flag not in ALL_FLAGS:
            raise ValueError(f"unknown capability {flag!r}; known: {', '.join(ALL_FLAGS)}")
        return bool(getattr(self, flag))

    def require(self, flag: str) -> None:
        """Raise CapabilityError (BP502) unless the engine has `flag`."""
        if not self.supports(flag):
            note = self.notes.get(flag)
            raise CapabilityError(
                "BP502", f"{self.name} does not offer {flag}" + (f": {note}" if note else "")
            )

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self)

    def matrix_row(self) -> dict[str, bool]:
        """One row of the capability matrix: flag -> offered."""
        return {flag: self.supports(flag) for flag in ALL_FLAGS}
