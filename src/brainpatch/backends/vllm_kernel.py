"""What a block adds to its rows, as one Triton kernel that may be captured in a CUDA graph.

A captured launch repeats with the very arguments that it was captured with, while the tables behind it are
allocated anew whenever they grow. So the kernel takes one small tensor that never moves, the descriptor,
which holds the addresses of the tables, and looks them up each time it runs. A table that has grown costs
a copy of seven numbers, and no new capture.

Import this where Triton can run: on CUDA, or with TRITON_INTERPRET=1 set before Triton is imported.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

DESCRIPTOR_SIZE = 7
"""Addresses of vectors, index and coefficient; row capacity; addresses of starts, counts and visits."""

ALIGNMENT = 16
"""Bytes. The kernel promises it to the compiler, so that a thread may load four numbers at once."""

_DTYPES = {"vectors": torch.float32, "coefficient": torch.float32, "visits": torch.int64}

_BLOCK = 1024
"""Numbers of a row that one program adds: eight a thread, or 16 bytes of a half-precision row."""

_OPTIONS = {"enable_fp_fusion": False}
"""A product and a sum are rounded apart, as they are in PyTorch."""


def describe(
    vectors: Tensor, index: Tensor, coefficient: Tensor, starts: Tensor, counts: Tensor, visits: Tensor
) -> list[int]:
    """What the descriptor of these tables holds, to be copied into an int64 tensor [DESCRIPTOR_SIZE].

    `vectors` is float32 [slots, hidden_size]; `index` (int32) and `coefficient` (float32) are
    [columns, capacity], and rows from `capacity` on get nothing; `starts` and `counts` are int32 [layers];
    `visits`, int64 [layers], is where launches that found something to add are counted, since a graph that is
    replayed tells the host nothing. The descriptor holds addresses alone: the owner keeps the tables alive
    until every launch that may read them has run, and copies a new descriptor on the stream of the launches.
    Raises ValueError for a table that the kernel would misread.
    """
    tables = {"vectors": vectors, "index": index, "coefficient": coefficient}
    for name, table in {**tables, "starts": starts, "counts": counts, "visits": visits}.items():
        expected = _DTYPES.get(name, torch.int32)
        if table.dtype != expected or not table.is_contiguous():
            raise ValueError(f"{name} must be contiguous {expected}, and is {table.dtype}")
        if table.data_ptr() % ALIGNMENT:
            raise ValueError(f"{name} must start at a multiple of {ALIGNMENT} bytes")
    if index.shape != coefficient.shape or not starts.shape == counts.shape == visits.shape:
        raise ValueError("index and coefficient, and starts, counts and visits, must be of one shape")
    return [
        vectors.data_ptr(),
        index.data_ptr(),
        coefficient.data_ptr(),
        index.shape[1],
        starts.data_ptr(),
        counts.data_ptr(),
        visits.data_ptr(),
    ]


def steer_rows(hidden: Tensor, descriptor: Tensor, layer: int) -> None:
    """Add to each row of `hidden` [rows, hidden_size], in place, what `layer` has for it.

    A row gets the sum over the layer's columns, in their order and in float32, of coefficient times vector,
    cast once to the dtype of `hidden` and added once; the tables are those that `descriptor` (int64
    [DESCRIPTOR_SIZE], see `describe`) points to when the kernel runs. `hidden` is float32, bfloat16 or float16, and its
    rows may lie apart, but their numbers must not: ValueError otherwise. The first launch for a dtype
    compiles, and must not be one under capture.
    """
    if hidden.dim() != 2 or hidden.stride(1) != 1:
        raise ValueError(f"hidden must be rows of adjacent numbers, and has strides {hidden.stride()}")
    rows, width = hidden.shape
    block = min(_BLOCK, triton.next_power_of_2(width))
    _steer[(rows, triton.cdiv(width, block))](
        hidden,
        hidden.stride(0),
        descriptor,
        layer,
        width,
        BLOCK=block,
        **_OPTIONS,
    )


@triton.jit(do_not_specialize=["layer"])  # type: ignore[untyped-decorator]
def _steer(hidden, row_stride, descriptor, layer, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One block of one row. A layer with nothing to add ends after a few loads."""
    counts = tl.load(descriptor + 5).to(tl.pointer_type(tl.int32))
    count = tl.load(counts + layer)
    row = tl.program_id(0).to(tl.int64)
    if (count > 0) & (row == 0) & (tl.program_id(1) == 0):
        visits = tl.load(descriptor + 6).to(tl.pointer_type(tl.int64)) + layer
        tl.store(visits, tl.load(visits) + 1)  # no other launch runs beside this one
    capacity = tl.load(descriptor + 3)
    if (count > 0) & (row < capacity):
        vectors = tl.multiple_of(tl.load(descriptor).to(tl.pointer_type(tl.float32)), 16)
        index = tl.load(descriptor + 1).to(tl.pointer_type(tl.int32))
        coefficient = tl.load(descriptor + 2).to(tl.pointer_type(tl.float32))
        starts = tl.load(descriptor + 4).to(tl.pointer_type(tl.int32))
        first = tl.load(starts + layer)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < width
        # -0.0, to which anything may be added without a trace; written as bits, since 0.0 == -0.0.
        total = tl.full([BLOCK], -2147483648, tl.int32).to(tl.float32, bitcast=True)
        touched = 0
        for column in range(first, first + count):
            cell = column * capacity + row
            slot = tl.load(index + cell)
            if slot != 0:
                vector = tl.load(vectors + slot.to(tl.int64) * width + at, mask=inside, other=0.0)
                total += tl.load(coefficient + cell) * vector
                touched = 1
        if touched != 0:
            target = hidden + row * row_stride + at
            kept = tl.load(target, mask=inside, other=0.0)
            # In float32 and rounded once, which is the sum in the narrower dtype.
            added = total.to(kept.dtype).to(tl.float32)
            tl.store(target, (kept.to(tl.float32) + added).to(kept.dtype), mask=inside)
