"""The functions and dtypes of `torch` that the engine uses, for `HostArray`.

Names and arguments are torch's. `device` is accepted and ignored, because only the host remains.
Numbers without a dtype become float32 or int64, as in torch.
"""

import builtins
import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from nano_inference.arrays.host_array import HostArray, shape_of

bfloat16 = np.dtype(ml_dtypes.bfloat16)
float8_e4m3fn = np.dtype(ml_dtypes.float8_e4m3fn)
float8_e5m2 = np.dtype(ml_dtypes.float8_e5m2)
float8_e8m0fnu = np.dtype(ml_dtypes.float8_e8m0fnu)
float16, float32, float64 = (np.dtype(name) for name in ("float16", "float32", "float64"))
int8, int16, int32, int64 = (np.dtype(name) for name in ("int8", "int16", "int32", "int64"))
uint8, uint16, uint32, uint64 = (np.dtype(n) for n in ("uint8", "uint16", "uint32", "uint64"))
bool = np.dtype(np.bool_)
inf, nan = math.inf, math.nan


def empty(*shape: Any, dtype: Any = None, device: Any = None) -> Any:
    """Return an uninitialized array."""
    return HostArray(shape_of(shape), dtype=float32 if dtype is None else dtype)


def zeros(*shape: Any, dtype: Any = None, device: Any = None) -> Any:
    """Return zeros. Their pages are allocated at the first write."""
    return np.zeros(shape_of(shape), dtype=float32 if dtype is None else dtype).view(HostArray)


def ones(*shape: Any, dtype: Any = None, device: Any = None) -> Any:
    """Return an array of ones."""
    return empty(*shape, dtype=dtype).fill_(1)


def full(shape: Any, value: Any, dtype: Any = None, device: Any = None) -> Any:
    """Return an array of one value."""
    return empty(shape, dtype=_dtype_of(value) if dtype is None else dtype).fill_(value)


def empty_like(array: HostArray, dtype: Any = None, device: Any = None) -> Any:
    """Return an uninitialized array of the same shape."""
    return empty(array.shape, dtype=array.dtype if dtype is None else dtype)


def zeros_like(array: HostArray, dtype: Any = None, device: Any = None) -> Any:
    """Return zeros of the same shape."""
    return zeros(array.shape, dtype=array.dtype if dtype is None else dtype)


def full_like(array: HostArray, value: Any, dtype: Any = None, device: Any = None) -> Any:
    """Return an array of one value and of the same shape."""
    return full(array.shape, value, dtype=array.dtype if dtype is None else dtype)


def arange(*bounds: Any, dtype: Any = None, device: Any = None) -> Any:
    """Return evenly spaced numbers."""
    whole = all(isinstance(each, (int, np.integer)) for each in bounds)
    return np.arange(*bounds, dtype=dtype or (int64 if whole else float32)).view(HostArray)


def randint(low: int, high: int, shape: Any) -> Any:
    """Return random integers in [low, high), from numpy's default generator."""
    return np.random.randint(low, high, shape, dtype=int64).view(HostArray)


def tensor(values: Any, dtype: Any = None, device: Any = None) -> Any:
    """Return a copy of numbers."""
    array = np.array(values, dtype=dtype)
    if dtype is None:
        if not isinstance(values, np.ndarray) and (array.dtype.kind == "f" or not array.size):
            array = array.astype(float32)
        elif array.dtype.kind in "iu" and not isinstance(values, np.ndarray):
            array = array.astype(int64)
    return array.view(HostArray)


def from_numpy(array: np.ndarray) -> Any:
    """Return the same memory."""
    return array.view(HostArray)


def frombuffer(buffer: Any, dtype: Any, count: int = -1, offset: int = 0) -> Any:
    """Return the same memory."""
    return np.frombuffer(buffer, dtype=dtype, count=count, offset=offset).view(HostArray)


def cat(arrays: Sequence[HostArray], dim: int = 0) -> Any:
    """Join arrays along a dimension. One-dimensional empty arrays fit to any others."""
    joined = [each for each in arrays if each.shape != (0,)] or list(arrays[:1])
    return np.concatenate(joined, axis=dim).view(HostArray)


def stack(arrays: Sequence[HostArray], dim: int = 0) -> Any:
    """Join arrays along a new dimension."""
    return np.stack(arrays, axis=dim).view(HostArray)


def where(condition: Any, a: Any, b: Any) -> Any:
    """Choose between two arrays or numbers."""
    dtype = _result_dtype(a, b)
    return np.where(condition, np.asarray(a, dtype), np.asarray(b, dtype)).view(HostArray)


def equal(a: HostArray, b: HostArray) -> builtins.bool:
    """Return True if both arrays have the same shape and numbers."""
    return builtins.bool(np.array_equal(a, b))


def searchsorted(ordered: HostArray, values: Any, right: Any = False) -> Any:
    """Return where values belong in an ordered array."""
    places = np.searchsorted(ordered, values, side="right" if right else "left")
    return np.asarray(places).view(HostArray)


def bincount(values: HostArray, minlength: int = 0) -> Any:
    """Count each number."""
    return np.bincount(values, minlength=minlength).view(HostArray)


def argsort(array: HostArray, dim: int = -1, **options: Any) -> Any:
    """Return the indices that order an array."""
    return array.argsort(dim, **options)


def rsqrt(array: HostArray) -> Any:
    """Return reciprocal square roots."""
    return 1 / np.sqrt(array)


def isfinite(array: HostArray) -> Any:
    """Return which numbers are finite."""
    return np.isfinite(array)


def exp(array: HostArray) -> Any:
    """Return e to the power of each number. float32 is computed in float64 and rounded once."""
    return array.exp()


def _softplus(array: HostArray) -> Any:
    """Return log(1 + e^x), in float64 and rounded once."""
    return np.logaddexp(array.double(), 0).astype(array.dtype)


class nn:  # noqa: N801 (torch's name)
    """The functions of `torch.nn`."""

    class functional:  # noqa: N801 (torch's name)
        softplus = staticmethod(_softplus)


log, cos, sin, sqrt, floor, round = (
    np.log,
    np.cos,
    np.sin,
    np.sqrt,
    np.floor,
    np.rint,
)
maximum, minimum, finfo, iinfo = np.maximum, np.minimum, ml_dtypes.finfo, np.iinfo


def _dtype_of(value: Any) -> "np.dtype[Any]":
    """Return torch's default dtype of a number."""
    if isinstance(value, (np.bool_, builtins.bool)):
        return bool
    return int64 if isinstance(value, (int, np.integer)) else float32


def _result_dtype(a: Any, b: Any) -> "np.dtype[Any]":
    """Return torch's dtype for two arrays or numbers. Numbers do not widen arrays."""
    dtypes = [each.dtype if isinstance(each, np.ndarray) else _dtype_of(each) for each in (a, b)]
    ranks = [{"b": 0, "i": 1, "u": 1}.get(each.kind, 2) for each in dtypes]
    if ranks[0] != ranks[1]:
        return dtypes[ranks.index(max(ranks))]
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.promote_types(*dtypes)
    return dtypes[0 if isinstance(a, np.ndarray) else 1]
