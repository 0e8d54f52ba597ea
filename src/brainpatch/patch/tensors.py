"""vectors.safetensors: strict reading, reproducible writing, and the numbers inside.

Payloads stay packed as they are in the file. Nothing here needs numpy except `Tensor.float32`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from brainpatch.errors import PatchFormatError, SafetensorsError
from brainpatch.patch import strict_json
from brainpatch.patch.limits import MAX_TENSOR_HEADER_BYTES, MAX_TENSORS
from brainpatch.patch.text import visible

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

METADATA: Final = {"format": "brainpatch-vectors-v1"}
"""What the writer puts under `__metadata__`. Readers do not look at it."""


class _Kind(NamedTuple):
    """A dtype: bytes an element, and two bit patterns of a positive number."""

    itemsize: int
    code: str
    large: int
    """From here on a vector's norm may overflow float32 (2**100); for F16, which cannot, infinity."""
    overflow: int
    """From here on the element is NaN, infinite, or rounds to infinity in float32."""


_KINDS: Final = {
    "BF16": _Kind(2, "", 0x7180, 0x7F80),
    "F16": _Kind(2, "e", 0x7C00, 0x7C00),
    "F32": _Kind(4, "f", 0x7180_0000, 0x7F80_0000),
    "F64": _Kind(8, "d", 0x4630_0000_0000_0000, 0x47EF_FFFF_F000_0000),
}
_FLOAT32_OVERFLOW: Final = 2.0**128 - 2.0**103


def supported_dtypes() -> tuple[str, ...]:
    """The dtypes that a vector may be stored in, sorted."""
    return tuple(_KINDS)


class Tensor:
    """An array of finite numbers as it lies in the file: dtype, shape and little-endian bytes. Immutable.

    `Tensor(dtype, shape, data)` encodes `data`, numbers in row-major order: rounded to nearest even. Raises
    PatchFormatError BP117 for an unknown dtype, BP116 when `data` and `shape` disagree, BP118 when a number
    is not finite, in its dtype or in float32, or the norm is not finite in float32.
    """

    __slots__ = ("_data", "dtype", "payload", "shape")

    dtype: str
    shape: tuple[int, ...]
    payload: bytes
    _data: tuple[float, ...] | None

    def __init__(self, dtype: str, shape: Iterable[int], data: Iterable[float]) -> None:
        values = _numbers(data)
        self._fill(dtype, tuple(shape), _encode(values, _kind(dtype), dtype))

    @classmethod
    def from_payload(cls, dtype: str, shape: Iterable[int], payload: bytes) -> Tensor:
        """A tensor of bytes that are encoded already. Errors as for the constructor."""
        tensor = cls.__new__(cls)
        tensor._fill(dtype, tuple(shape), payload)
        return tensor

    def _fill(self, dtype: str, shape: tuple[int, ...], payload: bytes) -> None:
        kind = _kind(dtype)
        if math.prod(shape) * kind.itemsize != len(payload):
            raise PatchFormatError(
                "BP116",
                f"shape {list(shape)} of {dtype} does not go with {len(payload) // kind.itemsize} values",
            )
        _check_finite(payload, kind, dtype)
        for name, value in (("dtype", dtype), ("shape", shape), ("payload", payload), ("_data", None)):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Tensor cannot be changed ({name})")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Tensor cannot be changed ({name})")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tensor):
            return NotImplemented
        return (self.dtype, self.shape, self.payload) == (other.dtype, other.shape, other.payload)

    def __hash__(self) -> int:
        return hash((self.dtype, self.shape, self.payload))

    def __repr__(self) -> str:
        return f"Tensor({self.dtype}, {list(self.shape)}, {self.nbytes} bytes)"

    def __reduce__(self) -> tuple[Any, ...]:
        return Tensor.from_payload, (self.dtype, self.shape, self.payload)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes in the file."""
        return len(self.payload)

    @property
    def data(self) -> tuple[float, ...]:
        """The numbers as Python floats, in row-major order, exact. Decoded when first asked for."""
        if self._data is None:
            object.__setattr__(self, "_data", _decode(self.payload, _KINDS[self.dtype]))
        return self._data  # type: ignore[return-value]

    def float32(self) -> NDArray[np.float32]:
        """The numbers as a read-only numpy float32 array of `shape`; F64 is rounded to nearest even."""
        import numpy as np

        if self.dtype == "BF16":
            array = (np.frombuffer(self.payload, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            array = np.frombuffer(self.payload, f"<f{_KINDS[self.dtype].itemsize}").astype(
                np.float32, copy=False
            )
        array = array.reshape(self.shape)
        array.flags.writeable = False
        return array


def vector(values: Iterable[float], dtype: str = "F32") -> Tensor:
    """A one-dimensional tensor of `values`: numbers, or a one-dimensional array."""
    numbers = _numbers(values)
    return Tensor(dtype, (len(numbers),), numbers)


def load(blob: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file, in the header's order, and its metadata.

    Stricter than the format asks: entries tile the payload without gap or overlap, every name and key is
    there once, and only F16, BF16, F32 and F64 are known. Raises SafetensorsError BP116 for a wrong layout,
    and PatchFormatError BP109 (header), BP117 (dtype), BP118 (not finite), BP106 (limits).
    """
    header, payload = _split(blob)
    metadata = _metadata(header.pop("__metadata__", {}))
    if len(header) > MAX_TENSORS:
        raise SafetensorsError("BP106", f"{len(header)} tensors; at most {MAX_TENSORS} are allowed")
    entries = {name: _entry(name, value, len(payload)) for name, value in header.items()}
    end = 0
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.end)):
        if entry.start != end:
            raise SafetensorsError(
                "BP116", f"a gap or an overlap at byte {min(end, entry.start)} of the payload"
            )
        end = entry.end
    if end != len(payload):
        raise SafetensorsError("BP116", f"{len(payload) - end} bytes after the last tensor")
    tensors = {}
    for name, entry in entries.items():
        try:
            tensors[name] = Tensor.from_payload(
                entry.dtype, entry.shape, payload[entry.start : entry.end].tobytes()
            )
        except PatchFormatError as error:
            raise SafetensorsError(error.code, f'"{visible(name, 80)}": {error.reason}') from None
    return tensors, metadata


