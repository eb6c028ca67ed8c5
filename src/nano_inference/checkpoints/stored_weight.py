"""A weight of a checkpoint that is stored as codes and scales: it is cut, and dequantised, where a
part of it is read. `quantised_weights.py` has the formats.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_inference.errors import ModelLoadError
from nano_inference.models.spec.quantisation import Scheme
from nano_inference.ops.formats import Format as CodeFormat
from nano_inference.ops.quantised import Codes

Shape = tuple[int, ...]
Place = tuple[slice, ...]  # which of several matrices; empty: there is one
# Numbers that are dequantised at once: what is float32 beside a weight is of this size.
PANEL = 2**22
_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Part:
    """One of the tensors that hold a weight.

    Attributes:
        dtypes: that it may have, as safetensors names them.
        shape: that it must have; what is 1 on either side is not compared. Of a weight of several
            matrices: that of one.
        axis: along which it is cut as the weight's rows are; None: it is read whole.
        per_row: how much of it, along that axis, belongs to a row.
    """

    dtypes: tuple[str, ...]
    shape: Shape
    axis: int | None = None
    per_row: Fraction = Fraction(1)


Cut = Mapping[str, Tensor]  # the tensors of a weight, cut to some rows of a matrix


class Coded(NamedTuple):
    """How products read a weight as it is stored.

    Attributes:
        form: the format that holds it.
        read: its tensors, and the shape of what they are cut to: the codes.
    """

    form: CodeFormat
    read: Callable[[Cut, Shape], Codes]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a weight is stored.

    Attributes:
        parts: the tensors, by what their names end with.
        decode: these tensors, and the shape of what they are cut to: their numbers in float32.
        coded: how products read its codes, or why they do not; None: they are no whole numbers.
    """

    parts: Mapping[str, Part]
    decode: Callable[[Cut, Shape], Tensor]
    coded: Callable[[], Coded | str] | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """The tensors of a checkpoint around one weight, for its layout to look at.

    Attributes:
        name: of the weight.
        stem: what the names of its tensors begin with.
        shape: that the model wants.
        scheme: what the checkpoint says of it.
        method, where: that it is quantised with, and the file that says so.
        tensors: of the checkpoint, by name, as safetensors reads them by slices.
    """

    name: str
    stem: str
    shape: Shape
    scheme: Scheme
    method: str
    where: str
    tensors: Mapping[str, Any]

    def has(self, end: str) -> bool:
        """Whether there is such a tensor."""
        return self.stem + end in self.tensors

    def tensor(self, end: str) -> Any:
        """One of the tensors, to be read by slices. Raises `ModelLoadError` where it is missing."""
        name = self.stem + end
        if name not in self.tensors:
            raise ModelLoadError(
                f"tensor {name!r} is missing, and weight {self.name!r} ({self.method}) cannot be "
                "read without it."
            )
        return self.tensors[name]

    def read(self, end: str) -> Tensor:
        """All of a small tensor."""
        return self.tensor(end)[...].cpu()

    def wrong(self, end: str, what: str) -> ModelLoadError:
        """An error of one of the tensors."""
        return ModelLoadError(f"tensor {self.stem + end!r} {what}.")

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns."""
        if len(self.shape) != 2:
            raise ModelLoadError(
                f"weight {self.name!r} is quantised ({self.scheme.format}) and no matrix: its "
                f"shape is {self.shape}."
            )
        return self.shape[0], self.shape[1]

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        (rows, columns), (all_rows, all_columns) = self.scheme.block, self.matrix
        return rows or all_rows, columns or all_columns

    def groups(self) -> int:
        """Of columns that share a scale."""
        (_, columns), (_, each) = self.matrix, self.block
        if columns % each:
            raise ModelLoadError(
                f"weight {self.name!r} has {columns} columns, which are no whole number of groups "
                f"of {each}."
            )
        return columns // each

    def words(self, count: int, codes: int, what: str) -> int:
        """Words that hold so many codes, `codes` in each."""
        if count % codes:
            raise ModelLoadError(
                f"weight {self.name!r} has {count} {what}, which do not fill words of {codes} "
                "codes."
            )
        return count // codes


class QuantisedWeight:
    """A weight that is read by slices as safetensors reads one, and dequantised on the way.

    Memory: what is taken, in `dtype`, and some panels of `PANEL` numbers in float32.
    """

    def __init__(self, stored: Stored, layout: Layout, dtype: torch.dtype) -> None:
        """Raises `ModelLoadError` naming the tensor that is missing, or of a wrong dtype or
        shape.
        """
        self._stored, self._layout, self._dtype = stored, layout, dtype
        self._slices = {end: require_part(stored, end, part) for end, part in layout.parts.items()}
        self._unit = math.lcm(*(part.per_row.denominator for part in layout.parts.values()))

    @property
    def tensors(self) -> frozenset[str]:
        """Names of the tensors that hold it."""
        return frozenset(self._stored.stem + end for end in self._slices)

    @cached_property
    def _coded(self) -> Coded | str:
        if self._layout.coded is None:
            return f"codes of {self._stored.scheme.format} are no whole numbers"
        return self._layout.coded()

    @property
    def form(self) -> CodeFormat | None:
        """The format of codes that products read as they are; None: they do not."""
        return None if isinstance(self._coded, str) else self._coded.form

    @property
    def why(self) -> str | None:
        """Why they do not, or None."""
        return self._coded if isinstance(self._coded, str) else None

    def codes(self, start: int, stop: int) -> Iterator[Codes]:
        """The codes of rows [start, stop), some rows after the other, in `form`, which is not
        None. Raises `ModelLoadError` for scales that are damaged.
        """
        assert not isinstance(self._coded, str)
        for at, end in self._panels(start, stop):
            cut = self._cut_all((), at, end)
            found = self._coded.read(cut, (end - at, self._stored.shape[1]))
            self._require_finite(found.scales)
            yield found.rows(max(start - at, 0), min(end, stop) - at)

    def get_shape(self) -> list[int]:
        """Of its numbers."""
        return list(self._stored.shape)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        """A part of it, or all, in its dtype; rows in one run."""
        given = index if isinstance(index, tuple) else (index,)
        if len(self._stored.shape) == 2:
            return self._matrix((), *given)
        first, *others = given
        every = range(self._stored.shape[0])[first]
        found = [self._matrix((slice(each, each + 1),), *others) for each in every]
        return torch.stack(found) if found else self._empty((0, *self._stored.shape[1:]))[given]

    def _matrix(self, which: Place, rows: slice = _ALL, columns: slice = _ALL) -> Tensor:
        """A part of a matrix, panel by panel into the memory for it."""
        height, width = self._stored.shape[-2:]
        start, stop, _ = rows.indices(height)
        shape = (max(stop - start, 0), len(range(width)[columns]))
        found: Tensor | None = None
        for at, last in self._panels(start, stop):
            begin, end = max(at, start), min(last, stop)
            panel = self._panel(which, at, last)
            if found is None:
                found = panel.new_empty(shape, dtype=self._dtype)
            found[begin - start : end - start] = panel[begin - at : end - at, columns]
        return self._empty(shape) if found is None else found

    def _panels(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Rows that are read at once, which are whole units, until all of [start, stop) are."""
        height, width = self._stored.shape[-2:]
        last = min(ceil_div(stop, self._unit) * self._unit, height)
        size = max(1, PANEL // width // self._unit) * self._unit
        for at in range(start // self._unit * self._unit, stop, size):
            yield at, min(at + size, last)

    def _empty(self, shape: Shape) -> Tensor:
        return torch.empty(shape, dtype=self._dtype)

    def _panel(self, which: Place, at: int, end: int) -> Tensor:
        """Rows [at, end), which are whole units, in float32."""
        cut = self._cut_all(which, at, end)
        values = self._layout.decode(cut, (end - at, self._stored.shape[-1]))
        self._require_finite(values)
        return values

    def _require_finite(self, values: Tensor) -> None:
        if not bool(values.isfinite().all()):
            raise ModelLoadError(
                f"weight {self._stored.name!r} is dequantised to NaN or infinite numbers: the "
                "tensors of its scales are damaged."
            )

    def _cut_all(self, which: Place, at: int, end: int) -> dict[str, Tensor]:
        parts = self._layout.parts
        return {name: self._cut(name, part, which, at, end) for name, part in parts.items()}

    def _cut(self, end: str, part: Part, which: Place, at: int, stop: int) -> Tensor:
        """What of a tensor belongs to rows [at, stop)."""
        stored = self._slices[end]
        if part.axis is None:
            return stored[...].view(part.shape)
        first = math.floor(at * part.per_row)
        last = min(math.ceil(stop * part.per_row), part.shape[part.axis])
        if which:
            return stored[(*which, slice(first, last))][0]
        if tuple(stored.get_shape()) != part.shape:  # it has other ones
            return stored[...].view(part.shape).narrow(part.axis, first, last - first)
        return stored[(*(_ALL,) * part.axis, slice(first, last))]


def require_part(stored: Stored, end: str, part: Part) -> Any:
    """Return one of the tensors, to be read by slices. Raises `ModelLoadError` for another dtype or
    shape than the part's.
    """
    found = stored.tensor(end)
    dtype, shape = str(found.get_dtype()), tuple(found.get_shape())
    needed = (*stored.shape[:-2], *part.shape)
    if dtype not in part.dtypes:
        raise stored.wrong(end, f"has dtype {dtype}, and {' or '.join(part.dtypes)} is needed")
    if _without_ones(shape) != _without_ones(needed):
        rows, columns = (each or "all" for each in stored.scheme.block)
        raise stored.wrong(
            end,
            f"has shape {shape}, expected {needed}: {stored.where} says that codes have "
            f"{stored.scheme.bits} bits, and that {rows} rows and {columns} columns share a scale, "
            f"and the weight is {stored.shape}",
        )
    return found


def _without_ones(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def ceil_div(count: int, each: int) -> int:
    """Return how many pieces of `each` hold `count`."""
    return -(-count // each)
