"""`FusedTensor`: a tensor that holds several checkpoint tensors, split into its parts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from nano_inference.arrays import Tensor, host, is_tensor, namespace
from nano_inference.models.parameters.param import Fused, ParamSpec
from nano_inference.ops.formats import Format
from nano_inference.ops.quantised import Codes


@dataclass(frozen=True, slots=True)
class FusedTensor:
    """A tensor that holds several checkpoint tensors of one shape.

    Attributes:
        shape: Shape of the whole tensor.
        parts: Names of the parts in the checkpoint, in order.
        axes, order: As in `Fused`. The product of the leading axes is the number of parts.
    """

    shape: tuple[int, ...]
    parts: tuple[str, ...]
    axes: tuple[int, ...]
    order: tuple[int, ...]

    def split(self, whole: Tensor) -> list[tuple[str, Tensor]]:
        """Return each part of `whole` [shape] with its name, as views if it is contiguous."""
        parts = whole.reshape(self.axes).permute(*self.order)
        places = product(*(range(size) for size in parts.shape[: self._leading]))
        return [(name, parts[place]) for name, place in zip(self.parts, places, strict=True)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor of its parts, in order: the inverse of `split`."""
        ordered = (
            namespace(parts[0]).stack(list(parts)).reshape([self.axes[axis] for axis in self.order])
        )
        back = [self.order.index(axis) for axis in range(len(self.axes))]
        return ordered.permute(*back).reshape(self.shape)

    def cut(self, whole: Any) -> dict[str, Any]:
        """Return each part by name, to be read by slices of `whole`."""
        if len(self.parts) == 1 and self.axes == self.shape:
            return {self.parts[0]: whole}
        matrices = _Matrices(self, whole)
        return {name: FusedPart(matrices, place) for place, name in enumerate(self.parts)}

    def split_places(self, places: Tensor, values: Tensor) -> list[tuple[str, Tensor, Tensor]]:
        """Assign single numbers of the whole to parts: name, flat indices in the part, values.

        `places` are flat row-major indices in the whole, int64 [n].
        """
        size = math.prod(self.shape) // len(self.parts)
        places = self._in_order(places)
        part = places // size
        order = part.argsort(stable=True)
        counts = namespace(part).bincount(part, minlength=len(self.parts)).tolist()
        rows = zip(
            self.parts,
            (places % size)[order].split(counts),
            values[order].split(counts),
            strict=True,
        )
        return [(name, inside, numbers) for name, inside, numbers in rows if len(inside)]

    @property
    def _leading(self) -> int:
        """Number of leading axes, after the permutation, that count the parts."""
        left, leading = len(self.parts), 0
        while left > 1:
            left //= self.axes[self.order[leading]]
            leading += 1
        return leading

    def _in_order(self, places: Tensor) -> Tensor:
        """Convert flat indices in the whole to flat indices in the permuted whole."""
        along = dict[int, Tensor]()  # index along each axis
        for axis in reversed(range(len(self.axes))):
            along[axis], places = places % self.axes[axis], places // self.axes[axis]
        index = along[self.order[0]]
        for axis in self.order[1:]:
            index = index * self.axes[axis] + along[axis]
        return index


