"""Reading the residual stream: one number array per text and block, from the Transformers engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from brainpatch.backends.families import can_be_padded

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from brainpatch.backends.transformers_backend import TransformersBackend


class Reading(NamedTuple):
    """Token ids of one text, and the positions first..last-1 over which its stream is averaged."""

    ids: tuple[int, ...]
    first: int
    last: int


class Activations(NamedTuple):
    """`means`: float64 [readings, layers, hidden]; `norms`: float64 [layers].

    `norms` holds the mean L2 norm of the residual stream over all positions read, block by block.
    """

    means: NDArray[np.float64]
    norms: NDArray[np.float64]


def read_activations(
    backend: TransformersBackend,
    readings: Sequence[Reading],
    layers: Sequence[int],
    *,
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> Activations:
    """The output of each block in `layers`, averaged over each reading's positions.

    Texts are padded on the right, where no position that is read can see the padding; a family that cannot be
    padded is read one text at a time. A block's own
    output is taken, so the last block is read before the final norm. `progress(done, total)` is called
    after each batch.
    """
    import numpy as np
    import torch

    means = np.zeros((len(readings), len(layers), backend.describe_model().hidden_size))
    norms = np.zeros(len(layers))
    positions = 0
    order = sorted(range(len(readings)), key=lambda i: len(readings[i].ids))
    if not can_be_padded(backend.model.config):
        batch_size = 1
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        width = len(readings[batch[-1]].ids)
        ids = torch.zeros((len(batch), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(batch):
            length = len(readings[i].ids)
            ids[row, :length] = torch.tensor(readings[i].ids)
            mask[row, :length] = 1
        outputs = _block_outputs(backend, ids, mask, layers)
        for row, i in enumerate(batch):
            _, first, last = readings[i]
            positions += last - first
            for column, output in enumerate(outputs):
                stream = output[row, first:last].double()
                means[i, column] = stream.mean(dim=0).cpu().numpy()
                norms[column] += float(stream.norm(dim=-1).sum())
        if progress is not None:
            progress(min(start + batch_size, len(order)), len(order))
    return Activations(means, norms / positions)


def _block_outputs(backend: TransformersBackend, ids: Any, mask: Any, layers: Sequence[int]) -> list[Any]:
    import torch

    caught: dict[int, Any] = {}
    thread = threading.get_ident()

    def catch(layer: int) -> Callable[..., None]:
        def hook(module: Any, arguments: Any, output: Any) -> None:
            if threading.get_ident() != thread:  # another thread generates on the same model
                return
            caught[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [backend.blocks[layer].register_forward_hook(catch(layer)) for layer in set(layers)]
    try:
        with torch.no_grad():
            device = backend.model.device
            backend.model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return [caught[layer] for layer in layers]
