"""vectors.safetensors and the numbers inside."""

from __future__ import annotations

import copy
import json
import math
import struct
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from brainpatch.errors import PatchFormatError, SafetensorsError
from brainpatch.patch import Tensor
from brainpatch.patch.tensors import dump, load, supported_dtypes, vector

F32_MAX = float(np.finfo(np.float32).max)


def _file(header: Any, payload: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + payload


def _entry(start: int, end: int, dtype: Any = "F32", shape: Any = None) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [(end - start) // 4] if shape is None else shape,
        "data_offsets": [start, end],
    }


def test_supported_dtypes() -> None:
    assert supported_dtypes() == ("BF16", "F16", "F32", "F64")


@pytest.mark.parametrize(("dtype", "itemsize"), [("F16", 2), ("BF16", 2), ("F32", 4), ("F64", 8)])
def test_a_tensor_knows_its_numbers(dtype: str, itemsize: int) -> None:
    tensor = Tensor(dtype, (2, 3), [0.5, -1.25, 0.0, -0.0, 3, 96])
    assert tensor.data == (0.5, -1.25, 0.0, -0.0, 3.0, 96.0)
    assert tensor.data is tensor.data
    assert math.copysign(1, tensor.data[3]) == -1
    assert (tensor.numel, tensor.nbytes, tensor.shape) == (6, 6 * itemsize, (2, 3))
    array = tensor.float32()
    assert (array.dtype, array.shape, array.flags.writeable) == (np.float32, (2, 3), False)
    assert array.ravel().tolist() == list(tensor.data)
    assert repr(tensor) == f"Tensor({dtype}, [2, 3], {6 * itemsize} bytes)"


def test_a_tensor_is_an_immutable_value() -> None:
    tensor = vector([1.0, 2.0])
    with pytest.raises(AttributeError):
        tensor.dtype = "F16"
    with pytest.raises(AttributeError):
        del tensor.payload
    assert tensor == vector(np.array([1, 2])) == copy.deepcopy(tensor)
    assert hash(tensor) == hash(vector((1, 2)))
    assert tensor != vector([1.0, 2.0], "F16")
    assert tensor != (1.0, 2.0)


@pytest.mark.parametrize(
    "values",
    [
        [1, 2.5],
        (1.0, 2.5),
        iter([1.0, 2.5]),
        np.array([1.0, 2.5], np.float32),
        np.array([1.0, 2.5], np.float16),
        [np.float32(1), np.float64(2.5)],
    ],
)
def test_vector_takes_any_flat_sequence_of_numbers(values: Any) -> None:
    assert vector(values, "F64").data == (1.0, 2.5)


@pytest.mark.parametrize(
    "values",
    [
        3,
        np.float32(3),
        np.array(3.0),
        "12",
        [None],
        [True],
        ["1"],
        [[1.0]],
        np.ones((2, 2)),
        [np.ones(2)],
        [1j],
    ],
)
def test_vector_refuses_other_things(values: Any) -> None:
    with pytest.raises(PatchFormatError) as caught:
        vector(values)
    assert caught.value.code == "BP117"


@pytest.mark.parametrize("dtype", ["F8", "f32", "", None, ["F32"]])
def test_an_unknown_dtype_is_refused(dtype: Any) -> None:
    with pytest.raises(PatchFormatError) as caught:
        vector([1.0], dtype)
    assert caught.value.code == "BP117"


def test_shape_and_data_must_agree() -> None:
    with pytest.raises(PatchFormatError, match=r"shape \[3\] of F32 does not go with 2 values"):
        Tensor("F32", (3,), [1.0, 2.0])


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [
        ("F16", 65520.0),
        ("F16", -1e300),
        ("F32", 3.5e38),
        ("BF16", 3.5e38),
        ("BF16", 3.4e38),  # finite in F32, infinite once rounded to BF16
        ("F64", 2.0**128 - 2.0**103),  # the first that rounds to infinity in float32
        ("F64", 1e300),
        ("F32", 10**400),
        *((dtype, value) for dtype in supported_dtypes() for value in (math.nan, math.inf, -math.inf)),
    ],
)
@pytest.mark.parametrize("place", [0, 5, 11])
def test_what_is_not_finite_is_refused(dtype: str, bad: float, place: int) -> None:
    values = [0.25] * 12
    values[place] = bad
    with pytest.raises(PatchFormatError) as caught:
        vector(values, dtype)
    assert caught.value.code == "BP118"


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [
        ("F16", 65504.0),
        ("F32", F32_MAX),
        ("BF16", 3.3895313892515355e38),
        ("F64", math.nextafter(2.0**128 - 2.0**103, 0)),
    ],
)
def test_the_largest_numbers_are_fine_alone_and_not_together(dtype: str, largest: float) -> None:
    assert vector([0.0, -largest, 0.0], dtype).data[1] == -largest
    if dtype == "F16":
        assert vector([largest] * 100, dtype).numel == 100
        return
    with pytest.raises(PatchFormatError, match="norm"):
        vector([largest] * 100, dtype)


