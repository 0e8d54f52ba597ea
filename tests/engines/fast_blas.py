"""MLX on Linux computes with a reference BLAS, which is ten times slower than OpenBLAS at matrix products.

An OpenBLAS that is loaded before MLX is found first. The wheel of opencv-python-headless, which vLLM brings, has one;
where it is not there, tests are slow and right.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path


def load() -> None:
    """Load an OpenBLAS for everything that is loaded later."""
    spec = importlib.util.find_spec("cv2")
    if spec is None or spec.origin is None:
        return
    for library in (Path(spec.origin).parent.parent / "opencv_python_headless.libs").glob("libopenblas*"):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
