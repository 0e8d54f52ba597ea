"""What a block adds to its rows, in plain PyTorch: the meaning that the fused kernel is held to."""

from __future__ import annotations

from torch import Tensor


def steer_rows_reference(
    hidden: Tensor,
    vectors: Tensor,
    index: Tensor,
    coefficient: Tensor,
    starts: Tensor,
    counts: Tensor,
    layer: int,
) -> None:
    """Add to each row of `hidden` [rows, hidden_size], in place, what `layer` has for it.

    `vectors` is float32 [slots, hidden_size]; `index` (int32) and `coefficient` (float32) are
    [columns, capacity] with capacity >= rows; `starts` and `counts` (int32 [layers]) say which columns are the
    layer's. A row gets the sum over these columns, in their order and in float32, of coefficient times
    vector, cast once to the dtype of `hidden` and added once. Rows whose indices are all 0 are not touched.
    """
    first, count = int(starts[layer]), int(counts[layer])
    columns = range(first, first + count)
    slots = index[first : first + count, : len(hidden)]
    rows = slots.any(dim=0).nonzero().squeeze(1)
    if not len(rows):
        return
    terms = (coefficient[column, rows, None] * vectors[index[column, rows]] for column in columns)
    total = next(terms)
    for term in terms:
        total += term
    hidden.index_add_(0, rows, total.to(hidden.dtype))
