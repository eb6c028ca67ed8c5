"""`FusedTensor`: tensors that hold several tensors of the checkpoint, and their parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from nano_inference.models.parameters.param import Fused, ParamSpec


@dataclass(frozen=True, slots=True)
class FusedTensor:
    """A tensor that holds several checkpoint tensors of one shape.

    Attributes:
        shape: of the whole.
        parts: names in the checkpoint, in order.
        axes, order: as `Fused` has them; the product of the leading axes is the number of parts.
    """

    shape: tuple[int, ...]
    parts: tuple[str, ...]
    axes: tuple[int, ...]
    order: tuple[int, ...]

    def split(self, whole: Tensor) -> list[tuple[str, Tensor]]:
        """Each part with its name; `whole` has `shape`. Views where it is contiguous."""
        parts = whole.reshape(self.axes).permute(self.order)
        places = product(*(range(size) for size in parts.shape[: self._leading]))
        return [(name, parts[place]) for name, place in zip(self.parts, places, strict=True)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`: the whole of its parts, in order."""
        ordered = torch.stack(list(parts)).reshape([self.axes[axis] for axis in self.order])
        back = [self.order.index(axis) for axis in range(len(self.axes))]
        return ordered.permute(back).reshape(self.shape)

    def cut(self, whole: Any) -> dict[str, Any]:
        """Each part by its name, of what is read by slices."""
        if len(self.parts) == 1 and self.axes == self.shape:
            return {self.parts[0]: whole}
        matrices = _Matrices(self, whole)
        return {name: FusedPart(matrices, place) for place, name in enumerate(self.parts)}

    def split_places(self, places: Tensor, values: Tensor) -> list[tuple[str, Tensor, Tensor]]:
        """Single numbers of the whole by the part that each is of: name, flat places in the part,
        values.

        `places` are flat and row-major, int64 [n], inside of the whole.
        """
        size = torch.Size(self.shape).numel() // len(self.parts)
        places = self._in_order(places)
        part = places // size
        order = part.argsort(stable=True)
        counts = part.bincount(minlength=len(self.parts)).tolist()
        rows = zip(
            self.parts,
            (places % size)[order].split(counts),
            values[order].split(counts),
            strict=True,
        )
        return [(name, inside, numbers) for name, inside, numbers in rows if len(inside)]

    @property
    def _leading(self) -> int:
        """How many axes, in order, count the parts."""
        left, leading = len(self.parts), 0
        while left > 1:
            left //= self.axes[self.order[leading]]
            leading += 1
        return leading

    def _in_order(self, places: Tensor) -> Tensor:
        """Flat places in the whole -> in the whole with its axes in order."""
        along = torch.unravel_index(places, self.axes)
        found = torch.zeros_like(places)
        for axis in self.order:
            found = found * self.axes[axis] + along[axis]
        return found


class _Matrices:
    """A fused tensor that is read a matrix at a time, where its parts are of one matrix each. What
    was read last is kept, as the next part is of it too.
    """

    def __init__(self, fused: FusedTensor, whole: Any) -> None:
        self.whole, self._read, self._parts = whole, -1, list[Tensor]()
        self._each, self._one, self._by_matrix = len(fused.parts), fused, False
        count, each = fused.shape[0], len(fused.parts) // fused.shape[0]
        axes, order = fused.axes, fused.order
        if each > 1 and axes[0] == count * each and order == tuple(range(len(axes))):
            # rows below rows, of one matrix after the other
            axes, order = (count, each, *axes[1:]), (0, *(1 + axis for axis in order))
        if len(fused.shape) == 3 and each and axes[0] == count and order[0] == 0:
            self._each = each
            self._by_matrix, names = True, fused.parts[:each]
            self._one = FusedTensor((1, *fused.shape[1:]), names, (1, *axes[1:]), order)
            if each == 1:  # the first axis counts no parts
                order = tuple(axis - 1 for axis in order[1:])
                self._one = FusedTensor(fused.shape[1:], names, axes[1:], order)

    def part(self, place: int) -> Tensor:
        """All of a part."""
        which, within = divmod(place, self._each)
        if which != self._read:
            self._parts.clear()  # before the next matrix is there
            matrix = self.whole[which : which + 1] if self._by_matrix else self.whole[:]
            self._parts = [part for _, part in self._one.split(matrix)]
            self._read = which
        found = self._parts[within]
        if within == self._each - 1:
            self._parts, self._read = [], -1
        return found


@dataclass(frozen=True, slots=True)
class FusedPart:
    """A part of a fused tensor, to be read by slices.

    Attributes:
        matrices: of the whole.
        place: which part it is.
    """

    matrices: _Matrices
    place: int

    @property
    def why(self) -> str | None:
        """Why products do not read its codes; None: it has none."""
        return getattr(self.matrices.whole, "why", None)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        """A part of it, or all."""
        return self.matrices.part(self.place)[index]


def fused_tensors(table: tuple[ParamSpec, ...]) -> dict[str, FusedTensor]:
    """What transformers has in memory under other names than the checkpoint, or in one piece."""
    found = {
        each.name: _fused_tensor(each, tuple(source.name for source in param.sources))
        for param in table
        for each in param.fused
    }
    for param in table:
        shapes = {each.name: each.shape for each in param.sources}
        for name, other in param.other_names:
            shape = shapes.get(name, param.sources[0].shape)
            found[other] = FusedTensor(shape, (name,), shape, tuple(range(len(shape))))
    return found


def _fused_tensor(fused: Fused, parts: tuple[str, ...]) -> FusedTensor:
    axes, order = fused.axes, fused.order
    if not axes:
        rows = torch.Size(fused.shape[:-1]).numel()
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
    """A tensor by the names of its checkpoint. One of a name or shape that `fused` has not comes
    back as it is.
    """
    if isinstance(tensor, Tensor) and tensor.dim() == 0:  # a number is a vector of one
        return [(name, tensor.view(1))]
    # callers err
    known = fused.get(name) if isinstance(name, str) and isinstance(tensor, Tensor) else None
    if known is None or tuple(tensor.shape) != known.shape:
        return [(name, tensor)]
    return known.split(tensor)
