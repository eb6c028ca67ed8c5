"""`HostArray`: a numpy array with the methods of `torch.Tensor` that the engine uses."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

Sizes = Sequence[int]
if TYPE_CHECKING:  # overridden methods take the arguments of torch
    Base: TypeAlias = Any
else:
    Base = np.ndarray


class HostDevice:
    """Device of a `HostArray`, with the attributes of a `torch.device`."""

    type = "cpu"
    index = None

    def __repr__(self) -> str:
        return "cpu"

    def __reduce__(self) -> str:
        return "HOST"  # copies and other processes get the same object


HOST: Any = HostDevice()  # `Device` for type checkers


class HostArray(Base):
    """A numpy array that code for tensors can use.

    Arithmetic, indexing and views are numpy's. Methods whose names numpy and torch share take the
    arguments of both. Arrays of bfloat16 have the dtype of `ml_dtypes`.
    """

    __slots__ = ()
    device = HOST
    is_cpu = True
    is_meta = False
    requires_grad = False

    # -- memory ------------------------------------------------------------------------------------

    def data_ptr(self) -> int:
        """Return the address of the first number."""
        return self.__array_interface__["data"][0]

    def numel(self) -> int:
        """Return the count of numbers."""
        return self.size

    def element_size(self) -> int:
        """Return the bytes per number."""
        return self.itemsize

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.ndim

    def stride(self, dim: int | None = None) -> Any:
        """Return the steps between neighbors, in numbers, for one dimension or for all."""
        if self.size:
            steps = tuple(each // self.itemsize for each in self.strides)
        else:  # numpy leaves them undefined
            sizes = [max(size, 1) for size in self.shape]
            steps = tuple(math.prod(sizes[at:]) for at in range(1, self.ndim + 1))
        return steps if dim is None else steps[dim]

    def is_contiguous(self) -> bool:
        """Return True if the numbers lie in the order of the indices, without gaps."""
        return self.flags.c_contiguous

    def contiguous(self) -> Any:
        """Return the same numbers without gaps: this array, or a copy."""
        return self if self.flags.c_contiguous else np.ascontiguousarray(self).view(HostArray)

    def detach(self) -> Any:
        """Return this array: gradients are not recorded."""
        return self

    def cpu(self) -> Any:
        """Return this array."""
        return self

    def numpy(self) -> np.ndarray:
        """Return the same memory as a plain numpy array."""
        return self.view(np.ndarray)

    # -- copies ------------------------------------------------------------------------------------

    def clone(self) -> Any:
        """Return a contiguous copy."""
        return self.copy()

    def copy_(self, source: Any, non_blocking: bool = False) -> Any:
        """Overwrite this array by another one, which is broadcast and converted."""
        with np.errstate(all="ignore"):  # too large numbers become infinite
            self[...] = source
        return self

    def fill_(self, value: float) -> Any:
        """Overwrite every number."""
        self[...] = value
        return self

    def zero_(self) -> Any:
        """Overwrite every number by 0."""
        return self.fill_(0)

    def to(self, *changes: Any, copy: bool = False, dtype: Any = None, **_: Any) -> Any:
        """Return this array in another dtype. Devices are accepted if they are the host."""
        for change in changes:
            if isinstance(change, np.dtype):
                dtype = change
            elif getattr(change, "type", change) != "cpu":
                raise ValueError(f"a host array cannot move to {change!r}.")
        dtype = self.dtype if dtype is None else dtype
        with np.errstate(all="ignore"):  # too large numbers become infinite
            return self.astype(dtype, copy=copy)

    def float(self) -> Any:
        """Return this array in float32."""
        return self.astype(np.float32, copy=False)

    def double(self) -> Any:
        """Return this array in float64."""
        return self.astype(np.float64, copy=False)

    def long(self) -> Any:
        """Return this array in int64."""
        return self.astype(np.int64, copy=False)

    def int(self) -> Any:
        """Return this array in int32."""
        return self.astype(np.int32, copy=False)

    def bool(self) -> Any:
        """Return which numbers are not 0."""
        return self.astype(np.bool_, copy=False)

    # -- shapes ------------------------------------------------------------------------------------

    def view(self, *target: Any, **others: Any) -> Any:
        """Return the same memory in another shape, dtype or class."""
        if target and not others and isinstance(target[0], (int, np.integer, tuple, list)):
            return self.reshape(*target, copy=False)
        return super().view(*target, **others)

    def flatten(self, start: Any = 0, end: Any = -1) -> Any:
        """Join dimensions from `start` to `end`: a view if possible."""
        if self.ndim == 0:
            return self.reshape(1)
        end = normalize_axis_index(end, self.ndim) + 1
        joined = math.prod(self.shape[start:end])
        return self.reshape(*self.shape[:start], joined, *self.shape[end:])

    def unflatten(self, dim: Any, sizes: Sizes) -> Any:
        """Split a dimension into several."""
        dim = normalize_axis_index(dim, self.ndim)
        sizes = np.empty(self.shape[dim], dtype=np.bool_).reshape(*sizes).shape  # -1 is resolved
        return self.reshape(*self.shape[:dim], *sizes, *self.shape[dim + 1 :])

    def unsqueeze(self, dim: Any) -> Any:
        """Insert a dimension of size 1."""
        return np.expand_dims(self, dim)

    def expand(self, *sizes: Any) -> Any:
        """Repeat dimensions of size 1 without a copy. -1 keeps a size."""
        sizes = shape_of(sizes)
        old = (1,) * (len(sizes) - self.ndim) + self.shape
        wanted = tuple(a if b == -1 else b for a, b in zip(old, sizes, strict=True))
        return np.broadcast_to(self, wanted, subok=True)

    def narrow(self, dim: Any, start: Any, length: Any) -> Any:
        """Return indices [start, start + length) of a dimension, as a view."""
        dim = normalize_axis_index(dim, self.ndim)
        size = self.shape[dim]
        first = start + size if start < 0 else start
        if not 0 <= first <= first + length <= size:
            raise IndexError(f"a dimension of size {size} has no {length} indices from {start}.")
        return self[(slice(None),) * dim + (slice(first, first + length),)]

    def select(self, dim: Any, index: Any) -> Any:
        """Return one index of a dimension, as a view."""
        return self[(slice(None),) * normalize_axis_index(dim, self.ndim) + (index, ...)]

    def split(self, sizes: Any, dim: Any = 0) -> tuple[Any, ...]:
        """Cut a dimension into views of these sizes, or of one size."""
        whole = self.shape[dim]
        if isinstance(sizes, (int, np.integer)):
            sizes = [min(sizes, whole - at) for at in range(0, whole, sizes)] or [0]
        if sum(sizes) != whole:
            raise ValueError(f"sizes {list(sizes)} do not add up to {whole}.")
        starts = np.cumsum([0, *sizes]).tolist()
        return tuple(
            self.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=False)
        )

    def chunk(self, count: Any, dim: Any = 0) -> tuple[Any, ...]:
        """Cut a dimension into at most this many views of equal size, the last one smaller."""
        size = -(-self.shape[dim] // count)
        return self.split(size or [0] * count, dim)

    def unbind(self, dim: Any = 0) -> tuple[Any, ...]:
        """Return the views at each index of a dimension."""
        return tuple(self.select(dim, index) for index in range(self.shape[dim]))

    def t(self) -> Any:
        """Return the transposed matrix, as a view."""
        return self.T

    def permute(self, *dims: Any) -> Any:
        """Reorder dimensions, as a view."""
        return np.transpose(self, shape_of(dims))

    def movedim(self, source: Any, target: Any) -> Any:
        """Move a dimension to another place, as a view."""
        return np.moveaxis(self, source, target)

    # -- reductions and choices --------------------------------------------------------------------

    def amax(self, dim: Any = None, keepdim: Any = False) -> Any:
        """Return the maxima along a dimension."""
        return super().max(axis=dim, keepdims=keepdim)

    def amin(self, dim: Any = None, keepdim: Any = False) -> Any:
        """Return the minima along a dimension."""
        return super().min(axis=dim, keepdims=keepdim)

    def aminmax(self) -> tuple[Any, Any]:
        """Return the smallest and the largest number, or NaN twice if any is NaN."""
        return self.min(), self.max()

    def sum(self, dim: Any = None, keepdim: Any = False, **others: Any) -> Any:
        return _summed(super().sum, self.dtype, _along(dim, keepdim, others))

    def mean(self, dim: Any = None, keepdim: Any = False, **others: Any) -> Any:
        options = _along(dim, keepdim, others)
        if self.dtype.kind in "iub":
            return super().mean(**options)
        return _summed(super().mean, self.dtype, options)

    def any(self, dim: Any = None, keepdim: Any = False, **others: Any) -> Any:
        return super().any(**_along(dim, keepdim, others))

    def all(self, dim: Any = None, keepdim: Any = False, **others: Any) -> Any:
        return super().all(**_along(dim, keepdim, others))

    def argmax(self, dim: Any = None, keepdim: Any = False, **others: Any) -> Any:
        return np.asarray(super().argmax(**_along(dim, keepdim, others))).view(HostArray)

    def cumsum(self, dim: Any = None, **others: Any) -> Any:
        return _summed(super().cumsum, self.dtype, _along(dim, None, others))

    def argsort(
        self, dim: Any = -1, descending: Any = False, stable: Any = False, **others: Any
    ) -> Any:
        dim = others.pop("axis", dim)  # functions of numpy call this method as well
        if self.dtype.kind == "V":  # numpy would not sort the NaN of these dtypes
            return self.float().argsort(dim, descending=descending, stable=stable)
        if stable:
            others = {"kind": "stable"}
        if not descending:
            return super().argsort(axis=dim, **others)
        # equal numbers keep their order
        turned = np.flip(self, axis=dim).argsort(dim, stable=stable)
        return self.shape[dim] - 1 - np.flip(turned, axis=dim)

    def nonzero(self, as_tuple: Any = False) -> Any:
        """Return the indices of numbers other than 0, [n, dimensions], or one array each."""
        indices = super().nonzero()
        if as_tuple:
            return tuple(each.view(HostArray) for each in indices)
        return np.stack(indices, axis=1).view(HostArray)

    def index_select(self, dim: Any, indices: Any) -> Any:
        """Copy indices of a dimension."""
        return np.take(self, indices, axis=dim)

    def index_copy_(self, dim: Any, indices: Any, source: Any) -> Any:
        """Overwrite indices of a dimension."""
        self[(slice(None),) * normalize_axis_index(dim, self.ndim) + (indices,)] = source
        return self

    def index_put(self, indices: Any, values: Any, accumulate: Any = False) -> Any:
        """Return a copy with values at indices, added to the old ones if `accumulate` is set."""
        changed = self.clone()
        if accumulate:
            np.add.at(changed, indices, values)
        else:
            changed[indices] = values
        return changed

    def index_fill(self, dim: Any, indices: Any, value: Any) -> Any:
        """Return a copy in which indices of a dimension have a value."""
        return self.clone().index_copy_(dim, indices, value)

    def masked_fill(self, mask: Any, value: Any) -> Any:
        """Return a copy in which the numbers under a mask have a value."""
        return np.where(mask, np.asarray(value, dtype=self.dtype), self).view(HostArray)

    def gather(self, dim: Any, indices: Any) -> Any:
        """Return the numbers at indices along a dimension. Other dimensions may be longer."""
        part = [slice(size) for size in indices.shape]
        part[dim] = slice(None)
        return np.take_along_axis(self[tuple(part)], indices, axis=dim)

    def scatter_(self, dim: Any, indices: Any, source: Any) -> Any:
        """Overwrite the numbers at indices along a dimension."""
        np.put_along_axis(self, indices, source, axis=dim)
        return self

    def topk(self, k: Any, dim: Any = -1) -> tuple[Any, Any]:
        """Return the k largest numbers along a dimension, and their indices."""
        order = self.argsort(dim, descending=True).narrow(dim, 0, k)
        return self.gather(dim, order), order

    def repeat_interleave(self, repeats: Any, dim: Any = None, **_: Any) -> Any:
        """Repeat each number or index."""
        return np.repeat(self, repeats, axis=dim)

    def clamp(self, min: Any = None, max: Any = None) -> Any:
        """Return the numbers limited to a range."""
        return np.clip(self, min, max).astype(self.dtype, copy=False)

    def isfinite(self) -> Any:
        """Return which numbers are finite."""
        return np.isfinite(self)

    def isnan(self) -> Any:
        """Return which numbers are NaN."""
        return np.isnan(self)

    def abs(self) -> Any:
        """Return absolute values."""
        return np.abs(self)

    def exp(self) -> Any:
        """Return e to the power of each number. float32 is computed in float64 and rounded once."""
        with np.errstate(over="ignore", under="ignore"):  # torch warns neither
            if self.dtype != np.float32:
                return np.exp(self)
            return np.exp(self, out=np.empty_like(self), dtype=np.float64, casting="same_kind")

    def log(self) -> Any:
        """Return natural logarithms."""
        return np.log(self)

    def square(self) -> Any:
        """Return the squares of numbers."""
        return np.square(self)

    def div(self, other: Any, rounding_mode: str | None = None) -> Any:
        """Divide, and round down if `rounding_mode` is `"floor"`."""
        if rounding_mode not in (None, "floor"):
            raise ValueError(f"rounding_mode={rounding_mode!r} is not supported; pass 'floor'.")
        quotient = self // other if rounding_mode else self / other
        if isinstance(other, (int, float)):  # numbers do not widen arrays
            is_whole = self.dtype.kind in "iub" and rounding_mode is None
            return quotient.astype(np.float32 if is_whole else self.dtype, copy=False)
        return quotient

    def new_empty(self, *shape: Any, dtype: Any = None, device: Any = None) -> Any:
        """Return an uninitialized array of this dtype."""
        return HostArray(shape_of(shape), dtype=self.dtype if dtype is None else dtype)

    def new_zeros(self, *shape: Any, dtype: Any = None, device: Any = None) -> Any:
        """Return zeros of this dtype."""
        return self.new_empty(*shape, dtype=dtype).zero_()


def shape_of(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return sizes that were passed one by one or as one sequence."""
    return tuple(shape[0]) if shape and isinstance(shape[0], (tuple, list)) else shape


def _along(dim: Any, keepdim: Any, others: dict[str, Any]) -> dict[str, Any]:
    """Return numpy's arguments for torch's `dim` and `keepdim`."""
    if dim is not None:
        others["axis"] = dim
    if keepdim:
        others["keepdims"] = True
    return others


def _summed(add: Any, dtype: Any, options: dict[str, Any]) -> Any:
    """Add as torch does: narrow floats in float32, integers in int64."""
    if options.get("dtype") is not None or dtype.name in {"float32", "float64"}:
        return add(**options)
    if dtype.kind in "iub":
        return add(**options | {"dtype": np.int64})
    return add(**options | {"dtype": np.float32}).astype(dtype)
