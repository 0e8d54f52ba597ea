"""Do engines agree? The same weights, the same tokens, a set of patches, and every step's log-probabilities.

One engine answers by itself; the others follow its tokens, so that all are asked about the same positions. Each
engine's log-probabilities of the whole vocabulary are compared with those of a reference: two engines whose logits
differ by a constant give the same ones. Before the cosine is taken, each row's mean is subtracted, since a common
offset would hide differences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from brainpatch.errors import BrainPatchError
from brainpatch.patch.compatibility import ModelDescriptor
from brainpatch.patch.file import LoadedPatch
from brainpatch.patch.manifest import BaseModelSpec, Intervention, Manifest
from brainpatch.patch.tensors import vector
from brainpatch.runtime.backend import BrainPatchBackend
from brainpatch.runtime.config import GenerationConfig
from brainpatch.runtime.requests import Request, Scored

PROMPTS = (
    "How was your day?",
    "Write one sentence about the sea.",
    "Name three fruits.",
    "Why is the sky blue?",
    "Tell me a short story about a dog and a bridge.",
    "What is two plus two?",
    "Say hello in French, in German and in Spanish.",
    "Explain in simple words what a computer does.",
    "Give me a recipe for bread with few ingredients.",
    "Who wrote Hamlet?",
    "List the days of the week.",
    "What should I wear when it rains?",
)

PLAIN = "plain"
AGREES = 0.99999
"""The least cosine of engines that agree in float32."""


class Case(NamedTuple):
    """One way of patching: the request's `patches`, and which patches have to be installed for it."""

    name: str
    wish: Mapping[str, Any]
    patches: tuple[LoadedPatch, ...]


@dataclass(frozen=True)
class Row:
    """One engine against the reference in one case, over all prompts and steps.

    `difference` is the largest absolute difference of two log-probabilities; `differing` counts the prompts whose
    likeliest token is another one at some step, and `earliest` is the first such step, or None. `effect` is the cosine
    of what the patch changes at the first step (patched minus plain) with what it changes in the reference; None where
    it changes nothing there.
    """

    engine: str
    case: str
    cosine: float
    difference: float
    differing: int
    earliest: int | None
    effect: float | None


@dataclass
class Report:
    """What was compared, and what came of it."""

    reference: str
    followed: str
    prompts: int
    steps: int
    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        """Whether every engine agrees with the reference in every case."""
        return bool(self.rows) and all(row.cosine >= AGREES for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "agrees": self.agrees, "least_cosine": AGREES}


class Contender(NamedTuple):
    """An engine to compare: its class, and what loads it."""

    kind: type[BrainPatchBackend]
    load: Callable[[], BrainPatchBackend]


def cases(model: ModelDescriptor) -> list[Case]:
    """Blocks, sites, schedules, signs and sums, for a model of this shape.

    Vectors are random, of the norm that a vector of standard normal numbers has (the square root of the width).
    """
    last = model.num_layers - 1
    middle = model.num_layers // 2

    def make(
        name: str, layers: Sequence[int], seed: int, site: str = "all", sign: float = 1.0
    ) -> LoadedPatch:
        random = np.random.default_rng(seed)
        vectors = {
            f"v{layer}": vector(random.standard_normal(model.hidden_size).tolist()) for layer in layers
        }
        items = [Intervention(layer, f"v{layer}", sign, site=site) for layer in layers]  # type: ignore[arg-type]
        base = BaseModelSpec(model.model_id, model.architecture, model.hidden_size, model.num_layers)
        return LoadedPatch(Manifest(f"parity-{name}", base, items, max_abs_strength=2.0), vectors)

    def case(name: str, patch: LoadedPatch, strength: float = 1.0, schedule: Any = None) -> Case:
        wish: Any = strength if schedule is None else {"strength": strength, "schedule": schedule}
        return Case(name, {patch.name: wish}, (patch,))

    one, other = make("one", [middle, last], 7), make("other", [middle], 8, "continuation", -1.0)
    ramp = {"keyframes": {"0": 0.0, "6": 1.5}, "interpolate": True, "default": 1.0}
    return [
        Case(PLAIN, {}, ()),
        case("block 0", make("first", [0], 1)),
        case("middle block", make("middle", [middle], 2)),
        case("last block", make("last", [last], 3)),
        case("three blocks", make("three", [0, middle, last], 4)),
        case("site prompt", make("prompt", [middle], 5, "prompt")),
        case("site continuation", make("continuation", [middle], 6, "continuation")),
        case("negative", make("negative", [middle], 9, sign=-1.0)),
        case("clamped strength", make("clamped", [middle], 10), 5.0),
        case("off after three tokens", make("off", [middle], 11), 1.0, {"0": 1.0, "3": 0.0}),
        case("ramp", make("ramp", [middle], 12), 1.0, ramp),
        Case("two at one block", {one.name: 0.8, other.name: 1.2}, (one, other)),
    ]


