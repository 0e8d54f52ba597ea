"""The meaning of patches: what is added, where and when, as numbers.

For a request with prompt length P and a resolved set S, at decoder block `layer` and position p:

    delta(layer, p) = sum over patches in S, over interventions i at layer whose site matches p:
        clamp(strength) * schedule(max(0, p - P)) * coefficient_i * vector_i

A position belongs to the prompt when p < P. Everything here is a pure function of its arguments and
knows no engine; arrays are numpy.
"""

from __future__ import annotations

import hashlib
import struct
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from brainpatch.errors import PatchFormatError, RequestError, UnknownPatchError
from brainpatch.patch.file import LoadedPatch
from brainpatch.patch.schedule import StrengthSchedule
from brainpatch.patch.strength import EPSILON as EPSILON
from brainpatch.patch.strength import finite_strength as finite_strength
from brainpatch.patch.text import visible

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class ResolvedEdit(NamedTuple):
    """One intervention resolved to a number, as the published API lists it."""

    layer: int
    hook: str
    vector_key: str
    coefficient: float
    patch_name: str


class PreparedIntervention(NamedTuple):
    """An intervention with its vector at hand. `vector` is float32 [hidden_size], not writable."""

    layer: int
    site: str
    coefficient: float
    vector: NDArray[np.float32]
    vector_digest: bytes


class ActivePatch:
    """A patch that is installed on a model: its live strength, switch and schedule."""

    def __init__(
        self,
        patch: LoadedPatch,
        strength: float = 1.0,
        enabled: bool = True,
        schedule: StrengthSchedule | None = None,
    ) -> None:
        self.patch = patch
        self.strength = strength
        self.enabled = enabled
        self.schedule = schedule if schedule is not None else patch.manifest.schedule

    @property
    def name(self) -> str:
        """The patch's name."""
        return self.patch.name

    @property
    def manifest(self) -> Any:
        """The patch's manifest."""
        return self.patch.manifest

    def multiplier_at(self, n: int) -> float:
        """clamp(strength) * schedule(n) at generated-token index n; 0.0 when disabled."""
        if not self.enabled:
            return 0.0
        clamped: float = self.manifest.clamp_strength(self.strength)
        return clamped * (self.schedule.strength_at(n) if self.schedule is not None else 1.0)

    @cached_property
    def interventions(self) -> tuple[PreparedIntervention, ...]:
        """The interventions in file order with their vectors; vectors shared by key are one array."""
        vectors: dict[str, tuple[NDArray[np.float32], bytes]] = {}
        for key in self.manifest.vector_keys:
            array = self.patch.vector_for(key).float32()
            array.flags.writeable = False
            vectors[key] = array, hashlib.sha256(array.astype("<f4").tobytes()).digest()
        return tuple(
            PreparedIntervention(i.layer, i.site, i.coefficient, *vectors[i.vector])
            for i in self.manifest.interventions
        )


def resolve_edits(
    active: Iterable[ActivePatch],
    token_index: int = 0,
    layer: int | None = None,
    *,
    is_prompt_pass: bool | None = None,
) -> list[ResolvedEdit]:
    """The edits at one generated-token index, in application order.

    `is_prompt_pass` True leaves out site `continuation`, False leaves out `prompt`, None filters nothing.
    """
    skipped = {True: "continuation", False: "prompt", None: None}[is_prompt_pass]
    edits = []
    for patch in active:
        multiplier = patch.multiplier_at(token_index)
        if abs(multiplier) < EPSILON:
            continue
        for item in patch.manifest.interventions:
            coefficient = multiplier * item.coefficient
            if abs(coefficient) < EPSILON or item.site == skipped or layer not in (None, item.layer):
                continue
            edits.append(ResolvedEdit(item.layer, item.hook, item.vector, coefficient, patch.name))
    return edits


@dataclass(frozen=True, eq=False)
class ResolvedPatch:
    """One patch of a request: strength already clamped, schedule already chosen."""

    name: str
    strength: float
    schedule: StrengthSchedule | None
    interventions: tuple[PreparedIntervention, ...]

    @cached_property
    def peak(self) -> float:
        """The largest absolute multiplier over all token indices."""
        if self.schedule is None:
            return abs(self.strength)
        values = list(self.schedule.keyframes.values())
        if 0 not in self.schedule.keyframes:
            values.append(self.schedule.default)
        return abs(self.strength) * max(abs(value) for value in values)


class Segment(NamedTuple):
    """Positions first..last-1 of a request that get one and the same edit at a layer.

    `coefficients` has one number for each of the layer's interventions; at least one is not 0.
    """

    first: int
    last: int
    coefficients: tuple[float, ...]


