"""From the requests of a step to what is added to each row, as arrays. Knows no engine and no tensor library.

A step of an engine with continuous batching computes rows: some positions of some requests, in any order and
number. Each request was admitted with a resolved set and a prompt length; what a row gets follows from its
request and its position alone (law 3). The table holds, for the sets that are live:

- vectors: float32 [slots, hidden_size], one row for each different vector, counted by use. Slot 0 is all
  -0.0, and x + -0.0 is x for every float x, so that adding slot 0 changes no bit.
- plans: one for each different set that is live; requests with equal sets share one.
- columns: the pairs (layer, j), ascending, where j numbers the terms of a set at a layer.

A step is then a gather: row -> plan -> (slot, coefficient) of every column. Coefficients that depend on the
position are computed for all rows and columns at once. The work for a step grows with rows times columns,
and not with the number of live sets. Python loops run over requests and, when sets come and go, over their
terms; never over the rows or the layers of a step.

Not thread-safe: one worker owns a table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brainpatch.patch.schedule import StrengthSchedule
from brainpatch.runtime.meaning import EPSILON, PreparedIntervention, ResolvedSet, Term

_NOTHING = 0
"""Plan, slot and track 0: no edit, the vector of -0.0, a multiplier of 1."""
_Track = tuple[StrengthSchedule | None, str]
"""What makes a coefficient depend on the position: schedule and site."""
_SPAN = 1 << 33
"""More than the number of values that a generated-token index can have; keys of two tracks never mix."""


@dataclass(frozen=True)
class Step:
    """What one forward pass adds.

    `rows` are the rows that are edited somewhere, ascending, or None for all of 0..n-1. `index` (int32) and
    `coefficient` (float32) are [columns, n]; an index of 0 has the coefficient 1. `columns` says, for each
    layer that some row is edited at, which columns are its own: layer -> (first, last + 1).
    """

    rows: NDArray[np.int64] | None
    index: NDArray[np.int32]
    coefficient: NDArray[np.float32]
    columns: dict[int, tuple[int, int]]


@dataclass
class _Plan:
    patches: ResolvedSet
    entries: list[tuple[tuple[int, int], Term]]
    """(column, term)"""
    users: int = 0
    number: int = _NOTHING
    """Its place in the arrays of a step, given when they are laid out."""


@dataclass
class _Counted:
    number: int
    users: int = 0


class EditTable:
    """The live sets of one worker, by request.

    `layers` are the blocks that this worker holds; terms at others are left out.
    """

    def __init__(self, layers: Iterable[int], hidden_size: int) -> None:
        self.layers = frozenset(layers)
        self.hidden_size = hidden_size
        self.vectors = np.full((8, hidden_size), -0.0, dtype=np.float32)
        self.changed_slots: list[int] = [0]
        """Slots that were written since the owner last cleared this list; all of them after a growth."""
        self._requests: dict[str, tuple[_Plan, int]] = {}
        self._plans: dict[str, _Plan] = {}
        self._slots: dict[bytes, _Counted] = {}
        self._free_slots = list(range(len(self.vectors) - 1, 0, -1))
        self._tracks: Counter[_Track] = Counter()
        self._lay_out()

    # --- requests come and go ----------------------------------------------------------------

    @property
    def live_requests(self) -> int:
        """How many admitted requests have edits."""
        return len(self._requests)

    @property
    def live_sets(self) -> int:
        """How many different sets they use."""
        return len(self._plans)

    @property
    def live_vectors(self) -> int:
        """How many different vectors they use."""
        return len(self._slots)

    def admit(self, request: str, patches: ResolvedSet, prompt_length: int) -> None:
        """Take a request in; it keeps this set until `release`. A request that is in stays as it is."""
        if request in self._requests or patches.is_empty:
            return
        plan = self._plans.get(patches.digest)
        if plan is None:
            plan = self._add_plan(patches)
        plan.users += 1
        self._requests[request] = plan, prompt_length

    def release(self, request: str) -> None:
        """Let a request go; the last user of a set takes its vectors with it. Unknown ones are ignored."""
        found = self._requests.pop(request, None)
        if found is None:
            return
        plan, _ = found
        plan.users -= 1
        if not plan.users:
            del self._plans[plan.patches.digest]
            for _, term in plan.entries:
                self._drop_slot(term.item.vector_digest)
                if term.depends_on_position:
                    self._drop_track(_track(term))
            self._stale = True

    def _add_plan(self, patches: ResolvedSet) -> _Plan:
        plan = self._plans[patches.digest] = _Plan(
            patches,
            [
                ((layer, j), term)
                for layer, terms in patches.terms.items()
                if layer in self.layers
                for j, term in enumerate(terms)
            ],
        )
        for _, term in plan.entries:
            self._take_slot(term.item)
            if term.depends_on_position:
                self._tracks[_track(term)] += 1
        self._stale = True
        return plan

    def _take_slot(self, item: PreparedIntervention) -> None:
        counted = self._slots.get(item.vector_digest)
        if counted is None:
            if not self._free_slots:
                self._grow()
            counted = self._slots[item.vector_digest] = _Counted(self._free_slots.pop())
            self.vectors[counted.number] = item.vector
            self.changed_slots.append(counted.number)
        counted.users += 1

    def _drop_slot(self, digest: bytes) -> None:
        counted = self._slots[digest]
        counted.users -= 1
        if not counted.users:
            del self._slots[digest]
            self._free_slots.append(counted.number)

    def _grow(self) -> None:
        old = self.vectors
        self.vectors = np.full((2 * len(old), self.hidden_size), -0.0, dtype=np.float32)
        self.vectors[: len(old)] = old
        self.changed_slots = list(range(len(self.vectors)))
        self._free_slots += range(len(self.vectors) - 1, len(old) - 1, -1)

    def _drop_track(self, track: _Track) -> None:
        self._tracks[track] -= 1
        if not self._tracks[track]:
            del self._tracks[track]

    def _lay_out(self) -> None:
        """Make the arrays of a step. Once for all sets that came and went since the last step."""
        columns = sorted({column for plan in self._plans.values() for column, _ in plan.entries})
        at = {column: i for i, column in enumerate(columns)}
        tracks = {track: number for number, track in enumerate(self._tracks, start=1)}
        shape = (len(columns), len(self._plans) + 1)
        self._slot = np.zeros(shape, dtype=np.int32)
        self._constant = np.ones(shape, dtype=np.float32)
        self._track = np.zeros(shape, dtype=np.int64)
        self._strength = np.zeros(shape)
        self._scale = np.zeros(shape)
        for number, plan in enumerate(self._plans.values(), start=1):
            plan.number = number
            for column, term in plan.entries:
                i = at[column]
                self._slot[i, number] = self._slots[term.item.vector_digest].number
                self._strength[i, number] = term.strength
                self._scale[i, number] = term.item.coefficient
                if term.depends_on_position:
                    self._track[i, number] = tracks[_track(term)]
                else:
                    self._constant[i, number] = _constant(term)
        self._moving = (self._track != _NOTHING).any(axis=0)
        self._segments = _segments(tracks)
        bounds = np.flatnonzero(np.diff([-1, *(layer for layer, _ in columns), -1]))
        self._spans = {columns[first][0]: (int(first), int(last)) for first, last in pairwise(bounds)}
        self._last: tuple[NDArray[np.int64], Step | None] | None = None
        self._stale = False

    # --- a step --------------------------------------------------------------------------------

    def step(
        self,
        requests: Sequence[str],
        counts: NDArray[np.integer],
        positions: NDArray[np.integer],
    ) -> Step | None:
        """What is added to the rows of a forward pass, or None for nothing at all.

        `requests` are the batch's, in row order; `counts` [requests] says how many rows each has, and
        `positions` [rows] the position of every row in its request, 0-based. Requests that were not
        admitted have no edits.
        """
        if not self._requests:
            return None
        if self._stale:
            self._lay_out()
        found = [self._requests.get(request) for request in requests]
        numbers = np.array([_NOTHING if one is None else one[0].number for one in found], dtype=np.int64)
        plan = np.repeat(numbers, counts)
        if self._last is not None and np.array_equal(self._last[0], plan):
            return self._last[1]
        rows = np.flatnonzero(plan)
        moving = bool(self._moving[numbers].any())
        step = None
        if len(rows):
            index = self._slot[:, plan[rows]]
            coefficient = self._constant[:, plan[rows]]
            if moving:
                lengths = np.array([0 if one is None else one[1] for one in found], dtype=np.int64)
                n = np.maximum(-1, positions[rows] - np.repeat(lengths, counts)[rows])
                self._move(index, coefficient, plan[rows], n)
            step = self._made(rows, len(plan), index, coefficient)
        self._last = None if moving else (plan, step)
        return step

    def _move(
        self,
        index: NDArray[np.int32],
        coefficient: NDArray[np.float32],
        plan: NDArray[np.int64],
        n: NDArray[np.int64],
    ) -> None:
        """Fill in the coefficients that depend on `n` [rows], the generated-token index, -1 in the prompt."""
        track = self._track[:, plan]
        at = np.nonzero(track)
        number, row = track[at], at[1]
        keys, start, low, rise, length = self._segments
        segment = np.searchsorted(keys, number * _SPAN + n[row], side="right") - 1
        value = low[segment] + rise[segment] * ((n[row] - start[segment]) / length[segment])
        column = at[0]
        multiplier = self._strength[column, plan[row]] * value
        multiplier[np.abs(multiplier) < EPSILON] = 0.0
        moved = multiplier * self._scale[column, plan[row]]
        nothing = np.flatnonzero(np.abs(moved) < EPSILON)
        moved[nothing] = 1.0
        coefficient[at] = moved
        index[column[nothing], row[nothing]] = 0

    def _made(
        self,
        rows: NDArray[np.int64],
        total: int,
        index: NDArray[np.int32],
        coefficient: NDArray[np.float32],
    ) -> Step | None:
        live: NDArray[np.bool_] = np.logical_or.reduce(index, axis=1)
        columns = {
            layer: (first, last) for layer, (first, last) in self._spans.items() if live[first:last].any()
        }
        if not columns:
            return None
        return Step(None if len(rows) == total else rows, index, coefficient, columns)


def _track(term: Term) -> _Track:
    return term.schedule, term.item.site


def _constant(term: Term) -> float:
    """The coefficient of a term that does not depend on the position."""
    multiplier = term.strength * (1.0 if term.schedule is None else term.schedule.strength_at(0))
    return multiplier * term.item.coefficient


def _segments(tracks: dict[_Track, int]) -> tuple[NDArray[Any], ...]:
    """All tracks as pieces of straight lines, in one ascending list. `tracks` are in the order of their numbers.

    A track is a function of n, the generated-token index, or -1 at a prompt's position:
    value = low + rise * ((n - start) / length). Returns (keys, start, low, rise, length), each [pieces], where
    a key is track * _SPAN + start.
    """
    pieces: list[tuple[int, int, float, float, int]] = []
    for (schedule, site), number in tracks.items():
        prompt = 1.0 if schedule is None else schedule.strength_at(0)
        pieces.append((number, -1, 0.0 if site == "continuation" else prompt, 0.0, 1))
        if site == "prompt":
            pieces.append((number, 0, 0.0, 0.0, 1))
            continue
        if schedule is None:
            pieces.append((number, 0, 1.0, 0.0, 1))
            continue
        steps = schedule.steps
        if steps[0] > 0:
            pieces.append((number, 0, schedule.default, 0.0, 1))
        for i, start in enumerate(steps):
            low = schedule.keyframes[start]
            if schedule.interpolate and i + 1 < len(steps):
                end = steps[i + 1]
                pieces.append((number, start, low, schedule.keyframes[end] - low, end - start))
            else:
                pieces.append((number, start, low, 0.0, 1))
    keys = np.array([number * _SPAN + start for number, start, *_ in pieces], dtype=np.int64)
    return keys, *(np.array([piece[i] for piece in pieces]) for i in (1, 2, 3, 4))
