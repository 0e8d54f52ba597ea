"""The meaning of patches, and the contract that engines keep."""

from brainpatch.errors import BackendNotAvailable
from brainpatch.patch.schedule import StrengthSchedule
from brainpatch.runtime.backend import BrainPatchBackend
from brainpatch.runtime.capabilities import CAPABILITY_FLAGS, Capabilities
from brainpatch.runtime.config import GenerationConfig
from brainpatch.runtime.discovery import (
    BackendStatus,
    available_backends,
    backend_class,
    environment_report,
    select_backend,
)
from brainpatch.runtime.meaning import ActivePatch, ResolvedEdit, ResolvedSet
from brainpatch.runtime.model import BrainPatchedModel, PatchHandle
from brainpatch.runtime.requests import Generation, Request, TraceRow

__all__ = [
    "CAPABILITY_FLAGS",
    "ActivePatch",
    "BackendNotAvailable",
    "BackendStatus",
    "BrainPatchBackend",
    "BrainPatchedModel",
    "Capabilities",
    "Generation",
    "GenerationConfig",
    "PatchHandle",
    "Request",
    "ResolvedEdit",
    "ResolvedSet",
    "StrengthSchedule",
    "TraceRow",
    "available_backends",
    "backend_class",
    "environment_report",
    "select_backend",
]
