"""Where kernels run: on the CPU, and only when they are interpreted."""

from __future__ import annotations

import os
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class CPUDriver(DriverBase):
    @classmethod
    def is_active(cls) -> bool:
        return os.environ.get("TRITON_INTERPRET") == "1"

    def get_current_target(self) -> GPUTarget:
        return GPUTarget(backend="cpu", arch="interpreter", warp_size=1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("interpreted kernels have no launcher in C++")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("interpreted kernels are not worth timing")
