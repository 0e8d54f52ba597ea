"""The device's plane: held to the plain one, in Triton's interpreter, or on a GPU where there is one."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from brainpatch.backends import vllm_plane
from brainpatch.backends.vllm_plane import Plane, PlaneTrace
from brainpatch.patch.schedule import StrengthSchedule
from brainpatch.runtime.meaning import PreparedIntervention, ResolvedPatch, ResolvedSet
from tests.backends.test_vllm_kernel import DEVICE, INTERPRETED, bits, needs_triton, python, where_it_runs

HIDDEN = 40
LAYERS = (1, 2, 4)
ROWS = 20


@needs_triton
@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="the tests below run in this process")
def test_the_device_plane_in_the_interpreter():
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(done.stdout.split(" passed")[0].split()[-1]) >= 15


@pytest.fixture(autouse=True)
def _nothing_stands_by(monkeypatch):
    monkeypatch.setattr(vllm_plane, "_standing_by", None)
    monkeypatch.setattr(vllm_plane, "_in_step", None)


def device_plane(layers=LAYERS, dtype=torch.float32):
    from brainpatch.backends.vllm_device_plane import DevicePlane

    return DevicePlane(layers, HIDDEN, dtype, torch.device(DEVICE))


def vector(seed: int) -> np.ndarray:
    """With few bits: a product with a coefficient of few bits, and a sum of some of them, is exact.

    So the planes must agree bit for bit, although PyTorch may round a product and a sum at once on the CPU.
    """
    return (np.random.default_rng(seed).integers(-160, 160, HIDDEN) / 64).astype(np.float32)


def edit(layer: int, values: np.ndarray, coefficient: float = 1.5, site: str = "all") -> PreparedIntervention:
    return PreparedIntervention(layer, site, coefficient, values, hashlib.sha256(values.tobytes()).digest())


def patches(*edits: PreparedIntervention, schedule: StrengthSchedule | None = None) -> ResolvedSet:
    return ResolvedSet([ResolvedPatch("p", 1.0, schedule, edits)])


def stream(seed: int = 5, rows: int = ROWS, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def forward(hidden: Tensor, layers=range(5)) -> list[Tensor]:
    """The blocks of a pass, by the operation; each starts from `hidden`."""
    results = []
    for layer in layers:
        rows = hidden.clone()
        torch.ops.brainpatch.steer(rows, None, layer)
        results.append(rows.cpu())
    return results


def decode(plane: Plane, requests: list[str], hidden: Tensor, position: int = 9, layers=range(5)):
    """A step with one row a request."""
    plane.begin(requests, np.ones(len(requests), dtype=np.int64), np.full(len(requests), position))
    try:
        return forward(hidden, layers)
    finally:
        plane.end()


def passed_through(plain: Plane, batch) -> Tensor:
    """The stream after a step through all blocks, as the plain plane edits it."""
    plain.begin(*batch)
    rows = stream()
    for layer in LAYERS:
        torch.ops.brainpatch.steer(rows, None, layer)
    plain.end()
    return rows


def assert_same(some: list[Tensor], others: list[Tensor]) -> None:
    for layer, (one, other) in enumerate(zip(some, others, strict=True)):
        assert torch.equal(bits(one), bits(other)), f"layer {layer}"


class Traffic:
    """Requests that come, are computed in chunks and then token by token, and go; the same for all planes."""

    def __init__(self, seed: int, planes: list[Plane]) -> None:
        self.random, self.planes, self.number = random.Random(seed), planes, 0
        self.computed: dict[str, int] = {}
        self.prompt: dict[str, int] = {}

    def set_of(self, number: int) -> ResolvedSet | None:
        chance = self.random
        if chance.random() < 0.2:
            return None
        schedule = chance.choice(
            [
                None,
                None,
                StrengthSchedule({1: 0.0, 4: 2.0}),
                StrengthSchedule({0: 0.5, 8: 2.5}, interpolate=True),
            ]
        )
        sites = ("all", "prompt", "continuation")
        seeds = [chance.choice([8 * number + i, chance.randrange(3)]) for i in range(chance.randint(1, 5))]
        made = [
            edit(chance.choice(LAYERS), vector(seed), chance.randint(-16, 16) / 8, chance.choice(sites))
            for seed in seeds
        ]
        return patches(*made, schedule=schedule)

    def step(self) -> tuple[list[str], np.ndarray, np.ndarray]:
        chance = self.random
        for request in [r for r in self.computed if chance.random() < 0.12]:
            del self.computed[request]
            for plane in self.planes:
                plane.table.release(request)
        while len(self.computed) < 6 and chance.random() < 0.6:
            request, self.number = f"r{self.number}", self.number + 1
            self.computed[request], self.prompt[request] = 0, chance.randint(1, 8)
            if (made := self.set_of(self.number)) is not None:
                for plane in self.planes:
                    plane.table.admit(request, made, self.prompt[request])
        running = chance.sample(sorted(self.computed), chance.randint(0, len(self.computed)))
        counts, positions = [], []
        for request in running:
            left = self.prompt[request] - self.computed[request]
            count = chance.randint(1, left) if left > 0 else 1
            positions += range(self.computed[request], self.computed[request] + count)
            counts.append(count)
            self.computed[request] += count
        return running, np.array(counts, dtype=np.int64), np.array(positions, dtype=np.int64)


# --- the same as the plain plane ---------------------------------------------------------------------


@where_it_runs
@pytest.mark.parametrize(("dtype", "seed"), [(torch.float32, 1), (torch.float16, 2)])
def test_random_traffic_gets_what_the_plain_plane_adds(dtype, seed):
    plain, device = Plane(LAYERS, HIDDEN, dtype), device_plane(dtype=dtype)
    head = device._descriptor.data_ptr()
    traffic, steered = Traffic(seed, [plain, device]), 0
    for number in range(50):
        batch = traffic.step()
        total = int(batch[1].sum())
        hidden = stream(number, total + 3, dtype)  # more rows than the batch has: a graph's are padded
        results = []
        for plane, place in ((plain, "cpu"), (device, DEVICE)):
            plane.begin(*batch)
            results.append(forward(hidden.to(place)))
            plane.end()
        assert_same(*results)
        assert all(torch.equal(rows[total:], hidden[total:]) for rows in results[1])
        steered += any(not torch.equal(rows, hidden) for rows in results[1])
    device.settle()
    assert device.counters == plain.counters
    assert steered > 20
    assert len(device.table.vectors) > 8, "the table of vectors never grew"
    assert device._descriptor.data_ptr() == head


@where_it_runs
def test_what_was_captured_with_no_step_on_acts_in_the_steps_that_come(monkeypatch):
    """The launches are kept as a graph keeps them, arguments and all, while every table moves."""
    from brainpatch.backends import vllm_device_plane

    plain, device = Plane(LAYERS, HIDDEN, torch.float32), device_plane()
    hidden, launches = stream().to(DEVICE), []
    launch = vllm_device_plane.steer_rows
    with monkeypatch.context() as patched:
        patched.setattr(vllm_device_plane, "steer_rows", lambda *arguments: launches.append(arguments))
        for layer in LAYERS:
            torch.ops.brainpatch.steer(hidden, None, layer)
    assert [layer for _, _, layer in launches] == list(LAYERS)

    def replay() -> Tensor:
        hidden.copy_(stream())
        for arguments in launches:
            launch(*arguments)
        return hidden.cpu()

    assert torch.equal(replay(), stream()), "before any step"
    places = set()
    for number in range(6):
        requests = [f"r{i}" for i in range(3 * number + 1)]
        for plane in (plain, device):
            terms = [edit(layer, vector(10 * number + layer)) for layer in LAYERS]
            plane.table.admit(requests[-1], patches(*terms, edit(2, vector(number))), 4)
        batch = requests, np.ones(len(requests), dtype=np.int64), np.full(len(requests), 9)
        device.begin(*batch)
        got = replay()
        device.end()
        expected = passed_through(plain, batch)
        assert torch.equal(bits(got), bits(expected))
        assert not torch.equal(got, stream())
        assert torch.equal(replay(), stream()), "between steps"
        places.add((device._vectors.data_ptr(), device._cells.data_ptr()))
    assert len(places) > 3
    device.settle()
    assert device.counters["blocks_missed"] == 0
    assert device.counters["blocks_edited"] == 6 * len(LAYERS)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_captured_graph_follows_the_steps():
    device, hidden = device_plane(), stream().to(DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in LAYERS:
            torch.ops.brainpatch.steer(hidden, None, layer)
    plain = Plane(LAYERS, HIDDEN, torch.float32)
    traffic = Traffic(3, [plain, device])
    for _ in range(200):
        batch = traffic.step()
        device.begin(*batch)
        hidden.copy_(stream())
        graph.replay()
        device.end()
        expected = passed_through(plain, batch)
        assert torch.equal(bits(hidden.cpu()), bits(expected))
    device.settle()
    assert device.counters == plain.counters


# --- steps -------------------------------------------------------------------------------------------


@where_it_runs
def test_a_step_like_the_last_one_is_not_laid_out_again(monkeypatch):
    device, hidden = device_plane(), stream().to(DEVICE)
    device.table.admit("a", patches(edit(1, vector(1))), 4)
    first = decode(device, ["a", "b"], hidden)
    monkeypatch.setattr(device, "_write", None)
    assert_same(decode(device, ["a", "b"], hidden, position=10), first)
    assert not torch.equal(first[1], hidden.cpu())


@where_it_runs
@pytest.mark.parametrize("requests", [[], ["b"], ["b", "c", "d"]])
def test_between_and_beside_patched_steps_nothing_is_added(requests):
    device, hidden = device_plane(), stream().to(DEVICE)
    untouched = [hidden.cpu()] * 5
    assert_same(forward(hidden), untouched)
    device.table.admit("a", patches(edit(1, vector(1))), 4)
    decode(device, ["a"], hidden)
    assert_same(forward(hidden), untouched)
    assert_same(decode(device, requests, hidden), untouched)
    assert_same(forward(hidden), untouched)
    device.table.release("a")
    assert_same(decode(device, ["a"], hidden), untouched)


@where_it_runs
def test_in_a_step_blocks_without_edits_are_not_launched(monkeypatch):
    from brainpatch.backends import vllm_device_plane

    device, hidden, launched = device_plane(), stream().to(DEVICE), []
    device.table.admit("a", patches(edit(2, vector(1))), 4)
    monkeypatch.setattr(vllm_device_plane, "steer_rows", lambda *arguments: launched.append(arguments[2]))
    decode(device, ["a"], hidden)
    decode(device, ["b"], hidden)
    assert launched == [2]
    monkeypatch.setattr(vllm_device_plane, "_is_captured", lambda hidden: True)
    decode(device, ["a"], hidden)
    assert launched == [2, *range(5)]


@where_it_runs
def test_a_vector_that_is_no_number_stays_with_its_request():
    clean, device, hidden = device_plane(), device_plane(), stream().to(DEVICE)
    for plane in (clean, device):
        plane.table.admit("a", patches(edit(1, vector(1)), edit(2, vector(2))), 4)
    device.table.admit("x", patches(edit(1, np.full(HIDDEN, np.nan, dtype=np.float32))), 4)
    got = decode(device, ["a", "x", "b"], hidden)
    expected = decode(clean, ["a", "c", "b"], hidden)
    assert got[1][1].isnan().all()
    others = [row for row in range(ROWS) if row != 1]
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(bits(one[others]), bits(other[others]))


@where_it_runs
def test_a_slot_that_is_used_again_has_the_new_vector():
    device, hidden = device_plane(), stream().to(DEVICE)
    for number in range(20):
        device.table.admit("a", patches(edit(1, vector(number), 1.0)), 4)
        got = decode(device, ["a"], hidden)
        assert torch.equal(got[1][0], hidden.cpu()[0] + torch.from_numpy(vector(number)))
        device.table.release("a")
    assert len(device._vectors) == 8


@where_it_runs
def test_several_new_vectors_go_to_their_slots():
    """Some follow each other and some do not."""
    device, hidden = device_plane(), stream().to(DEVICE)
    for name, number in (("a", 1), ("b", 2), ("c", 3), ("d", 4)):
        device.table.admit(name, patches(edit(1, vector(number), 1.0)), 4)
    decode(device, ["a"], hidden)
    device.table.release("b")
    device.table.admit("e", patches(edit(1, vector(5), 1.0)), 4)
    device.table.admit("f", patches(edit(1, vector(6), 1.0)), 4)
    device.table.admit("g", patches(edit(1, vector(7), 1.0)), 4)
    got = decode(device, ["a", "c", "d", "e", "f", "g"], hidden)
    added = torch.from_numpy(np.stack([vector(number) for number in (1, 3, 4, 5, 6, 7)]))
    assert torch.equal(got[1][:6], hidden.cpu()[:6] + added)
    assert len(device._vectors) == 8


# --- what is measured and counted --------------------------------------------------------------------


@where_it_runs
def test_blocks_that_a_pass_left_out_are_counted():
    device, hidden = device_plane(), stream().to(DEVICE)
    device.table.admit("a", patches(edit(1, vector(1)), edit(4, vector(2))), 4)
    decode(device, ["a"], hidden)
    decode(device, ["a"], hidden, layers=[0, 1, 1, 2])
    device.settle()
    counted = {"steps": 2, "rows_edited": 4, "blocks_edited": 4, "blocks_missed": 1}
    assert device.counters == counted
    device.settle()
    assert device.counters == counted


@where_it_runs
def test_while_edits_are_proven_the_counters_are_there_at_the_end_of_a_step():
    device = device_plane()
    device.table.admit("a", patches(edit(1, vector(1))), 4)
    device.proving = True
    decode(device, ["a"], stream().to(DEVICE), layers=[0])
    assert device.counters["blocks_missed"] == 1


@where_it_runs
def test_a_trace_measures_what_the_plain_plane_measures():
    plain, device = Plane(LAYERS, HIDDEN, torch.float32), device_plane()
    for plane, place in ((plain, "cpu"), (device, DEVICE)):
        plane.trace = PlaneTrace()
        plane.trace.watch("a", "tag")
        plane.table.admit("a", patches(edit(1, vector(1)), edit(4, vector(2)), edit(4, vector(3))), 4)
        plane.table.admit("b", patches(edit(2, vector(4))), 4)
        decode(plane, ["b", "a"], stream().to(place))
    measured = device.trace.take("tag")
    assert measured == pytest.approx(plain.trace.take("tag"), rel=1e-6)
    assert measured.keys() == {(1, 9), (2, 9), (4, 9)}
    assert measured[1, 9] == pytest.approx(1.5 * np.linalg.norm(vector(1)), rel=1e-5)
    assert measured[2, 9] == 0


# --- the host's memory -------------------------------------------------------------------------------


@where_it_runs
def test_memory_is_written_again_only_when_the_copies_from_it_are_done():
    from brainpatch.backends.vllm_device_plane import _HostMemory

    seen: list[str] = []

    class Event:
        def __init__(self, name: str) -> None:
            self.name = name

        def record(self) -> None:
            seen.append(f"{self.name} copied")

        def synchronize(self) -> None:
            seen.append(f"{self.name} awaited")

    memory = _HostMemory(torch.device("cpu"))
    places = [memory.take(8).data_ptr() for _ in range(2)]
    assert places[0] != places[1]
    memory._pinned, memory._copied = True, [Event("even"), Event("odd")]
    target = torch.zeros(3, dtype=torch.int32)
    for number in range(3):
        taken = memory.take(8)
        assert taken.data_ptr() == places[number % 2]
        taken[:] = torch.arange(8) + 10 * number
        memory.copy((target, 4))
        assert target.tolist() == [10 * number + i for i in (4, 5, 6)]
    memory.copy((target, 0))
    assert target.tolist() == [20, 21, 22]
    assert seen == [
        *("odd awaited", "odd copied", "even awaited", "even copied"),
        *("odd awaited", "odd copied", "odd copied"),
    ]
