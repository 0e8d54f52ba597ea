"""Requests that break, the blocks that they leave, and where the rows of a step stand in their requests.

vLLM's scheduler and runner are stand-ins with the fields that are read; the cache is a real tensor.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from brainpatch.backends import vllm_health
from brainpatch.backends.vllm_health import Health, check_layout
from brainpatch.backends.vllm_runners import _positions
from brainpatch.errors import CapabilityError

BLOCKS, BLOCK_SIZE = 10, 4
NAN, INFINITY = float("nan"), float("inf")


def new(request, blocks, computed=0):
    """A request that the scheduler announces; `blocks` of one group, or a tuple of groups."""
    groups = blocks if isinstance(blocks, tuple) else (blocks,)
    return SimpleNamespace(req_id=request, block_ids=groups, num_computed_tokens=computed)


def scheduled(*announced, going_on=(), resumed=()):
    """A step. `going_on`: (request, blocks or None, computed tokens)."""
    return SimpleNamespace(
        scheduled_new_reqs=list(announced),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[request for request, _, _ in going_on],
            new_block_ids=[None if blocks is None else (blocks,) for _, blocks, _ in going_on],
            num_computed_tokens=[computed for _, _, computed in going_on],
            resumed_req_ids=set(resumed),
        ),
    )


class Runner:
    """Two layers' caches of ones, one with the blocks first and one with keys and values first."""

    def __init__(self, sizes=(BLOCK_SIZE,)):
        groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size)) for size in sizes]
        self.kv_cache_config = SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=groups)
        self.kv_caches = [torch.ones(BLOCKS, 2, BLOCK_SIZE), (torch.ones(2, BLOCKS, BLOCK_SIZE),)]

    def zeroed(self):
        """The blocks that are zero, the same in every layer."""
        first, (second,) = self.kv_caches
        found = [block for block in range(BLOCKS) if not first[block].any()]
        assert found == [block for block in range(BLOCKS) if not second[:, block].any()]
        assert int((first == 0).sum()) == int((second == 0).sum()) == len(found) * 2 * BLOCK_SIZE
        return found


def step(health, runner, output):
    """What the worker does before a forward pass, for requests that were admitted."""
    health.catch_up()
    health.clean(output, runner)
    health.note_blocks(output)


def look(health, *rows):
    """A forward pass: (request, what its rows hold)."""
    values = [value for _, some in rows for value in some]
    hidden = torch.zeros(len(values) + 1, 3)  # a padding row, which nobody owns
    hidden[:-1, 1] = torch.tensor(values)
    hidden[-1] = NAN
    health.look(hidden, [request for request, _ in rows], np.array([len(some) for _, some in rows]))


def broke(health, request, blocks, runner):
    """A patched request that holds `blocks` and breaks."""
    health.admit(request, f"tag of {request}")
    step(health, runner, scheduled(new(request, blocks)))
    look(health, (request, [0.0, NAN]))


# --- who broke -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, INFINITY, -INFINITY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_request_with_the_row_is_found_and_no_other(value, dtype):
    health = Health()
    for request in "abc":
        health.admit(request, f"tag of {request}")
    hidden = torch.ones(6, 4, dtype=dtype)
    hidden[3, 2] = value
    health.look(hidden, ["a", "plain", "b", "c"], np.array([1, 2, 1, 2]))
    assert list(health.broken) == ["tag of b"]


def test_numbers_that_are_merely_large_are_not_broken():
    health = Health()
    health.admit("a", "a")
    health.look(torch.full((2, 8), 60000.0, dtype=torch.float16), ["a"], np.array([2]))
    assert not health.broken


def test_padding_and_requests_without_patches_are_nobodys():
    health = Health()
    health.admit("a", "a")
    look(health, ("plain", [NAN]), ("a", [0.0]))
    assert not health.broken
    health.release("a")
    look(health, ("a", [NAN]))
    assert not health.broken


def test_a_request_without_a_tag_is_found_too_but_not_by_name():
    runner, health = Runner(), Health()
    health.admit("a", "")
    step(health, runner, scheduled(new("a", [3])))
    look(health, ("a", [NAN]))
    health.release("a")
    assert not health.broken
    step(health, runner, scheduled(new("plain", [3])))
    assert runner.zeroed() == [3]


