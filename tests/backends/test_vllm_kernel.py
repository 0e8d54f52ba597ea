"""The fused kernel: held to the plain form, in Triton's interpreter, or on a GPU where there is one.

Triton decides when it is imported whether kernels are interpreted. So without a GPU these tests run in a
process of their own, with TRITON_INTERPRET=1, which the first of them starts.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.backends.steer_reference import steer_rows_reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
RIG = Path(__file__).parent.parent / "engines" / "vllm" / "triton_cpu"

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
where_it_runs = pytest.mark.skipif(
    not INTERPRETED and DEVICE == "cpu", reason="needs a GPU or TRITON_INTERPRET=1; see the first test"
)

LAYER = 1
CAPACITY = 16
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTEST_ADDOPTS")}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300, env={**kept, **environment}
    )


@needs_triton
@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="the tests below run in this process")
def test_the_kernel_in_the_interpreter():
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(done.stdout.split(" passed")[0].split()[-1]) > 30


@dataclass
class Tables:
    """The tables of a small model, on the device; `descriptor` as the kernel takes it."""

    vectors: Tensor
    index: Tensor
    coefficient: Tensor
    starts: Tensor
    counts: Tensor
    visits: Tensor

    def __post_init__(self) -> None:
        for name, table in vars(self).items():
            setattr(self, name, table.to(DEVICE))
        self.descriptor = torch.zeros(7, dtype=torch.int64, device=DEVICE)

    def all(self) -> tuple[Tensor, ...]:
        return self.vectors, self.index, self.coefficient, self.starts, self.counts

    def point(self, descriptor: Tensor) -> None:
        from brainpatch.backends.vllm_kernel import describe

        descriptor.copy_(torch.tensor(describe(*self.all(), self.visits)))


def tables(columns: int, width: int, *, slots: int = 6, capacity: int = CAPACITY, seed: int = 0) -> Tables:
    """Three layers; the columns of LAYER begin at 2, behind two of layer 0; layer 2 has none. Most cells are empty."""
    chance = torch.Generator().manual_seed(seed)
    vectors = torch.randn(slots, width, generator=chance)
    vectors[0] = -0.0
    index = torch.randint(1, slots, (columns + 2, capacity), generator=chance, dtype=torch.int32)
    index[torch.rand(index.shape, generator=chance) < 0.5] = 0
    coefficient = torch.randn(index.shape, generator=chance) * 3
    coefficient[index == 0] = 1.0
    return Tables(
        vectors,
        index,
        coefficient,
        torch.tensor([0, 2, columns + 2], dtype=torch.int32),
        torch.tensor([2, columns, 0], dtype=torch.int32),
        torch.zeros(3, dtype=torch.int64),
    )


def stream(rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    chance = torch.Generator().manual_seed(99)
    return (torch.randn(rows, width, generator=chance) * 5).to(DEVICE, dtype)


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32 if values.dtype == torch.float32 else torch.int16)


def cut_off(values: Tensor) -> Tensor:
    """float32 to bfloat16 as the interpreter does it: the lower bits fall away, where a GPU rounds."""
    return (values.view(torch.int32) & -0x10000).view(torch.float32).bfloat16()


def expected_of(hidden: Tensor, made: Tables, layer: int) -> Tensor:
    """What the plain form makes of a copy of `hidden`."""
    expected = hidden.clone()
    steer_rows_reference(expected, *made.all(), layer)
    if INTERPRETED and hidden.dtype == torch.bfloat16:
        total = torch.full(hidden.shape, -0.0)
        steer_rows_reference(total, *made.all(), layer)
        first, count = int(made.starts[layer]), int(made.counts[layer])
        rows = made.index[first : first + count, : len(hidden)].any(dim=0)
        expected[rows] = cut_off(hidden[rows].float() + cut_off(total[rows]).float())
    return expected


def steer(hidden: Tensor, made: Tables, layer: int = LAYER) -> Tensor:
    """Run the kernel on `hidden` in place, and return what is expected of it."""
    from brainpatch.backends.vllm_kernel import steer_rows

    expected = expected_of(hidden, made, layer)
    made.point(made.descriptor)
    steer_rows(hidden, made.descriptor, layer)
    return expected


def assert_equal(hidden: Tensor, expected: Tensor) -> None:
    """Bit for bit."""
    assert torch.equal(bits(hidden), bits(expected))


# --- the plain form --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_plain_form_is_the_sum_written_out(dtype):
    made, hidden = tables(3, 20), stream(9, 20, dtype)
    before = hidden.clone()
    steer_rows_reference(hidden, *made.all(), LAYER)
    for row in range(9):
        total = np.zeros(20, dtype=np.float32)
        for column in (2, 3, 4):
            if made.index[column, row]:
                vector = made.vectors[made.index[column, row]].cpu().numpy()
                total += np.float32(made.coefficient[column, row].item()) * vector
        expected = before[row] + torch.from_numpy(total).to(DEVICE, dtype)
        assert torch.equal(hidden[row], expected)
    assert not torch.equal(hidden, before)


def test_the_plain_form_leaves_rows_alone_that_have_nothing():
    made, hidden = tables(2, 4), torch.tensor([[-0.0, float("nan"), float("inf"), 1.0]] * 3)
    hidden = hidden.to(DEVICE, torch.bfloat16)
    hidden[:, 1] = torch.tensor([-0x2F], dtype=torch.int16).view(torch.bfloat16)  # a NaN with bits of its own
    made.index[:, :3], made.coefficient[:, :3] = 0, 1.0
    before = hidden.clone()
    steer_rows_reference(hidden, *made.all(), LAYER)
    steer_rows_reference(hidden, *made.all(), 2)
    assert_equal(hidden, before)


# --- the kernel is the plain form ------------------------------------------------------------------


@where_it_runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [0, 1, 3, 8])
@pytest.mark.parametrize("width", [1, 40, 1024, 1500])
def test_the_kernel_equals_the_plain_form(dtype, columns, width):
    hidden, made = stream(11, width, dtype), tables(columns, width)
    before = hidden.clone()
    assert_equal(hidden, steer(hidden, made))
    assert torch.equal(hidden, before) == (columns == 0)


@where_it_runs
def test_the_sum_is_made_in_float32_and_in_the_columns_order():
    """65536 + 0.25 - 65536 is 0.25, and infinite in float16; with 2**24 it is 0 in this order alone."""
    made = tables(3, 8, slots=4)
    made.vectors[1], made.vectors[2], made.vectors[3] = 65536.0, 0.25, 2.0**24
    made.index[2:, :2] = torch.tensor([[1, 3], [2, 2], [1, 3]], dtype=torch.int32, device=DEVICE)
    made.coefficient[2:, :2] = torch.tensor([1.0, 1.0, -1.0], device=DEVICE)[:, None]
    hidden = torch.zeros(2, 8, dtype=torch.float16, device=DEVICE)
    expected = steer(hidden, made)
    assert_equal(hidden, expected)
    assert hidden[:, 0].tolist() == [0.25, 0.0]


@where_it_runs
def test_the_sum_is_cast_once_and_added_once():
    """1 + 2**-11 + 2**-22 rounds up; but cast first, the sum is 2**-11, and 1 + 2**-11 rounds to 1."""
    made = tables(1, 8)
    made.vectors[1], made.index[2], made.coefficient[2] = 2.0**-11 + 2.0**-22, 1, 1.0
    hidden = torch.ones(2, 8, dtype=torch.float16, device=DEVICE)
    expected = steer(hidden, made)
    assert_equal(hidden, expected)
    assert hidden.unique().tolist() == [1.0]


@where_it_runs
@pytest.mark.parametrize("number", [-0.0, 0.0, 1e-45, -1e-45])
def test_the_smallest_numbers_and_the_signs_of_zero_are_kept(number):
    made = tables(2, 8)
    made.index[2:], made.coefficient[2:] = 1, 1.0
    made.vectors[1] = torch.tensor([-0.0, 0.0, 1e-45, -1e-45] * 2, device=DEVICE)
    hidden = torch.full((1, 8), number, device=DEVICE)
    expected = steer(hidden, made)
    assert_equal(hidden, expected)


# --- rows ------------------------------------------------------------------------------------------


@where_it_runs
def test_an_idle_layer_reads_nothing_else():
    """Its other addresses may be anything: following one of these would end the process."""
    from brainpatch.backends.vllm_kernel import steer_rows

    made, hidden = tables(3, 40), stream(5, 40)
    before = hidden.clone()
    descriptor = torch.tensor([0, 0, 0, CAPACITY, 0, made.counts.data_ptr(), 0], device=DEVICE)
    steer_rows(hidden, descriptor, 2)
    assert_equal(hidden, before)


@where_it_runs
def test_there_may_be_no_rows():
    made, hidden = tables(3, 40), stream(0, 40)
    assert steer(hidden, made).shape == (0, 40)


@where_it_runs
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_edits_keep_every_bit(dtype):
    """-0.0, infinities, the smallest numbers, and NaNs with bits of their own; also rows that only pad."""
    made, hidden = tables(3, 40), stream(8, 40, dtype)
    steered = [1, 4]
    idle = [row for row in range(8) if row not in steered]
    made.index[:, idle], made.coefficient[:, idle] = 0, 1.0
    made.index[2:, steered] = 2
    strange = torch.tensor([-0.0, float("inf"), -float("inf"), 0.0], device=DEVICE).to(dtype)
    hidden[idle, :4] = strange
    patterns = bits(hidden)
    patterns[idle, 4:7] = torch.tensor([-1, 1, -3], dtype=patterns.dtype, device=DEVICE)  # NaN, tiny, NaN
    hidden = patterns.view(dtype)
    before = hidden.clone()
    assert_equal(hidden, steer(hidden, made))
    assert torch.equal(bits(hidden)[idle], bits(before)[idle])
    assert (hidden[steered] != before[steered]).any(dim=1).all()


@where_it_runs
def test_rows_may_lie_apart():
    room = stream(7, 100)
    before = room.clone()
    hidden = room[:, 16:56]
    assert torch.equal(hidden, steer(hidden, tables(3, 40)))
    assert torch.equal(room[:, :16], before[:, :16])
    assert torch.equal(room[:, 56:], before[:, 56:])
    assert not torch.equal(room, before)


@where_it_runs
def test_rows_that_the_tables_do_not_reach_get_nothing():
    hidden, made = stream(9, 40), tables(3, 40, capacity=5)
    before = hidden.clone()
    assert_equal(hidden, steer(hidden, made))
    assert (hidden[:5] != before[:5]).any()
    assert_equal(hidden[5:], before[5:])


@where_it_runs
@pytest.mark.parametrize("width", [40, 3000])
def test_a_launch_is_counted_once_if_its_layer_has_columns(width):
    made = tables(1, width, capacity=2)
    made.visits += torch.tensor([2**33, 0, 7], device=DEVICE)
    for layer in (1, 2, 0, 1):
        steer(stream(3, width), made, layer)
    assert made.visits.tolist() == [2**33 + 1, 2, 7]


@where_it_runs
def test_every_row_gets_its_own():
    """Neighbours differ in vector, coefficient and column, and each is what it is alone in the batch."""
    made, hidden = tables(3, 40), stream(CAPACITY, 40)
    before = hidden.clone()
    steer(hidden, made)
    for row in range(CAPACITY):
        only = tables(3, 40)
        others = [other for other in range(CAPACITY) if other != row]
        only.index[:, others], only.coefficient[:, others] = 0, 1.0
        alone = before.clone()
        steer(alone, only)
        assert torch.equal(alone[row], hidden[row])
        assert torch.equal(alone[others], before[others])


@where_it_runs
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_vector_that_is_no_number_stays_in_its_row(poison):
    made, hidden = tables(3, 40), stream(8, 40)
    made.index[made.index == 5] = 4
    made.index[3, 2] = 5
    clean = hidden.clone()
    steer(clean, made)
    made.vectors[5] = poison
    steer(hidden, made)
    assert not hidden[2].isfinite().any()
    others = [row for row in range(8) if row != 2]
    assert torch.equal(bits(hidden)[others], bits(clean)[others])


@where_it_runs
def test_a_layer_gets_its_own_columns():
    made, hidden = tables(3, 40), stream(8, 40)
    other = hidden.clone()
    assert torch.equal(hidden, steer(hidden, made, 1))
    assert torch.equal(other, steer(other, made, 0))
    assert not torch.equal(hidden, other)


# --- tables that move ------------------------------------------------------------------------------


@where_it_runs
def test_the_same_descriptor_follows_tables_that_have_grown():
    from brainpatch.backends.vllm_kernel import steer_rows

    descriptor = torch.zeros(7, dtype=torch.int64, device=DEVICE)
    address = descriptor.data_ptr()
    for columns, slots, capacity in ((1, 3, 16), (4, 40, 64), (2, 9, 24)):
        made, hidden = tables(columns, 40, slots=slots, capacity=capacity, seed=columns), stream(16, 40)
        expected = expected_of(hidden, made, LAYER)
        made.point(descriptor)
        assert descriptor.data_ptr() == address
        steer_rows(hidden, descriptor, LAYER)
        assert_equal(hidden, expected)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_captured_launch_follows_tables_that_have_grown():
    from brainpatch.backends.vllm_kernel import steer_rows

    small, large = tables(1, 40, slots=3), tables(4, 40, slots=40, capacity=64)
    hidden = stream(16, 40)
    fresh = hidden.clone()
    steer(hidden, small)  # compiles
    descriptor = small.descriptor
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steer_rows(hidden, descriptor, LAYER)
    for made in (small, large, small):
        expected = expected_of(fresh, made, LAYER)
        made.point(descriptor)
        hidden.copy_(fresh)
        graph.replay()
        torch.cuda.synchronize()
        assert_equal(hidden, expected)


# --- what is refused -------------------------------------------------------------------------------


@where_it_runs
def test_a_table_that_would_be_misread_is_refused():
    from brainpatch.backends.vllm_kernel import describe

    made = tables(3, 40)
    good = {
        name: getattr(made, name)
        for name in ("vectors", "index", "coefficient", "starts", "counts", "visits")
    }
    reasons = {
        r"index must be contiguous torch\.int32, and is torch\.int64": {"index": made.index.long()},
        r"visits must be contiguous torch\.int64, and is torch\.int32": {"visits": made.visits.int()},
        r"vectors must be contiguous": {"vectors": made.vectors[:, ::2]},
        r"counts must start at a multiple of 16 bytes": {"counts": made.counts[1:]},
        r"index and coefficient.* must be of one shape": {"coefficient": made.coefficient[:3]},
        r"starts, counts and visits, must be of one shape": {"visits": made.visits[:2]},
    }
    for reason, wrong in reasons.items():
        with pytest.raises(ValueError, match=reason):
            describe(**{**good, **wrong})
    assert len(describe(**good)) == 7


@where_it_runs
def test_rows_of_scattered_numbers_are_refused():
    from brainpatch.backends.vllm_kernel import steer_rows

    made = tables(1, 40)
    for hidden in (stream(40, 8).t(), stream(8, 40)[:, :, None]):
        with pytest.raises(ValueError, match="rows of adjacent numbers"):
            steer_rows(hidden, made.descriptor, LAYER)


# --- without a GPU, for GPUs -----------------------------------------------------------------------

COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from brainpatch.backends.vllm_kernel import _OPTIONS, _steer

kinds = {"hidden": "*DTYPE", "row_stride": "i32", "descriptor": "*i64", "layer": "i32", "width": "i32"}
aligned = {(place,): [["tt.divisibility", 16]] for place in (0, 1, 2, 4)}
for dtype in ("fp32", "fp16", "bf16"):
    signature = {name: kind.replace("DTYPE", dtype) for name, kind in kinds.items()} | {"BLOCK": "constexpr"}
    source = ASTSource(_steer, signature, {"BLOCK": 1024}, aligned)
    made = compile(source, target=GPUTarget("cuda", 90, 32), options=_OPTIONS)
    text = made.asm["ptx"]
    assert len(made.asm["cubin"]) > 1000
    loads = text.count("ld.global.v4"), text.count("st.global.v4")
    assert loads == ((4, 2) if dtype == "fp32" else (3, 1)), "a thread does not move 16 bytes at a time"
    assert "mul.rn.f32" in text and "fma" not in text and "ftz" not in text, "PyTorch rounds otherwise"
    assert dtype == "fp32" or "cvt.rn" in text, "the sum is cut off"
    print(dtype, "compiled")
"""


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel is not compiled")
def test_it_compiles_for_a_gpu_that_is_not_here(tmp_path):
    """Vector loads and stores, products and sums rounded apart, nothing flushed to zero."""
    from triton.backends import backends

    if "nvidia" not in backends:
        pytest.skip("this Triton has no NVIDIA backend")
    done = python("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("compiled") == 3


# --- the rig ---------------------------------------------------------------------------------------

RIG_WORKS = """
import torch
from triton.backends import backends
from triton.runtime import driver
from vllm.triton_utils import HAS_TRITON, tl, triton

assert backends["cpu"].driver.__module__ == "brainpatch_triton_cpu.driver"
assert driver.active.get_current_target().backend == "cpu"
assert HAS_TRITON

@triton.jit
def double(numbers, BLOCK: tl.constexpr):
    at = numbers + tl.arange(0, BLOCK)
    tl.store(at, tl.load(at) * 2)

numbers = torch.arange(4.0)
double[(1,)](numbers, BLOCK=4)
print(numbers.tolist())
"""


@needs_triton
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.skipif(
    INTERPRETED or DEVICE == "cuda", reason="for machines without a GPU, in a process of its own"
)
def test_the_rig_gives_vllm_a_triton_that_interprets(tmp_path):
    script = tmp_path / "rig_works.py"
    script.write_text(RIG_WORKS)
    path = os.pathsep.join([str(RIG), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = python(str(script), PYTHONPATH=path, TRITON_INTERPRET="1", VLLM_LOGGING_LEVEL="ERROR")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("[0.0, 2.0, 4.0, 6.0]")
