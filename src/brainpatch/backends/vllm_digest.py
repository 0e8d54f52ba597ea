"""A digest of the weights that a vLLM worker holds."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

_ROWS = 4


def weights_digest(model: nn.Module) -> str:
    """SHA-256 (hex) over names, dtypes, shapes and bytes of all parameters and buffers.

    CPU builds of vLLM move a linear layer's weight into a packed form that cannot be read and leave an
    empty parameter behind. Such a layer enters with its product with fixed rows: any change of a
    weight changes it.
    """
    seal = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        _add(seal, name, tensor)
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        packed = getattr(module, "cpu_linear", None)
        if packed is not None and isinstance(weight, torch.Tensor) and not weight.numel():
            names = ("input_size_per_partition", "input_size", "embedding_dim")
            width = next(getattr(module, name) for name in names if hasattr(module, name))
            _add(seal, path, packed(_fixed_rows(int(width), weight), weight, None))
    return seal.hexdigest()


def _fixed_rows(width: int, like: torch.Tensor) -> torch.Tensor:
    angles = torch.arange(1, _ROWS * width + 1, dtype=torch.float64).reshape(_ROWS, width)
    return torch.sin(angles).to(device=like.device, dtype=like.dtype)


def _add(seal: Any, name: str, tensor: torch.Tensor) -> None:
    seal.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
    seal.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