def test_the_last_4096_are_remembered():
    health = Health()
    for number in range(4100):
        health.admit(str(number), str(number))
        look(health, (str(number), [NAN]))
        health.release(str(number))
    assert list(health.broken) == [str(number) for number in range(4, 4100)]


# --- blocks ----------------------------------------------------------------------------------------


def test_blocks_of_a_broken_request_are_zero_when_they_are_handed_out_again():
    runner, health = Runner(), Health()
    broke(health, "a", [1, 2], runner)
    step(health, runner, scheduled(going_on=[("a", [5], 8)]))
    health.release("a")
    assert runner.zeroed() == []
    step(health, runner, scheduled(new("plain", [2, 3])))
    assert runner.zeroed() == [2]
    step(health, runner, scheduled(going_on=[("plain", [5], 8), ("other", None, 4)]))
    assert runner.zeroed() == [2, 5]
    step(health, runner, scheduled(new("later", [7, 1])))
    assert runner.zeroed() == [1, 2, 5]


def test_a_block_is_zeroed_once():
    runner, health = Runner(), Health()
    broke(health, "a", [1], runner)
    health.release("a")
    step(health, runner, scheduled(new("plain", [1])))
    for cache in (runner.kv_caches[0], runner.kv_caches[1][0]):
        cache.fill_(1.0)
    step(health, runner, scheduled(new("later", [1])))
    assert runner.zeroed() == []


def test_blocks_of_a_sound_request_are_left_alone():
    runner, health = Runner(), Health()
    broke(health, "a", [1], runner)
    health.admit("b", "b")
    step(health, runner, scheduled(new("b", [2, 3])))
    look(health, ("b", [0.0]))
    health.release("a")
    health.release("b")
    step(health, runner, scheduled(new("plain", [2, 3])))
    assert runner.zeroed() == []


def test_blocks_with_a_prefix_that_is_shared_keep_it():
    """What is computed already is read and not written: a request with the same patches may share it."""
    runner, health = Runner(), Health()
    broke(health, "a", [1, 2, 3], runner)
    health.release("a")
    step(health, runner, scheduled(new("b", [1, 2, 3], computed=2 * BLOCK_SIZE)))
    assert runner.zeroed() == [3]
    step(health, runner, scheduled(new("plain", [2])))
    assert runner.zeroed() == [2, 3]


def test_a_request_that_is_resumed_keeps_what_is_computed_and_one_that_goes_on_has_new_blocks():
    runner, health = Runner(), Health()
    broke(health, "a", [1, 2, 3, 4], runner)
    health.release("a")
    output = scheduled(going_on=[("b", [1, 2], BLOCK_SIZE), ("c", [3], 3 * BLOCK_SIZE)], resumed="b")
    step(health, runner, output)
    assert runner.zeroed() == [2, 3]


def test_each_group_of_blocks_has_its_own_size():
    runner, health = Runner(sizes=(4, 8)), Health()
    broke(health, "a", ([1, 2], [3, 4]), runner)
    health.release("a")
    step(health, runner, scheduled(new("b", ([1, 2], [3, 4]), computed=8)))
    assert runner.zeroed() == [4]


def test_blocks_that_a_broken_request_loses_while_it_waits_are_zeroed_as_well():
    """A preempted request is not released, and its blocks go to others in the same step."""
    runner, health = Runner(), Health()
    broke(health, "a", [1, 2], runner)
    step(health, runner, scheduled(new("plain", [2])))
    assert runner.zeroed() == [2]
    step(health, runner, scheduled(going_on=[("a", [6, 7], 0)], resumed="a"))
    health.release("a")
    step(health, runner, scheduled(new("later", [6])))
    assert runner.zeroed() == [2, 6]


def test_a_name_that_comes_back_starts_sound():
    runner, health = Runner(), Health()
    broke(health, "a", [1], runner)
    health.release("a")
    health.admit("a", "again")
    step(health, runner, scheduled(new("a", [2])))
    look(health, ("a", [0.0]))
    health.release("a")
    step(health, runner, scheduled(new("plain", [2])))
    assert list(health.broken) == ["tag of a"]
    assert runner.zeroed() == []


def test_a_cache_whose_blocks_are_made_of_smaller_ones():
    runner, health = Runner(), Health()
    runner.kv_caches = [torch.ones(4 * BLOCKS, 3)]
    broke(health, "a", [2], runner)
    health.release("a")
    step(health, runner, scheduled(new("plain", [2])))
    assert torch.where(runner.kv_caches[0].sum(dim=1) == 0)[0].tolist() == [8, 9, 10, 11]