def dump(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file: tensors back to back in the order of their names, header without padding.

    `metadata` (text to text) stands for the usual `{"format": "brainpatch-vectors-v1"}`. Equal tensors give
    equal bytes. Raises SafetensorsError BP116 for an empty or reserved name.
    """
    header: dict[str, Any] = {"__metadata__": _metadata(METADATA if metadata is None else dict(metadata))}
    end = 0
    for name in sorted(tensors):
        if not name or name == "__metadata__":
            raise SafetensorsError("BP116", f'a tensor cannot be named "{name}"')
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode("ascii")
    return b"".join(
        (struct.pack("<Q", len(text)), text, *(tensors[name].payload for name in sorted(tensors)))
    )


class _Entry(NamedTuple):
    dtype: str
    shape: list[int]
    start: int
    end: int


def _split(blob: bytes) -> tuple[dict[str, Any], memoryview]:
    """The header, parsed, and the payload."""
    if len(blob) < 8:
        raise SafetensorsError("BP116", f"{len(blob)} bytes, too short for a header")
    (length,) = struct.unpack_from("<Q", blob)
    if length > len(blob) - 8:
        raise SafetensorsError("BP116", f"the header's length, {length}, is beyond the file's end")
    if length > MAX_TENSOR_HEADER_BYTES:
        raise SafetensorsError(
            "BP106", f"a header of {length} bytes; at most {MAX_TENSOR_HEADER_BYTES} are allowed"
        )
    header = strict_json.parse(blob[8 : 8 + length], "tensor header")
    if not isinstance(header, dict):
        raise SafetensorsError("BP116", "the header is not an object")
    return header, memoryview(blob)[8 + length :]


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(
        isinstance(key, str) and isinstance(text, str) for key, text in value.items()
    ):
        raise SafetensorsError("BP116", "__metadata__ is not an object of texts")
    return value


def _entry(name: str, value: Any, payload_bytes: int) -> _Entry:
    what = f'tensor "{visible(name, 80)}"'
    if not name:
        raise SafetensorsError("BP116", "a tensor has an empty name")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise SafetensorsError("BP116", f"{what}: an entry has exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _KINDS:
        raise SafetensorsError(
            "BP117", f"{what}: dtype {visible(repr(dtype), 40)} is not one of {', '.join(_KINDS)}"
        )
    if not _are_counts(shape):
        raise SafetensorsError("BP116", f"{what}: shape is not a list of integers of 0 or more")
    if not _are_counts(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= payload_bytes:
        raise SafetensorsError("BP116", f"{what}: data_offsets are not a range within {payload_bytes} bytes")
    return _Entry(dtype, shape, offsets[0], offsets[1])


def _are_counts(value: Any) -> bool:
    # No more than 64 dimensions: a product of thousands of large ones is slow to compute.
    return (
        isinstance(value, list)
        and len(value) <= 64
        and all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value)
    )


def _kind(dtype: str) -> _Kind:
    if not isinstance(dtype, str) or dtype not in _KINDS:
        raise PatchFormatError("BP117", f"dtype {visible(repr(dtype), 40)} is not one of {', '.join(_KINDS)}")
    return _KINDS[dtype]


def _numbers(values: Any) -> list[float]:
    # numpy and torch know `tolist` (arrays) and `item` (scalars), which give exact Python numbers.
    try:
        numbers = (
            values.tolist()
            if hasattr(values, "tolist")
            else [item.item() if hasattr(item, "item") else item for item in values]
        )
    except (TypeError, ValueError):
        numbers = None
    if not isinstance(numbers, list) or not all(
        isinstance(item, (int, float)) and not isinstance(item, bool) for item in numbers
    ):
        raise PatchFormatError("BP117", "the values are not a flat sequence of numbers")
    try:
        return [float(item) for item in numbers]
    except OverflowError:  # an integer beyond every float
        raise PatchFormatError("BP118", "a value is out of the range of every dtype") from None


def _encode(values: list[float], kind: _Kind, dtype: str) -> bytes:
    try:
        if kind.code:
            return struct.pack(f"<{len(values)}{kind.code}", *values)
        bits = struct.unpack(f"<{len(values)}I", struct.pack(f"<{len(values)}f", *values))
    except OverflowError:
        raise PatchFormatError("BP118", f"a value is out of the range of {dtype}") from None
    if not all(map(math.isfinite, values)):
        raise PatchFormatError("BP118", "a value is NaN or infinite")
    # Round to nearest even at bit 16. Infinity may come out; the check of finite values finds it.
    return struct.pack(f"<{len(values)}H", *((item + 0x7FFF + (item >> 16 & 1)) >> 16 for item in bits))


def _decode(payload: bytes, kind: _Kind) -> tuple[float, ...]:
    code = kind.code
    if not code:
        wide = bytearray(2 * len(payload))
        wide[2::4], wide[3::4] = payload[0::2], payload[1::2]
        payload, code = bytes(wide), "f"
    return struct.unpack(f"<{len(payload) // struct.calcsize(code)}{code}", payload)


def _check_finite(payload: bytes, kind: _Kind, dtype: str) -> None:
    if not _any_at_least(payload, kind.itemsize, kind.large):
        return
    if _any_at_least(payload, kind.itemsize, kind.overflow):
        raise PatchFormatError("BP118", f"an element is NaN or infinite, in {dtype} or in float32")
    if math.hypot(*_decode(payload, kind)) >= _FLOAT32_OVERFLOW:
        raise PatchFormatError("BP118", "the norm is infinite in float32")


def _any_at_least(payload: bytes, itemsize: int, threshold: int) -> bool:
    """Whether an element's bits without the sign, as an integer, are `threshold` or more.

    All elements at once, as lanes of one long integer: adding (sign bit - threshold) to a lane sets its sign
    bit exactly when the lane is at least the threshold, and never carries into the next.
    """
    magnitudes, addend, signs = _lanes(len(payload) // itemsize, itemsize, threshold)
    return ((int.from_bytes(payload, "little") & magnitudes) + addend) & signs != 0


@lru_cache(maxsize=8)
def _lanes(count: int, itemsize: int, threshold: int) -> tuple[int, int, int]:
    sign = 1 << (8 * itemsize - 1)

    def repeated(lane: int) -> int:
        return int.from_bytes(lane.to_bytes(itemsize, "little") * count, "little")

    return repeated(sign - 1), repeated(sign - threshold), repeated(sign)
