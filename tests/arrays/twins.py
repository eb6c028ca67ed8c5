"""Twins: a host array and a tensor with equal numbers, in separate memory, and their comparison."""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from nano_inference.arrays import HostArray, dtype_name, host

FLOATS = ("float32", "float64", "float16", "bfloat16")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
SIGNED = ("int8", "int16", "int32", "int64")
INTS = (*SIGNED, "uint8")
NUMBERS = FLOATS + INTS
EVERY = (*NUMBERS, "bool")
LAYOUTS = ("permuted", "strided", "narrowed", "expanded")


@dataclass(frozen=True)
class Twins:
    """Views of two arrays with the same numbers, and the whole arrays below them."""

    array: Any
    tensor: Any
    whole_array: Any
    whole_tensor: Any


def twins_of(numbers: np.ndarray) -> tuple[Any, Any]:
    """Return a host array and a tensor with these numbers, without the package's conversions."""
    dtype = getattr(torch, numbers.dtype.name)
    tensor = torch.empty(numbers.shape, dtype=dtype)
    if numbers.size:
        tensor = torch.frombuffer(bytearray(numbers.tobytes()), dtype=dtype).reshape(numbers.shape)
    return numbers.copy().view(HostArray), tensor


def twins(
    dtypes: tuple[str, ...],
    min_dims: int = 0,
    max_dims: int = 4,
    *,
    min_size: int = 0,
    odd: bool = True,
    layouts: tuple[str, ...] = LAYOUTS,
) -> st.SearchStrategy[Twins]:
    """Return a strategy for twins of at most 4 numbers per dimension.

    Args:
        odd: Floats include infinities, NaN, -0 and fractions. Otherwise all are small integers.
    """
    return st.builds(
        _make,
        st.sampled_from(dtypes),
        st.lists(st.integers(min_size, 4), min_size=min_dims, max_size=max_dims),
        st.randoms(use_true_random=False),
        st.lists(st.sampled_from(layouts), max_size=2) if layouts else st.just([]),
        st.just(odd),
        st.just(min_size),
    )


def _make(
    dtype: str, shape: list[int], pick: random.Random, layouts: list[str], odd: bool, least: int
) -> Twins:
    numbers = np.empty(shape, dtype=getattr(host, dtype))
    choices = list(_numbers(dtype, odd))
    for at in itertools.product(*map(range, shape)):
        numbers[at] = pick.choice(choices)
    array, tensor = twins_of(numbers)
    seen = Twins(array, tensor, array, tensor)
    for layout in layouts if shape else ():
        seen = Twins(*_laid_out(seen.array, seen.tensor, layout, pick, least), array, tensor)
    return seen


def _numbers(dtype: str, odd: bool) -> Iterator[float]:
    if dtype == "bool":
        return iter((False, True))
    small = range(4) if dtype == "uint8" else range(-3, 4)
    special = (math.inf, -math.inf, math.nan, -0.0, 0.5, 1.625, -2.25, 1e-3)
    return itertools.chain(small, special if odd and "float" in dtype else ())


def _laid_out(
    array: Any, tensor: Any, layout: str, pick: random.Random, least: int
) -> tuple[Any, Any]:
    dim = pick.randrange(array.ndim)
    if layout == "permuted":
        order = pick.sample(range(array.ndim), array.ndim)
        return np.transpose(array, order), tensor.permute(order)
    if layout == "expanded":
        if array.ndim == 5:
            return array, tensor
        shape = (2, *array.shape)
        return np.broadcast_to(array, shape, subok=True), tensor.expand(shape)
    start = pick.randrange(max(array.shape[dim] + 1 - least, 1))
    step = pick.choice((1, 2)) if layout == "strided" else 1
    part = (slice(None),) * dim + (slice(start, None, step),)
    return array[part], tensor[part]


def assert_same(array: Any, tensor: Any, tolerance: float = 0.0, signed_zeros: bool = True) -> None:
    """Check that a result of the host equals torch's: kind, dtype, shape and numbers."""
    if isinstance(tensor, (tuple, list)) and not isinstance(tensor, torch.Size):
        assert isinstance(array, (tuple, list))
        assert len(array) == len(tensor)
        for one, other in zip(array, tensor, strict=True):
            assert_same(one, other, tolerance, signed_zeros)
    elif isinstance(tensor, torch.Tensor):
        assert isinstance(array, HostArray)
        assert dtype_name(array.dtype) == dtype_name(tensor.dtype)
        assert tuple(array.shape) == tuple(tensor.shape)
        assert_equal_numbers(array.tolist(), tensor.tolist(), tolerance, signed_zeros)
    else:
        assert type(array) is type(tensor) or isinstance(tensor, torch.Size)
        assert_equal_numbers(array, tensor, tolerance, signed_zeros)


def assert_equal_numbers(ours: Any, theirs: Any, tolerance: float, signed_zeros: bool) -> None:
    """Check that nested lists are equal, with equal NaN."""
    if isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_equal_numbers(one, other, tolerance, signed_zeros)
    elif not isinstance(theirs, float):
        assert ours == theirs
    elif not (math.isnan(theirs) and math.isnan(ours)):
        assert ours == theirs or abs(ours - theirs) <= tolerance * abs(theirs)
        assert not signed_zeros or math.copysign(1, ours) == math.copysign(1, theirs)


def assert_same_memory(result: Any, expected: Any, twins: Twins) -> None:
    """Check that a result is a view of the same numbers as torch's, or a copy if torch's is."""
    if isinstance(expected, (tuple, list)):
        for one, other in zip(result, expected, strict=True):
            assert_same_memory(one, other, twins)
    elif isinstance(expected, torch.Tensor) and expected.numel():
        theirs = expected.untyped_storage().data_ptr()
        is_view = theirs == twins.whole_tensor.untyped_storage().data_ptr()
        assert np.may_share_memory(result, twins.whole_array) == is_view
        if is_view:
            offset = expected.data_ptr() - twins.whole_tensor.data_ptr()
            assert result.data_ptr() - twins.whole_array.data_ptr() == offset
            dims = [dim for dim, size in enumerate(expected.shape) if size > 1]
            assert [result.stride(dim) for dim in dims] == [expected.stride(dim) for dim in dims]


Case = Callable[[Any, Any, random.Random], Any]


def compare(case: Case, pair: Twins, seed: int, *, tolerance: float, signed_zeros: bool) -> None:
    """Run a case on both arrays with equal choices. Compare results, memory and the arrays."""
    result = case(pair.array, host, random.Random(seed))
    expected = case(pair.tensor, torch, random.Random(seed))
    assert_same(result, expected, tolerance, signed_zeros)
    assert_same_memory(result, expected, pair)
    assert_same(pair.whole_array, pair.whole_tensor)