class Term(NamedTuple):
    """One intervention of a set at a layer, with its patch's strength and schedule."""

    strength: float
    schedule: StrengthSchedule | None
    item: PreparedIntervention

    @property
    def depends_on_position(self) -> bool:
        """True when the term differs between positions: by its schedule or by its site."""
        return self.item.site != "all" or (self.schedule is not None and not self.schedule.is_constant())


class ResolvedSet:
    """The patches of one request, fixed for its whole life.

    Patches whose multiplier is 0 at every token index are listed in `patches` but add nothing: a set
    without effect has no `layers` and equals the empty one in `digest`.
    """

    def __init__(self, patches: Iterable[ResolvedPatch] = ()) -> None:
        self.patches = tuple(patches)

    @cached_property
    def terms(self) -> dict[int, tuple[Term, ...]]:
        """What is added, by layer in ascending order; terms that are 0 at every token index are left out."""
        terms: dict[int, list[Term]] = {}
        for patch in self.patches:
            for item in patch.interventions:
                if patch.peak >= EPSILON and abs(patch.peak * item.coefficient) >= EPSILON:
                    terms.setdefault(item.layer, []).append(Term(patch.strength, patch.schedule, item))
        return {layer: tuple(terms[layer]) for layer in sorted(terms)}

    @property
    def layers(self) -> tuple[int, ...]:
        """The decoder blocks that are edited at some position, ascending."""
        return tuple(self.terms)

    @property
    def is_empty(self) -> bool:
        """True when nothing is added anywhere."""
        return not self.terms

    @cached_property
    def depends_on_position(self) -> bool:
        """True when the edits differ between positions: by a schedule or by a site."""
        return any(term.depends_on_position for terms in self.terms.values() for term in terms)

    def vectors(self, layer: int) -> NDArray[np.float32]:
        """The vectors of the layer's interventions: float32 [interventions, hidden_size]."""
        import numpy as np

        return np.stack([term.item.vector for term in self.terms[layer]])

    def coefficients(
        self, layer: int, positions: NDArray[np.int64], prompt_length: int
    ) -> NDArray[np.float64]:
        """The coefficient of each of the layer's interventions at each position.

        `positions`: int [n], counted from the start of the prompt; negative ones are padding and get 0.
        Returns float64 [n, interventions].
        """
        import numpy as np

        index = np.maximum(0, positions - prompt_length)
        in_prompt = positions < prompt_length
        columns = []
        for strength, schedule, item in self.terms[layer]:
            multiplier = strength * (np.ones(len(index)) if schedule is None else _scheduled(schedule, index))
            multiplier[np.abs(multiplier) < EPSILON] = 0.0
            column = multiplier * item.coefficient
            column[np.abs(column) < EPSILON] = 0.0
            if item.site != "all":
                column[in_prompt if item.site == "continuation" else ~in_prompt] = 0.0
            columns.append(column)
        table = np.stack(columns, axis=1)
        table[positions < 0] = 0.0
        return table

    def segments(self, layer: int, start: int, count: int, prompt_length: int) -> list[Segment]:
        """The edited stretches among positions start..start+count-1, ascending."""
        import numpy as np

        if not self.depends_on_position:
            constant = self._constants[layer]
            first = max(0, start)
            return (
                [Segment(first, start + count, constant)] if any(constant) and first < start + count else []
            )
        table = self.coefficients(layer, np.arange(start, start + count), prompt_length)
        cuts = (np.flatnonzero((table[1:] != table[:-1]).any(axis=1)) + 1).tolist()
        return [
            Segment(start + first, start + last, tuple(table[first].tolist()))
            for first, last in zip([0, *cuts], [*cuts, count], strict=True)
            if table[first].any()
        ]

    @cached_property
    def _constants(self) -> dict[int, tuple[float, ...]]:
        """Each layer's coefficients, for a set in which they are the same at every position."""
        import numpy as np

        start = np.zeros(1, dtype=np.int64)
        return {layer: tuple(self.coefficients(layer, start, 1)[0].tolist()) for layer in self.terms}

    def sum(self, layer: int, coefficients: tuple[float, ...]) -> NDArray[np.float32]:
        """What is added at the layer for these coefficients: float32 [hidden_size].

        Each coefficient is rounded to float32, and terms are summed in float32 in list order.
        """
        import numpy as np

        total = np.zeros_like(self.terms[layer][0].item.vector)
        for coefficient, term in zip(coefficients, self.terms[layer], strict=True):
            if coefficient:
                total = total + np.float32(coefficient) * term.item.vector
        return total

    def expected_norm(self, layer: int, coefficients: tuple[float, ...]) -> float:
        """The L2 norm of the summed edits, computed in float64."""
        import numpy as np

        return float(np.linalg.norm(np.asarray(coefficients) @ self.vectors(layer).astype(np.float64)))

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of what the set means: vectors, coefficients, sites, strengths, schedules, order.

        Names do not enter: two sets with one digest do the same to a model.
        """
        seal = hashlib.sha256(b"brainpatch-resolved-set-v1")
        for layer, terms in self.terms.items():
            for strength, schedule, item in terms:
                seal.update(struct.pack("<Idd", layer, strength, item.coefficient))
                seal.update(item.site.encode() + b"\0" + item.vector_digest)
                if schedule is None:
                    seal.update(struct.pack("<I", 0))
                    continue
                steps = schedule.keyframes
                seal.update(struct.pack("<I?d", len(steps), schedule.interpolate, schedule.default))
                for at, value in steps.items():
                    seal.update(struct.pack("<qd", at, value))
        return seal.hexdigest()

    def continuation_only(self) -> ResolvedSet:
        """The same set without any edit at prompt positions."""
        return ResolvedSet(
            replace(
                patch,
                interventions=tuple(
                    item._replace(site="continuation")
                    for item in patch.interventions
                    if item.site != "prompt"
                ),
            )
            for patch in self.patches
        )

    def to_mapping(self) -> dict[str, Any]:
        """The set in the shape of a request's `patches`, so that it can be asked for again."""
        return {
            patch.name: patch.strength
            if patch.schedule is None
            else {"strength": patch.strength, "schedule": patch.schedule.to_dict()}
            for patch in self.patches
        }