def compare(
    engines: Mapping[str, Contender],
    *,
    reference: str,
    prompts: Sequence[Any] = PROMPTS,
    steps: int = 20,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Score every case on each engine, one engine at a time, and compare with `reference`.

    Engines that cannot follow an answer go first, and the others follow the first one's. A second one that cannot
    is compared for as long as it chooses the same tokens. An engine that fails is in `skipped`, with the reason.
    `prompts` become token ids by the first engine's tokenizer.
    """
    names = sorted(engines, key=lambda name: (engines[name].kind.follows, name != reference))
    scores: dict[str, dict[str, list[Scored]]] = {}
    report = Report(reference, "", len(prompts), steps)
    ids: list[list[int]] = []
    for name in names:
        progress(f"{name}: loading")
        try:
            with engines[name].load() as backend:
                ids = ids or [backend._encode(one, use_chat_template=True, system=None) for one in prompts]
                follow = scores.get(report.followed) if backend.follows else None
                scores[name] = {}
                for case in cases(backend.describe_model()):
                    progress(f"{name}: {case.name}")
                    scores[name][case.name] = _score(backend, case, ids, steps, follow)
                report.followed = report.followed or name
        except BrainPatchError as error:
            scores.pop(name, None)
            report.skipped[name] = f"{error.code} {error.reason}"
    wanted = scores.pop(reference, {})
    for name, found in scores.items():
        report.rows += [_row(name, case, found, wanted) for case in wanted]
    return report


def _score(
    backend: BrainPatchBackend,
    case: Case,
    ids: Sequence[Sequence[int]],
    steps: int,
    follow: Mapping[str, Sequence[Scored]] | None,
) -> list[Scored]:
    for patch in case.patches:
        backend.install_patch(patch, mode="unsafe", enabled=False)
    config = GenerationConfig(max_new_tokens=steps, ignore_eos=True)
    warns, backend.warns_of_requests = (
        backend.warns_of_requests,
        False,
    )  # one case is beyond its bound on purpose
    requests: list[Request] = backend.requests(ids, config, patches=case.wish)
    backend.warns_of_requests = warns
    answers = None if follow is None else [one.token_ids for one in follow[case.name]]
    scored = backend.score(requests, answers)
    for patch in case.patches:
        backend.remove_patch(patch.name)
    return scored


def _row(
    engine: str, case: str, found: Mapping[str, Sequence[Scored]], wanted: Mapping[str, Sequence[Scored]]
) -> Row:
    cosine, difference, differing, earliest = 1.0, 0.0, 0, []
    for one, other in zip(found[case], wanted[case], strict=True):
        shared = _shared(one, other)
        ours, theirs = one.logprobs[:shared], other.logprobs[:shared]
        cosine = min(cosine, _least_cosine(ours, theirs))
        difference = max(difference, float(np.abs(ours - theirs).max()))
        other_choice = np.flatnonzero(ours.argmax(axis=1) != theirs.argmax(axis=1))
        if other_choice.size:
            differing += 1
            earliest.append(int(other_choice[0]))
    return Row(
        engine, case, cosine, difference, differing, min(earliest, default=None), _effect(case, found, wanted)
    )


def _shared(one: Scored, other: Scored) -> int:
    """How many steps of two answers have the same tokens before them."""
    differ = np.flatnonzero(np.array(one.token_ids) != np.array(other.token_ids))
    return int(differ[0]) + 1 if differ.size else len(one.token_ids)


def _least_cosine(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    """The least cosine of two rows, each without its mean, in float64."""
    a, b = (rows.astype(np.float64) - rows.mean(axis=1, keepdims=True) for rows in (ours, theirs))
    return float(((a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).min())


def _effect(
    case: str, found: Mapping[str, Sequence[Scored]], wanted: Mapping[str, Sequence[Scored]]
) -> float | None:
    """The cosine of what a case changes at the first step, where all answers have the same tokens before them."""
    if case == PLAIN:
        return None
    ours, theirs = (
        np.stack(
            [one.logprobs[0] - plain.logprobs[0] for one, plain in zip(of[case], of[PLAIN], strict=True)]
        ).astype(np.float64)
        for of in (found, wanted)
    )
    if not ours.any() and not theirs.any():  # a patch of the continuation has not begun
        return None
    return float((ours * theirs).sum() / (np.linalg.norm(ours) * np.linalg.norm(theirs)))