class _Matrices:
    """A fused tensor that is read one matrix at a time, if no part spans several matrices.

    The matrix read last is kept, because the next part is usually in it too.
    """

    def __init__(self, fused: FusedTensor, whole: Any) -> None:
        self.whole, self._read, self._parts = whole, -1, list[Tensor]()
        self._each, self._one, self._by_matrix = len(fused.parts), fused, False
        count, per_matrix = fused.shape[0], len(fused.parts) // fused.shape[0]
        axes, order = fused.axes, fused.order
        if per_matrix > 1 and axes[0] == count * per_matrix and order == tuple(range(len(axes))):
            # parts are consecutive rows of one matrix after the other
            axes, order = (count, per_matrix, *axes[1:]), (0, *(1 + axis for axis in order))
        if len(fused.shape) == 3 and per_matrix and axes[0] == count and order[0] == 0:
            self._each = per_matrix
            self._by_matrix, names = True, fused.parts[:per_matrix]
            self._one = FusedTensor((1, *fused.shape[1:]), names, (1, *axes[1:]), order)
            if per_matrix == 1:  # the first axis does not count parts
                order = tuple(axis - 1 for axis in order[1:])
                self._one = FusedTensor(fused.shape[1:], names, axes[1:], order)

    @property
    def form(self) -> Format | None:
        """Format of the codes if each part is some rows of one matrix in their order, or None."""
        axes, order = self._one.axes, self._one.order
        whole_rows = order[-1] == len(axes) - 1 and axes[-1] == self._one.shape[-1]
        return getattr(self.whole, "form", None) if self._by_matrix and whole_rows else None

    def codes(self, index: int, start: int, stop: int) -> Iterator[Codes]:
        """Yield the codes of a part's rows [start, stop), a few rows at a time."""
        which, within = divmod(index, self._each)
        shape, axes = ((*sizes[:-1], 1) for sizes in (self._one.shape, self._one.axes))
        numbers = replace(self._one, shape=shape, axes=axes)
        _, rows = numbers.split(host.arange(math.prod(shape)))[within]
        first, *others = rows.flatten().tolist()
        step = others[0] - first if others else 1
        at = first + start * step
        for codes in self.whole.codes(at, first + (stop - 1) * step + 1, which):
            yield codes.sliced(slice((first - at) % step, None, step))
            at += len(codes.codes)

    def part(self, index: int) -> Tensor:
        """Return a whole part."""
        which, within = divmod(index, self._each)
        if which != self._read:
            self._parts.clear()  # frees memory before the next matrix is read
            matrix = self.whole[which : which + 1] if self._by_matrix else self.whole[:]
            self._parts = [part for _, part in self._one.split(matrix)]
            self._read = which
        part = self._parts[within]
        if within == self._each - 1:
            self._parts, self._read = [], -1
        return part


@dataclass(frozen=True, slots=True)
class FusedPart:
    """A part of a fused tensor, to be read by slices.

    Attributes:
        matrices: The fused tensor.
        index: Position of the part in it.
    """

    matrices: _Matrices
    index: int

    @property
    def why(self) -> str | None:
        """Reason why products cannot read the codes. None: they can, or there are no codes."""
        return getattr(self.matrices.whole, "why", None)

    @property
    def form(self) -> Format | None:
        """Format of the codes, or None if products cannot read them."""
        return self.matrices.form

    def codes(self, start: int, stop: int) -> Iterator[Codes]:
        """Yield the codes of rows [start, stop), a few rows at a time. `form` must not be None.

        Raises `ModelLoadError` for damaged scales.
        """
        return self.matrices.codes(self.index, start, stop)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        """Return a slice of the part, or all of it."""
        return self.matrices.part(self.index)[index]


def fused_tensors(table: tuple[ParamSpec, ...]) -> dict[str, FusedTensor]:
    """Return tensors that transformers holds under other names than the checkpoint, or fused."""
    tensors = {
        each.name: _fused_tensor(each, tuple(source.name for source in param.sources))
        for param in table
        for each in param.fused
    }
    for param in table:
        shapes = {each.name: each.shape for each in param.sources}
        for name, other in param.other_names:
            shape = shapes.get(name, param.sources[0].shape)
            tensors[other] = FusedTensor(shape, (name,), shape, tuple(range(len(shape))))
    return tensors


def _fused_tensor(fused: Fused, parts: tuple[str, ...]) -> FusedTensor:
    axes, order = fused.axes, fused.order
    if not axes:
        rows = math.prod(fused.shape[:-1])
        axes = (len(parts), rows // len(parts), fused.shape[-1])
        if len(parts) == 1:
            axes = fused.shape
        elif len(fused.shape) == 1:
            axes = (len(parts), fused.shape[0] // len(parts))
        order = tuple(range(len(axes)))
    return FusedTensor(fused.shape, parts, axes, order)


def unfused(
    fused: Mapping[str, FusedTensor], name: str, tensor: Tensor
) -> list[tuple[str, Tensor]]:
    """Split a tensor into checkpoint tensors.

    A tensor whose name or shape is not in `fused` is returned unchanged.
    """
    if is_tensor(tensor) and tensor.dim() == 0:  # the table lists scalars as vectors [1]
        return [(name, tensor.reshape(1))]
    # arguments may have wrong types, which the caller reports
    known = fused.get(name) if isinstance(name, str) and is_tensor(tensor) else None
    if known is None or tuple(tensor.shape) != known.shape:
        return [(name, tensor)]
    return known.split(tensor)
