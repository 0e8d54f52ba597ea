"""The manifest: what a patch is for, and where its vectors are added.

The dataclasses here are the schema. Their annotations say each field's type and range; `from_dict` checks
data against them, `manifest_schema` exports them as JSON Schema, and what concerns several fields at once is
a small function below them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Final, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta

from brainpatch.errors import PatchFormatError
from brainpatch.patch import strict_json
from brainpatch.patch.limits import (
    ABSOLUTE_MAX_STRENGTH,
    MAX_ABS_COEFFICIENT,
    MAX_ABS_SCHEDULE_VALUE,
    MAX_HIDDEN_SIZE,
    MAX_INTERVENTIONS,
    MAX_KEYFRAMES,
    MAX_NUM_LAYERS,
)
from brainpatch.patch.names import NAME_PATTERN, check_patch_name
from brainpatch.patch.provenance import check_provenance
from brainpatch.patch.schedule import StrengthSchedule
from brainpatch.patch.text import visible

FORMAT_VERSION: Final = "1.0"
BACKEND_STATUSES: Final = ("verified", "experimental", "implemented", "unsupported")

Site = Literal["all", "prompt", "continuation"]
EvidenceLevel = Literal[
    "none",
    "correlational",
    "predictive",
    "interventional",
    "controlled_interventional",
    "replicated",
]
EVIDENCE_LEVELS: Final[tuple[EvidenceLevel, ...]] = get_args(EvidenceLevel)
"""Weakest first."""
_Text = Annotated[str, Meta(min_length=1)]
_Kind = TypeVar("_Kind")


class PatchWarning(UserWarning):
    """A patch is usable, but holds something that its author should know of."""


@dataclass
class Intervention:
    """One vector added after one decoder block.

    `layer`: 0-based decoder block. `vector`: a key of the vectors file. `coefficient`: the baked-in factor,
    at most 1024 in absolute value, with the unit of the vector's. `site`: the positions that it is added to.
    """

    layer: Annotated[int, Meta(ge=0, lt=MAX_NUM_LAYERS)]
    vector: _Text
    coefficient: Annotated[float, Meta(ge=-MAX_ABS_COEFFICIENT, le=MAX_ABS_COEFFICIENT)] = 1.0
    hook: Literal["residual_post"] = "residual_post"
    id: str | None = None
    site: Site = "all"

    def validate(self, *, num_layers: int | None = None) -> None:
        """Raise PatchFormatError BP110 for a wrong field, BP111 for a layer beyond `num_layers`."""
        _convert(self.to_dict(), Intervention, "intervention")
        if num_layers is not None and self.layer >= num_layers:
            raise _contradiction(f"an intervention is at layer {self.layer} of {num_layers}")

    def to_dict(self) -> dict[str, Any]:
        """The manifest's form: `site` is left out when "all", `id` when there is none."""
        data: dict[str, Any] = {
            "layer": self.layer,
            "vector": self.vector,
            "coefficient": _float(self.coefficient),
            "hook": self.hook,
        }
        if self.id:
            data["id"] = self.id
        if self.site != "all":
            data["site"] = self.site
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Intervention:
        """The intervention that `data` says; PatchFormatError BP110 when it is not one."""
        _refuse_unknown_keys(data, "intervention")
        return _convert(data, cls, "intervention")