def test_a_cache_that_is_not_understood_is_refused_when_the_model_is_loaded():
    runner = Runner()
    check_layout(runner)
    runner.kv_caches.append(torch.ones(3, 3, BLOCKS))
    with pytest.raises(CapabilityError, match=r"BP502.*\(3, 3, 10\)"):
        check_layout(runner)


# --- a device, which runs behind the host ----------------------------------------------------------


class OnDevice:
    """A tensor that does not lie in the host's memory; its copy is there at once, but must not be read yet."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, values):
        self.values = values

    def __getitem__(self, rows):
        return OnDevice(self.values[rows])

    def sum(self, **named):
        return OnDevice(self.values.sum(**named))

    def copy_(self, other, *, non_blocking):
        assert non_blocking
        return other.values


@pytest.fixture
def device(monkeypatch):
    """The device's events in order; one is over when its `done` is set."""
    events = []

    class Event:
        def __init__(self):
            self.done = False

        def record(self):
            events.append(self)

        def query(self):
            return self.done

        def synchronize(self):
            self.done = True

    def empty(total, *, dtype, pin_memory):
        assert pin_memory
        return OnDevice(torch.full((total,), NAN, dtype=dtype))

    stand_in = SimpleNamespace(empty=empty, float32=torch.float32, cuda=SimpleNamespace(Event=Event))
    monkeypatch.setattr(vllm_health, "torch", stand_in)
    return events


def look_on_device(health, request, value):
    health.look(OnDevice(torch.tensor([[value, 1.0]])), [request], np.array([1]))


def test_a_step_is_judged_when_the_device_has_done_it_and_in_order(device):
    health = Health()
    for request in "ab":
        health.admit(request, request)
        look_on_device(health, request, NAN)
    device[1].done = True
    health.catch_up()
    assert not health.broken
    device[0].done = True
    health.catch_up()
    assert list(health.broken) == ["a", "b"]


def test_a_request_that_is_over_before_its_last_step_is_judged_is_found_still(device):
    runner, health = Runner(), Health()
    health.admit("a", "a")
    step(health, runner, scheduled(new("a", [4])))
    look_on_device(health, "a", NAN)
    health.release("a")
    health.admit("a", "another of the same name")
    device[0].done = True
    step(health, runner, scheduled(new("a", [4])))
    assert list(health.broken) == ["a"]
    assert runner.zeroed() == [4]


def test_steps_are_waited_for_where_blocks_change_hands_at_once(device):
    runner, health = Runner(), Health()
    health.admit("a", "a")
    step(health, runner, scheduled(new("a", [4])))
    look_on_device(health, "a", NAN)
    health.catch_up()
    assert (list(health.broken), health.total) == ([], 0)
    health.catch_up(wait=True)
    assert (list(health.broken), health.total) == (["a"], 1)
    health.clean(scheduled(new("plain", [4])), runner)
    assert runner.zeroed() == [4]


# --- positions -------------------------------------------------------------------------------------

STARTS = np.array([0, 3, 3, 4, 6], dtype=np.int64)
COMPUTED = np.array([5, 9, 0, 2], dtype=np.int32)
COUNTED = [5, 6, 7, 0, 2, 3]


def test_positions_are_the_models_own_where_the_host_can_read_them():
    given = torch.tensor([4, 5, 6, 0, 2, 3, 99, 99])  # rejected drafts took the first request back
    found = _positions(given, STARTS, COMPUTED)
    assert found.tolist() == [4, 5, 6, 0, 2, 3]
    assert found.dtype == np.int64


@pytest.mark.parametrize(
    "given",
    [None, torch.zeros(3, 8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64, device="meta")],
    ids=["none", "several for a row", "on a device"],
)
def test_positions_are_counted_where_they_cannot_be_read(given):
    found = _positions(given, STARTS, COMPUTED)
    assert found.tolist() == COUNTED
    assert found.dtype == np.int64


def test_positions_are_a_copy_that_later_steps_do_not_change():
    given = torch.arange(6, dtype=torch.int64)
    found = _positions(given, STARTS, COMPUTED)
    given.fill_(7)
    assert found.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_step_without_rows_has_no_positions():
    assert _positions(None, np.zeros(1, np.int64), np.zeros(0, np.int32)).tolist() == []
