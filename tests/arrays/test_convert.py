"""`as_host` and `as_torch` keep the memory, and refuse other values with a clear sentence."""

import copy
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.arrays import HOST, HostArray, as_host, as_torch, host
from tests.arrays.twins import EVERY, FLOAT8, Twins, assert_same, twins
from tests.depth import at_depth

UNSIGNED = ("uint16", "uint32", "uint64")
CALM = settings(max_examples=at_depth(100))


class FromAnotherLibrary:
    """An array with nothing but DLPack's interface."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


@CALM
@given(pair=twins(EVERY + FLOAT8))
def test_conversions_keep_numbers_and_memory(pair: Twins) -> None:
    host_array, tensor = as_host(pair.tensor), quietly_as_torch(pair.array)
    assert_same(host_array, pair.tensor)
    assert_same(pair.array, tensor)
    for array, same in ((host_array, pair.tensor), (pair.array, tensor)):
        assert type(array) is HostArray
        assert array.dtype is getattr(host, array.dtype.name)
        if same.numel():
            assert array.data_ptr() == same.data_ptr()
            long = [dim for dim, size in enumerate(same.shape) if size > 1]
            assert [array.stride(dim) for dim in long] == [same.stride(dim) for dim in long]


def quietly_as_torch(array: Any) -> torch.Tensor:
    """Return an array as a tensor. Torch warns once per process that it writes to any array."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return as_torch(array)


@CALM
@given(pair=twins((*EVERY, *FLOAT8), min_dims=1, min_size=1, layouts=("permuted", "narrowed")))
def test_writes_are_seen_on_both_sides(pair: Twins) -> None:
    for array, tensor in (
        (as_host(pair.tensor), pair.tensor),
        (as_host(as_torch(pair.array)), as_torch(pair.array)),
    ):
        array[...] = 0
        assert not tensor.to(torch.float64).any()
        tensor.fill_(1)
        assert set(array.reshape(-1).tolist()) == {1}


@pytest.mark.parametrize("name", UNSIGNED)
def test_unsigned_integers_keep_the_memory(name: str) -> None:
    array = as_host(np.array([1, 2**15 + 1], dtype=name))
    tensor = as_torch(array)
    assert_same(array, tensor)
    assert as_host(tensor).data_ptr() == tensor.data_ptr() == array.data_ptr()


def test_same_kind_is_returned_unchanged() -> None:
    array, tensor = host.zeros(2), torch.zeros(2)
    assert as_host(array) is array
    assert as_torch(tensor) is tensor


def test_tensors_with_gradients_are_detached() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    array = as_host(weight)
    assert array.data_ptr() == weight.data_ptr()
    assert not array.requires_grad
    assert_same(as_host(weight * 2), torch.full((2, 3), 2.0))


def test_lazy_negations_are_computed() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    negated = numbers.conj().imag
    assert negated.is_neg()
    assert_same(as_host(negated), torch.tensor([-2.0, 4.0]))
    assert as_host(numbers.conj().real).tolist() == [1, 3]


def test_foreign_byte_order_is_converted() -> None:
    array = as_host(np.array([1, 2, 300], dtype=">i4"))
    assert array.dtype is host.int32
    assert array.tolist() == [1, 2, 300]
    assert as_torch(np.array([0.5, -2], dtype=">f8")).tolist() == [0.5, -2]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "bool"])
def test_numpy_arrays_keep_the_memory(name: str) -> None:
    numbers = np.arange(12).reshape(3, 4).astype(getattr(host, name)).T[::2]
    array = as_host(numbers)
    assert type(array) is HostArray
    assert array.data_ptr() == numbers.__array_interface__["data"][0]
    assert array.strides == numbers.strides
    assert as_torch(numbers).data_ptr() == array.data_ptr()


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_read_only_arrays_stay_read_only(name: str) -> None:
    numbers = np.frombuffer(bytes(16), dtype=getattr(host, name))
    array = as_host(numbers)
    with pytest.raises(ValueError, match="read-only"):
        array.zero_()
    assert quietly_as_torch(array).data_ptr() == array.data_ptr()
    assert array.clone().zero_().tolist() == [0] * len(array)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.float16])
def test_dlpack_keeps_the_memory(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1], [1, 0]], dtype=dtype).t()
    array = as_host(FromAnotherLibrary(tensor))
    assert_same(array, tensor)
    assert array.data_ptr() == tensor.data_ptr()


def test_dlpack_of_a_dtype_that_numpy_lacks_is_rejected() -> None:
    with pytest.raises(TypeError, match="cannot read this FromAnotherLibrary: Unsupported"):
        as_host(FromAnotherLibrary(torch.ones(2, dtype=torch.bfloat16)))


@pytest.mark.parametrize("convert", [as_host, as_torch])
@pytest.mark.parametrize("value", [[1.0], 3, None, "text", {}, np.float32(1)])
def test_other_types_are_rejected(convert: Any, value: Any) -> None:
    name = type(value).__name__
    with pytest.raises(TypeError, match=rf"^expected an array or a tensor; got {name}\.$"):
        convert(value)


@pytest.mark.parametrize(
    "value",
    [
        np.ones(2, dtype=np.complex64),
        torch.ones(2, dtype=torch.complex64),
        FromAnotherLibrary(torch.ones(2, dtype=torch.complex64)),
        np.array(["a"]),
        np.array([None]),
        np.array([("a", 1)], dtype=[("name", "U1"), ("count", "i4")]),
    ],
    ids=["complex", "complex tensor", "complex dlpack", "text", "objects", "records"],
)
def test_other_dtypes_are_rejected(value: Any) -> None:
    sentence = r"^arrays of dtype \w+ are not supported; convert the array to float32\.$"
    with pytest.raises(TypeError, match=sentence):
        as_host(value)


@CALM
@given(pair=twins(EVERY + FLOAT8), way=st.sampled_from(["copy", "deepcopy", "pickle"]))
def test_copies_and_pickles_are_host_arrays(pair: Twins, way: str) -> None:
    if way == "pickle":
        array = pickle.loads(pickle.dumps(pair.array))
    else:
        array = getattr(copy, way)(pair.array)
    assert_same(array, pair.tensor)
    assert array.device is HOST
    assert not np.may_share_memory(array, pair.array) or not array.numel()


def test_device_of_the_host_is_one_object() -> None:
    assert pickle.loads(pickle.dumps(HOST)) is HOST
    assert copy.deepcopy({"device": HOST})["device"] is HOST
    assert (HOST.type, HOST.index, str(HOST)) == ("cpu", None, "cpu")