def _scheduled(schedule: StrengthSchedule, index: NDArray[np.int64]) -> NDArray[np.float64]:
    """`schedule.strength_at` of an array: one call for each different index, of which a step has few."""
    import numpy as np

    different, back = np.unique(index, return_inverse=True)
    return np.array([schedule.strength_at(int(n)) for n in different])[back]


def request_schedule(value: Any, where: str) -> StrengthSchedule:
    """A request's schedule: a StrengthSchedule, or a mapping in the flat or the long form."""
    if isinstance(value, StrengthSchedule):
        return value
    if not isinstance(value, Mapping):
        raise RequestError("BP403", f"{where} is {type(value).__name__}, not a mapping of token indices")
    try:
        return StrengthSchedule.from_dict(value)
    except PatchFormatError as error:
        raise RequestError(error.code, f"{where}: {error.reason}", error.remedy) from None


def resolve(
    patches: Mapping[str, Any] | None,
    installed: Mapping[str, ActivePatch],
    *,
    warn: Callable[[str], None] = warnings.warn,
) -> ResolvedSet:
    """What a request's `patches` mean, given what is installed.

    None: the installed patches that are enabled, as they stand. `{}`: nothing. Otherwise exactly the
    named ones, enabled or not, each with the strength and schedule given, or as it stands where one
    is left out. Errors: UnknownPatchError (BP401), RequestError (BP402, BP403, BP114).
    """
    if patches is None:
        patches = {name: {} for name, patch in installed.items() if patch.enabled}
    if not isinstance(patches, Mapping):
        raise RequestError("BP403", f"patches is {type(patches).__name__}, not a mapping")
    resolved = []
    for name, wish in patches.items():
        if name not in installed:
            raise unknown_patch(name, installed)
        active = installed[name]
        where = f"patches[{name!r}]"
        schedule = active.schedule
        strength: Any = wish
        if isinstance(wish, Mapping):
            unknown = set(wish) - {"strength", "schedule"}
            if unknown:
                raise RequestError("BP403", f"{where} has the unknown key {sorted(map(repr, unknown))[0]}")
            strength = wish.get("strength", active.strength)
            if wish.get("schedule") is not None:
                schedule = request_schedule(wish["schedule"], f"{where}['schedule']")
        asked = finite_strength(strength, where)
        clamped: float = active.manifest.clamp_strength(asked)
        if clamped != asked:
            warn(f"{name}: strength {asked:g} is beyond the patch's bound and was clamped to {clamped:g}")
        resolved.append(ResolvedPatch(name, clamped, schedule, active.interventions))
    return ResolvedSet(resolved)


def unknown_patch(name: Any, installed: Mapping[str, ActivePatch]) -> UnknownPatchError:
    """The error for a name that is not installed; it says what is near it, or what there is."""
    near = get_close_matches(str(name)[:128], list(installed), n=3)
    there = f"near it: {', '.join(near)}" if near else f"installed: {', '.join(installed) or 'none'}"
    return UnknownPatchError("BP401", f"{visible(repr(name), 80)} is not installed on this model; {there}")
