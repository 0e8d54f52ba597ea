"""What the table says of a step is what the meaning says, for every row, whatever came and went before.

A random engine drives it: requests are admitted, released and admitted again; steps hold any of them in any
order and in chunks of any size; a preempted request starts again at 0, and rejected drafts take positions
back. The vectors are read from a copy that follows `changed_slots` alone, as a device's does.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from brainpatch.backends.edit_table import EditTable
from brainpatch.patch.schedule import StrengthSchedule
from brainpatch.runtime.meaning import ResolvedSet
from tests.resolved_sets import HIDDEN, LATEST, LAYERS, POOL, effective_sets, resolved

NOTHING = ResolvedSet()


class Copy:
    """The vectors as the owner of a table holds them elsewhere."""

    def __init__(self, table: EditTable) -> None:
        self.table = table
        self.vectors = np.full((0, HIDDEN), np.nan, dtype=np.float32)

    def follow(self) -> np.ndarray:
        """The copy after what has changed was copied; slots that were never said to change are NaN."""
        if len(self.vectors) != len(self.table.vectors):
            self.vectors = np.full(self.table.vectors.shape, np.nan, dtype=np.float32)
        for slot in self.table.changed_slots:
            self.vectors[slot] = self.table.vectors[slot]
        self.table.changed_slots.clear()
        return self.vectors


def by_meaning(
    patches: ResolvedSet, prompt_length: int, layer: int, positions: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """delta [positions, hidden] in float32, its terms in list order, -0.0 for no term; and whether there is one."""
    total = np.full((len(positions), HIDDEN), -0.0, dtype=np.float32)
    if layer not in patches.layers:
        return total, np.zeros(len(positions), dtype=bool)
    numbers = patches.coefficients(layer, np.array(positions, dtype=np.int64), prompt_length)
    for number, vector in zip(numbers.T, patches.vectors(layer), strict=True):
        rows = number != 0
        total[rows] += number[rows, None].astype(np.float32) * vector
    return total, (numbers != 0).any(axis=1)


def bits(array: object) -> list:
    """Numbers of float32 such that 0.0 and -0.0 differ."""
    return np.asarray(array, dtype=np.float32).view(np.int32).tolist()


def check(table: EditTable, copy: Copy, batch: list[tuple[str, list[int]]], admitted: dict) -> None:
    """One step. `batch`: (request, its positions), in row order; `admitted`: request -> (set, prompt length)."""
    counts = np.array([len(positions) for _, positions in batch], dtype=np.int32)
    positions = np.array([p for _, some in batch for p in some], dtype=np.int64)
    step = table.step([request for request, _ in batch], counts, positions)
    vectors = copy.follow()
    assert bits(vectors[0]) == bits([-0.0] * HIDDEN)
    deltas, edited = {}, {}
    for layer in table.layers:
        parts = [by_meaning(*admitted.get(name, (NOTHING, 0)), layer, some) for name, some in batch]
        deltas[layer] = np.concatenate([np.zeros((0, HIDDEN), np.float32), *(delta for delta, _ in parts)])
        edited[layer] = np.concatenate([np.zeros(0, bool), *(some for _, some in parts)])
    if step is None:
        assert not any(rows.any() for rows in edited.values())
        return
    rows = np.arange(len(positions)) if step.rows is None else step.rows
    assert (np.diff(rows) > 0).all()
    assert step.index.dtype == np.int32
    assert step.coefficient.dtype == np.float32
    assert step.index.shape == step.coefficient.shape
    assert step.index.shape[1] == len(rows)
    assert (step.coefficient[step.index == 0] == 1.0).all()
    assert step.columns.keys() == {layer for layer, some in edited.items() if some.any()}
    taken = [column for span in step.columns.values() for column in range(*span)]
    assert len(taken) == len(set(taken))
    assert not np.delete(step.index, taken, axis=0).any()
    for layer, (first, last) in step.columns.items():
        total = np.full((len(rows), HIDDEN), -0.0, dtype=np.float32)
        for column in range(first, last):
            total += step.coefficient[column][:, None] * vectors[step.index[column]]
        dense = np.full((len(positions), HIDDEN), -0.0, dtype=np.float32)
        dense[rows] = total
        # Bit for bit: to add -0.0 changes nothing, and to add 0.0 would.
        assert bits(dense) == bits(deltas[layer])


class Engine(RuleBasedStateMachine):
    """An engine with continuous batching that does everything one may do to a table."""

    names = st.sampled_from("abcde")

    @initialize(layers=st.sampled_from([range(LAYERS), [1], [0, 2, 3]]))
    def start(self, layers):
        self.table = EditTable(layers, HIDDEN)
        self.copy = Copy(self.table)
        self.admitted: dict[str, tuple[ResolvedSet, int]] = {}
        self.at: dict[str, int] = {}
        self.batch: list[tuple[str, list[int]]] = []

    @rule(
        name=names, patches=st.sampled_from(POOL[:4]) | st.sampled_from(POOL), prompt_length=st.integers(1, 6)
    )
    def admit(self, name, patches, prompt_length):
        self.table.admit(name, patches, prompt_length)
        if not patches.is_empty:
            self.admitted.setdefault(name, (patches, prompt_length))

    @rule(name=names)
    def release(self, name):
        self.table.release(name)
        self.admitted.pop(name, None)
        self.at.pop(name, None)

    @rule(
        batch=st.lists(
            st.tuples(
                names, st.sampled_from(["on", "on", "preempted", "rejected", "late"]), st.integers(0, 5)
            ),
            unique_by=lambda chunk: chunk[0],
            max_size=5,
        )
    )
    def compute(self, batch):
        self.batch = []
        for name, start, count in batch:
            at = self.at.get(name, 0)
            at = {"on": at, "preempted": 0, "rejected": max(0, at - 2), "late": LATEST - 1}[start]
            self.batch.append((name, list(range(at, at + count))))
            self.at[name] = at + count
        check(self.table, self.copy, self.batch, self.admitted)

    @precondition(lambda self: self.batch)
    @rule(forward=st.integers(0, 3))
    def compute_the_same_rows(self, forward):
        """A batch like the last one, whatever has changed since: what was kept of it may not be used then."""
        self.batch = [(name, [p + forward for p in positions]) for name, positions in self.batch]
        check(self.table, self.copy, self.batch, self.admitted)

    @precondition(lambda self: self.batch)
    @rule(patches=st.sampled_from(POOL), prompt_length=st.integers(1, 6))
    def compute_the_same_rows_for_another_request(self, patches, prompt_length):
        """A name comes back with another set, right after it went."""
        name = self.batch[0][0]
        self.table.release(name)
        self.admitted.pop(name, None)
        self.admit(name, patches, prompt_length)
        check(self.table, self.copy, self.batch, self.admitted)

    @invariant()
    def what_is_live_is_what_is_used(self):
        if not hasattr(self, "table"):
            return
        used = [patches for patches, _ in self.admitted.values()]
        terms = [
            term
            for patches in used
            for layer, some in patches.terms.items()
            if layer in self.table.layers
            for term in some
        ]
        assert self.table.live_requests == len(used)
        assert self.table.live_sets == len({patches.digest for patches in used})
        assert self.table.live_vectors == len({bytes(term.item.vector) for term in terms})

    def teardown(self):
        if not hasattr(self, "table"):
            return
        for name in list(self.admitted):
            self.release(name)
        self.what_is_live_is_what_is_used()
        assert (self.table.live_requests, self.table.live_sets, self.table.live_vectors) == (0, 0, 0)
        assert self.table.step(["a"], np.array([2]), np.array([0, 1])) is None


class TestEngine(Engine.TestCase):
    settings = settings(max_examples=80, stateful_step_count=25, deadline=None)


def test_a_long_life_with_many_requests():
    """The full batch at every step, while one of eight requests goes and another comes."""
    random = Random(3)
    table = EditTable(range(LAYERS), HIDDEN)
    copy = Copy(table)
    admitted: dict[str, tuple[ResolvedSet, int]] = {}
    for number in range(300):
        if len(admitted) == 8:
            gone = random.choice(sorted(admitted))
            table.release(gone)
            del admitted[gone]
        admitted[f"r{number}"] = random.choice(POOL), random.randint(1, 6)
        table.admit(f"r{number}", *admitted[f"r{number}"])
        batch = [(name, list(range(random.randint(0, 6), 9))) for name in admitted]
        random.shuffle(batch)
        check(table, copy, batch, admitted)


@given(effective_sets, st.integers(1, 6), st.data())
@settings(max_examples=50, deadline=None)
def test_the_split_into_steps_does_not_matter(patches, prompt_length, data):
    """Every row alone is what it is among others, in a table of any history."""
    table = EditTable(range(LAYERS), HIDDEN)
    table.admit("a", patches, prompt_length)
    copy = Copy(table)
    positions = data.draw(st.lists(st.integers(0, 20) | st.integers(0, 2**32), min_size=1, max_size=12))
    check(table, copy, [("a", positions)], {"a": (patches, prompt_length)})
    for position in positions:
        check(table, copy, [("a", [position])], {"a": (patches, prompt_length)})


def one(vector: str, coefficient: float = 1.0, *, layer: int = 0, schedule: StrengthSchedule | None = None):
    item = {"layer": layer, "vector": vector, "coefficient": coefficient, "site": "all"}
    return resolved(([item], 1.0, schedule))


def test_the_vector_table_grows_and_keeps_what_it_holds():
    table = EditTable(range(LAYERS), HIDDEN)
    copy = Copy(table)
    admitted = {}
    for number in range(20):  # eight slots to begin with
        name = f"r{number}"
        admitted[name] = one(f"v{number}"), 2
        table.admit(name, *admitted[name])
        check(table, copy, [(other, [0, 1]) for other in admitted], admitted)
    assert table.live_vectors == 20
    assert len(table.vectors) == 32


def test_slots_that_are_free_again_are_used_again():
    table = EditTable(range(LAYERS), HIDDEN)
    copy = Copy(table)
    for number in range(20):
        admitted = {f"r{number}": (one(f"v{number}"), 2), "stays": (one("v0"), 2)}
        for name, wish in admitted.items():
            table.admit(name, *wish)
        check(table, copy, [(name, [0, 1]) for name in admitted], admitted)
        table.release(f"r{number}")
    assert len(table.vectors) == 8


def test_after_a_growth_all_slots_have_changed():
    table = EditTable(range(LAYERS), HIDDEN)
    for number in range(7):
        table.admit(f"r{number}", one(f"v{number}"), 1)
    assert sorted(table.changed_slots) == list(range(8))
    table.changed_slots.clear()
    table.admit("again", one("v3", 0.5), 1)
    assert table.changed_slots == [], "a vector that is there already is not written again"
    table.admit("r7", one("v7"), 1)
    assert sorted(set(table.changed_slots)) == list(range(16))


def test_vectors_that_differ_in_the_sign_of_zero_have_their_own_slots():
    table = EditTable(range(LAYERS), HIDDEN)
    copy = Copy(table)
    for name, vector in (("a", "v18"), ("b", "v19")):
        table.admit(name, one(vector), 1)
    step = table.step(["a", "b"], np.array([1, 1]), np.array([0, 0]))
    assert step is not None
    a, b = copy.follow()[step.index[0]]
    assert bits(a) == bits([0.0, -0.0, 0.0])
    assert bits(b) == bits([-0.0, 0.0, 0.0])


def test_a_step_over_the_same_rows_is_made_once_and_kept_until_the_live_sets_change():
    table = EditTable(range(LAYERS), HIDDEN)
    table.admit("a", one("v0"), 1)
    first = table.step(["a", "b"], np.array([1, 2]), np.array([5, 0, 1]))
    assert table.step(["a", "b"], np.array([1, 2]), np.array([6, 2, 3])) is first
    table.admit("b", one("v0"), 1)  # of the same set: the rows of b are new ones
    second = table.step(["a", "b"], np.array([1, 2]), np.array([7, 4, 5]))
    assert second is not None
    assert second.rows is None
    table.release("a")
    table.release("b")
    table.admit("a", one("v1"), 1)
    table.admit("b", one("v2"), 1)
    third = table.step(["a", "b"], np.array([1, 2]), np.array([0, 0, 1]))
    assert third is not None
    found = table.vectors[third.index[0]].tolist()
    assert found == [one(v).vectors(0)[0].tolist() for v in ("v1", "v2", "v2")]


def test_a_step_whose_edits_depend_on_the_position_is_never_kept():
    table = EditTable(range(LAYERS), HIDDEN)
    table.admit("a", one("v0", schedule=StrengthSchedule({0: 1.0, 2: 3.0}, interpolate=True)), 1)
    numbers = []
    for position in range(5):
        step = table.step(["a"], np.array([1]), np.array([position]))
        assert step is not None
        numbers.append(step.coefficient.item())
    assert numbers == [1.0, 1.0, 2.0, 3.0, 3.0]


def test_a_multiplier_that_counts_as_nothing_does_so_before_the_coefficient_enlarges_it():
    table = EditTable(range(LAYERS), HIDDEN)
    patches = one("v0", 100.0, schedule=StrengthSchedule({0: 1.0, 2: 1e-13}))
    table.admit("a", patches, 1)
    check(table, Copy(table), [("a", [0, 1, 2, 3, 4])], {"a": (patches, 1)})
    assert table.step(["a"], np.array([1]), np.array([3])) is None


def test_a_request_that_is_in_keeps_its_set_and_its_prompt_length():
    table = EditTable(range(LAYERS), HIDDEN)
    copy = Copy(table)
    prompt_only = resolved(([{"layer": 1, "vector": "v1", "coefficient": 1.0, "site": "prompt"}], 1.0, None))
    table.admit("a", prompt_only, 3)
    table.admit("a", one("v2"), 1)  # as when a preempted request is announced once more
    table.admit("a", prompt_only, 5)
    check(table, copy, [("a", [0, 1, 2, 3, 4])], {"a": (prompt_only, 3)})
    table.release("a")
    assert table.live_requests == table.live_sets == table.live_vectors == 0
    table.release("a")


def test_one_set_serves_requests_with_prompts_of_different_lengths():
    table = EditTable(range(LAYERS), HIDDEN)
    copy = Copy(table)
    late = resolved(([{"layer": 2, "vector": "v1", "coefficient": 1.0, "site": "continuation"}], 1.0, None))
    admitted = {name: (late, length) for name, length in (("a", 2), ("b", 4))}
    for name, (patches, length) in admitted.items():
        table.admit(name, patches, length)
    assert (table.live_sets, table.live_vectors) == (1, 1)
    check(table, copy, [("b", [1, 2, 3, 4, 5]), ("plain", [0, 1]), ("a", [1, 2, 3])], admitted)


@pytest.mark.parametrize("rows", [[], [("plain", [0, 1, 2])], [("a", [])]])
def test_a_step_without_steered_rows_is_nothing(rows):
    table = EditTable(range(LAYERS), HIDDEN)
    table.admit("a", one("v0"), 1)
    counts = np.array([len(positions) for _, positions in rows], dtype=np.int64)
    positions = np.array([p for _, some in rows for p in some], dtype=np.int64)
    assert table.step([name for name, _ in rows], counts, positions) is None


def test_edits_of_blocks_that_another_worker_holds_are_left_out():
    table = EditTable([2, 3], HIDDEN)
    both = resolved(
        (
            [
                {"layer": 0, "vector": "v0", "coefficient": 1.0, "site": "all"},
                {"layer": 3, "vector": "v1", "coefficient": 2.0, "site": "all"},
            ],
            1.0,
            None,
        )
    )
    table.admit("a", both, 1)
    table.admit("b", one("v2"), 1)
    assert (table.live_requests, table.live_sets, table.live_vectors) == (2, 2, 1)
    step = table.step(["a", "b"], np.array([1, 1]), np.array([0, 0]))
    assert step is not None
    assert step.columns == {3: (0, 1)}
    table.release("a")
    assert table.step(["b"], np.array([1]), np.array([0])) is None