def test_the_first_double_that_overflows_float32_is_no_element() -> None:
    with pytest.raises(PatchFormatError, match="an element is"):
        vector([2.0**128 - 2.0**103], "F64")


def test_bf16_rounds_to_nearest_even() -> None:
    one, step = 0x3F80, 2.0**-7
    tensor = vector([1.0, 1 + step / 2, 1 + 3 * step / 2, 1 + step * 0.51, -(1 + step * 0.49)], "BF16")
    assert struct.unpack("<5H", tensor.payload) == (one, one, one + 2, one + 1, one | 0x8000)


_PACKED = {"F16": ("<u2", np.float16), "F32": ("<u4", np.float32), "F64": ("<u8", np.float64)}


@given(st.sampled_from(sorted(_PACKED)), st.binary(max_size=64))
def test_the_check_of_finite_values_agrees_with_numpy(dtype: str, payload: bytes) -> None:
    kind = np.dtype(_PACKED[dtype][1])
    payload = payload[: len(payload) // kind.itemsize * kind.itemsize]
    values = np.frombuffer(payload, kind.newbyteorder("<")).astype(np.float64)
    with np.errstate(all="ignore"):
        fine = bool(np.isfinite(values.astype(np.float32)).all())
        fine = fine and bool(np.isfinite(np.float32(math.hypot(*values.tolist()))))
    try:
        tensor = Tensor.from_payload(dtype, (len(values),), payload)
    except PatchFormatError:
        assert not fine
    else:
        assert fine
        assert tensor.data == tuple(values.tolist())
        assert tensor.float32().tobytes() == values.astype(np.float32).tobytes()


@given(st.binary(max_size=64).map(lambda data: data[: len(data) // 2 * 2]))
def test_bf16_is_the_upper_half_of_float32(payload: bytes) -> None:
    wide = np.frombuffer(b"".join(b"\0\0" + payload[i : i + 2] for i in range(0, len(payload), 2)), "<f4")
    try:
        tensor = Tensor.from_payload("BF16", (len(wide),), payload)
    except PatchFormatError:
        assert not np.isfinite(wide).all() or math.hypot(*wide.tolist()) > F32_MAX
    else:
        assert tensor.data == tuple(wide.tolist())
        assert tensor.float32().tobytes() == wide.tobytes()
        assert vector(tensor.data, "BF16") == tensor


_floats = st.floats(-1e4, 1e4, width=32)
_tensors = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
    st.builds(vector, st.lists(_floats, max_size=5), st.sampled_from(supported_dtypes())),
    max_size=5,
)


@given(_tensors)
def test_what_is_dumped_loads(tensors: dict[str, Tensor]) -> None:
    blob = dump(tensors)
    loaded, metadata = load(blob)
    assert loaded == tensors
    assert metadata == {"format": "brainpatch-vectors-v1"}
    assert dump(dict(reversed(tensors.items()))) == blob


def test_the_official_library_reads_what_is_dumped() -> None:
    tensors = {"b": vector([1.0, -2.5]), "a": vector([0.1, 0.2, 0.3], "F16"), "ü": vector([math.pi], "F64")}
    loaded = safetensors.numpy.load(dump(tensors, {"made": "here"}))
    assert {key: tuple(array.tolist()) for key, array in loaded.items()} == {
        key: tensor.data for key, tensor in tensors.items()
    }
    assert load(dump(tensors, {"made": "here"}))[1] == {"made": "here"}


def test_reads_what_the_official_library_writes() -> None:
    arrays = {"v": np.arange(4, dtype=np.float32), "w": np.ones(3, np.float16), "x": np.zeros(1)}
    loaded, _ = load(safetensors.numpy.save(arrays, {"by": "someone"}))
    assert {key: tensor.float32().tolist() for key, tensor in loaded.items()} == {
        key: array.tolist() for key, array in arrays.items()
    }


@pytest.mark.parametrize("name", ["", "__metadata__"])
def test_names_that_cannot_be_written(name: str) -> None:
    with pytest.raises(SafetensorsError, match="BP116"):
        dump({name: vector([1.0])})


def test_metadata_that_cannot_be_written() -> None:
    with pytest.raises(SafetensorsError, match="BP116"):
        dump({}, {"a": 1})  # type: ignore[dict-item]


def test_any_order_and_padding_are_fine() -> None:
    first, second = vector([1.0]), vector([2.0, 3.0])
    header = {"b": _entry(0, 4), "a": _entry(4, 12), "__metadata__": {}}
    text = json.dumps(header).encode() + b" " * 7
    assert load(_file(text, first.payload + second.payload)) == ({"b": first, "a": second}, {})
    assert list(load(_file(text, first.payload + second.payload))[0]) == ["b", "a"]
    assert load(_file({"e": _entry(0, 0), "a": _entry(0, 4), "f": _entry(4, 4)}, bytes(4)))[0]["f"].data == ()


@pytest.mark.parametrize(
    ("blob", "code"),
    [
        (b"", "BP116"),
        (b"1234567", "BP116"),
        (struct.pack("<Q", 2) + b"{", "BP116"),
        (struct.pack("<Q", 2**63), "BP116"),
        (_file(b" " * (2**20 + 1)), "BP106"),
        (_file(b""), "BP109"),
        (_file(b"[" * 33), "BP109"),
        (_file(b'{"a":{},"a":{}}'), "BP109"),
        (_file([]), "BP116"),
        (_file({"__metadata__": []}), "BP116"),
        (_file({"__metadata__": {"a": 1}}), "BP116"),
        (_file({f"t{n}": _entry(0, 0) for n in range(4097)}), "BP106"),
        (_file({"": _entry(0, 0)}), "BP116"),
        (_file({"v": []}), "BP116"),
        (_file({"v": {**_entry(0, 4), "x": 1}}, bytes(4)), "BP116"),
        (_file({"v": {"dtype": "F32", "shape": [1]}}, bytes(4)), "BP116"),
        (_file({"v": _entry(0, 4, dtype="I32")}, bytes(4)), "BP117"),
        (_file({"v": _entry(0, 4, dtype=["F32"])}, bytes(4)), "BP117"),
        (_file({"v": _entry(0, 4, shape=[-1, -1])}, bytes(4)), "BP116"),
        (_file({"v": _entry(0, 4, shape=[True])}, bytes(4)), "BP116"),
        (_file({"v": _entry(0, 4, shape=1)}, bytes(4)), "BP116"),
        (_file({"v": _entry(0, 4, shape=[1] * 65)}, bytes(4)), "BP116"),
        (_file({"v": _entry(0, 4, shape=[2])}, bytes(4)), "BP116"),
        (_file({"v": {**_entry(0, 4), "data_offsets": [0]}}, bytes(4)), "BP116"),
        (_file({"v": {**_entry(0, 4), "data_offsets": [False, 4]}}, bytes(4)), "BP116"),
        (_file({"v": {**_entry(0, 4), "data_offsets": [4, 0]}}, bytes(4)), "BP116"),
        (_file({"v": _entry(0, 8)}, bytes(4)), "BP116"),
        (_file({"v": _entry(4, 8)}, bytes(8)), "BP116"),
        (_file({"v": _entry(0, 4)}, bytes(5)), "BP116"),
        (_file({"v": _entry(0, 8), "w": _entry(4, 12)}, bytes(12)), "BP116"),
        (_file({"v": _entry(0, 4), "w": _entry(0, 4)}, bytes(4)), "BP116"),
        (_file({"v": _entry(0, 4)}, struct.pack("<f", math.nan)), "BP118"),
    ],
)
def test_refuses(blob: bytes, code: str) -> None:
    with pytest.raises(PatchFormatError) as caught:
        load(blob)
    assert caught.value.code == code