@dataclass
class BaseModelSpec:
    """The model that a patch was made for. `hidden_size` and `num_layers` are needed in every file."""

    model_id: _Text
    architecture: str = ""
    hidden_size: Annotated[int, Meta(ge=1, le=MAX_HIDDEN_SIZE)] = 0
    num_layers: Annotated[int, Meta(ge=1, le=MAX_NUM_LAYERS)] = 0
    revision: str | None = None
    torch_dtype: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The manifest's form: all six keys."""
        return _fields_of(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BaseModelSpec:
        """The specification that `data` says, unknown keys left out with a warning; BP110 when wrong."""
        return _convert(_known(data, cls, "base_model"), cls, "base_model")


@dataclass
class Manifest:
    """Everything a patch says except its vectors. `docs/format.md` has the table of fields."""

    name: Annotated[str, Meta(pattern=NAME_PATTERN)]
    base_model: BaseModelSpec
    interventions: Annotated[list[Intervention], Meta(min_length=1, max_length=MAX_INTERVENTIONS)]
    description: str = ""
    format_version: Literal["1.0"] = FORMAT_VERSION
    evidence_level: EvidenceLevel = "none"
    evaluation: dict[str, Any] = field(default_factory=dict)
    compatibility: dict[str, dict[str, Any]] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    max_abs_strength: Annotated[float, Meta(gt=0.0, le=ABSOLUTE_MAX_STRENGTH)] = 8.0
    default_strength: Annotated[float, Meta(ge=-ABSOLUTE_MAX_STRENGTH, le=ABSOLUTE_MAX_STRENGTH)] = 1.0
    license: str = "Apache-2.0"
    authors: list[str] = field(default_factory=list)
    schedule: StrengthSchedule | None = None

    def __post_init__(self) -> None:
        # A mapping is as good as the object.
        given: Any = self.schedule
        if isinstance(given, Mapping):
            self.schedule = StrengthSchedule.from_dict(given)

    @property
    def layers(self) -> list[int]:
        """The distinct layers of the interventions, ascending."""
        return sorted({item.layer for item in self.interventions})

    @property
    def vector_keys(self) -> list[str]:
        """The distinct vector keys that the interventions name, sorted."""
        return sorted({item.vector for item in self.interventions})

    def backend_status(self, backend: str) -> str:
        """What the author claims for an engine: a status, or "unsupported" when it is not listed."""
        return str(self.compatibility.get(backend, {}).get("status", "unsupported"))

    def is_verified_on(self, backend: str) -> bool:
        """True when the author claims "verified" for the engine."""
        return self.backend_status(backend) == "verified"

    def clamp_strength(self, x: float) -> float:
        """`x` within plus and minus `max_abs_strength`."""
        return max(-self.max_abs_strength, min(self.max_abs_strength, x))

    def summary(self) -> str:
        """One line: name, evidence level, number and layers of interventions, model. Not escaped."""
        layers = ",".join(map(str, self.layers))
        return (
            f"{self.name} [{self.evidence_level}] {len(self.interventions)} intervention(s) "
            f"@ L{layers} -> {self.base_model.model_id}"
        )

    def validate(self) -> None:
        """Raise PatchFormatError unless a reader would accept this manifest.

        BP110 wrong field, BP111 fields that contradict each other, BP112 version, BP113 name, BP114
        schedule, BP115 provenance.
        """
        if not isinstance(self.base_model, BaseModelSpec):
            raise PatchFormatError("BP110", "base_model is not a BaseModelSpec")
        if not isinstance(self.interventions, list) or not all(
            isinstance(item, Intervention) for item in self.interventions
        ):
            raise PatchFormatError("BP110", "interventions is not a list of Intervention")
        if self.schedule is not None and not isinstance(self.schedule, StrengthSchedule):
            raise PatchFormatError("BP114", "schedule is not a StrengthSchedule")
        Manifest.from_dict(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """The manifest's form: all 14 keys, numbers that the format calls numbers as floats."""
        data = _fields_of(self)
        data["base_model"] = self.base_model.to_dict()
        data["interventions"] = [item.to_dict() for item in self.interventions]
        data["schedule"] = None if self.schedule is None else self.schedule.to_flat()
        data["max_abs_strength"] = _float(self.max_abs_strength)
        data["default_strength"] = _float(self.default_strength)
        return data

    def to_json(self, *, indent: int | None = 2) -> str:
        """The text of manifest.json: ASCII, sorted keys, one line break at the end."""
        return strict_json.canonical(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Manifest:
        """The manifest that `data` says, checked as `validate` checks it.

        Unknown keys at the top level and in `base_model` are left out with a PatchWarning; in an intervention
        or in the schedule they are refused, since they could change what the patch does. Nothing is converted
        but an integer where a number is meant.
        """
        known = _known(data, cls, "manifest")
        version = known.get("format_version", FORMAT_VERSION)
        if version != FORMAT_VERSION or not isinstance(version, str):
            raise PatchFormatError("BP112", f"format_version is {visible(repr(version), 40)}")
        if "name" in known:
            check_patch_name(known["name"])
        if not isinstance(known.get("provenance", {}), Mapping):
            raise PatchFormatError("BP115", "provenance is not an object")
        schedule = _flat_schedule(known.pop("schedule", None))
        if isinstance(known.get("base_model"), Mapping):
            known["base_model"] = _known(known["base_model"], BaseModelSpec, "base_model")
        if isinstance(known.get("interventions"), list):
            for index, item in enumerate(known["interventions"]):
                _refuse_unknown_keys(item, f"interventions[{index}]")
        manifest = _convert(known, cls, "manifest")
        manifest.schedule = schedule
        _check_numbers(manifest)
        _check_layers(manifest)
        _check_ids(manifest)
        _check_compatibility_claims(manifest)
        check_provenance(manifest.provenance)
        return manifest

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """The manifest of a strict JSON text: BP109 when it is not one, else as `from_dict`."""
        raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        return cls.from_dict(strict_json.parse(raw, "manifest"))


def manifest_schema() -> dict[str, Any]:
    """The manifest as JSON Schema (draft 2020-12), made from the dataclasses above.

    It says what can be said field by field; the rules between fields are in docs/format.
    """
    _, defs = msgspec.json.schema_components([Manifest], ref_template="#/$defs/{name}")
    manifest = defs["Manifest"]
    manifest["properties"]["schedule"] = {
        "anyOf": [msgspec.json.schema(_FlatSchedule), {"type": "null"}],
        "default": None,
    }
    manifest["required"] = [*manifest["required"], "format_version"]
    manifest["properties"]["compatibility"]["additionalProperties"] = {
        "type": "object",
        "properties": {"status": {"enum": list(BACKEND_STATUSES)}},
        "required": ["status"],
    }
    defs["BaseModelSpec"]["required"] = ["model_id", "hidden_size", "num_layers"]
    defs["Intervention"]["additionalProperties"] = False
    del defs["StrengthSchedule"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$ref": "#/$defs/Manifest",
        "$defs": defs,
    }


_FlatSchedule = Annotated[
    dict[
        Annotated[str, Meta(pattern="^[0-9]+$")],
        Annotated[float, Meta(ge=-MAX_ABS_SCHEDULE_VALUE, le=MAX_ABS_SCHEDULE_VALUE)],
    ],
    Meta(min_length=1, max_length=MAX_KEYFRAMES),
]


def _convert(data: Any, kind: type[_Kind], what: str) -> _Kind:
    try:
        return msgspec.convert(data, kind, strict=True)
    except (msgspec.ValidationError, TypeError) as error:
        # msgspec points at the place as `$.a.b`.
        raise PatchFormatError("BP110", visible(re.sub(r"`\$", f"`{what}", str(error)))) from None


def _fields_of(item: BaseModelSpec | Manifest) -> dict[str, Any]:
    # Not `vars`: msgspec leaves a default that is not overridden on the class.
    return {each.name: getattr(item, each.name) for each in fields(item)}


def _known(data: Any, kind: type[Any], what: str) -> dict[str, Any]:
    """`data` without the keys that are no field of `kind`, with a warning for those."""
    if not isinstance(data, Mapping):
        raise PatchFormatError("BP110", f"{what} is not an object")
    names = {item.name for item in fields(kind)}
    unknown = sorted(str(key) for key in data if key not in names)
    if unknown:
        warnings.warn(
            f"unknown key in the {what}, ignored and not kept: {visible(', '.join(unknown))}",
            PatchWarning,
            stacklevel=2,
        )
    return {key: value for key, value in data.items() if key in names}


def _refuse_unknown_keys(item: Any, what: str) -> None:
    if isinstance(item, Mapping):
        unknown = sorted(str(key) for key in item if key not in Intervention.__dataclass_fields__)
        if unknown:
            raise PatchFormatError(
                "BP110",
                f"{what} has an unknown key: {visible(', '.join(unknown))}",
                "It may change what the patch does: update brainpatch, or write the file without it.",
            )


def _flat_schedule(value: Any) -> StrengthSchedule | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or "keyframes" in value:
        raise PatchFormatError("BP114", "a manifest's schedule is an object of index and number, or null")
    return StrengthSchedule(value)


def _check_numbers(manifest: Manifest) -> None:
    if abs(manifest.default_strength) > manifest.max_abs_strength:
        raise _contradiction(
            f"default_strength {manifest.default_strength:g} is over max_abs_strength "
            f"{manifest.max_abs_strength:g}"
        )


def _check_layers(manifest: Manifest) -> None:
    # Checked by hand, since the fields' defaults (0) say "missing".
    for name in ("hidden_size", "num_layers"):
        if getattr(manifest.base_model, name) < 1:
            raise PatchFormatError("BP110", f"base_model.{name} is missing")
    for item in manifest.interventions:
        if item.layer >= manifest.base_model.num_layers:
            raise _contradiction(
                f"an intervention is at layer {item.layer}, but the model has "
                f"{manifest.base_model.num_layers} blocks, counted from 0"
            )


def _check_ids(manifest: Manifest) -> None:
    seen: set[str] = set()
    for item in manifest.interventions:
        if item.id and item.id in seen:
            raise _contradiction(f'the intervention id "{visible(item.id)}" is there twice')
        seen.add(item.id or "")


def _check_compatibility_claims(manifest: Manifest) -> None:
    for backend, claim in manifest.compatibility.items():
        status = claim.get("status")
        if not isinstance(status, str) or status not in BACKEND_STATUSES:
            raise PatchFormatError(
                "BP110",
                f"compatibility.{visible(backend)}.status is {visible(repr(status), 40)}, not one of "
                + ", ".join(BACKEND_STATUSES),
            )


def _contradiction(why: str) -> PatchFormatError:
    return PatchFormatError("BP111", why)


def _float(value: Any) -> Any:
    """A number as a float; anything else as it is, for the schema to refuse."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    try:
        return float(value)
    except OverflowError:
        return value
