"""Weight of a checkpoint stored as codes and scales, which is cut and dequantized when it is read.

`quantised_weights.py` lists the formats.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

from nano_inference.arrays import Dtype, Tensor, namespace
from nano_inference.errors import ModelLoadError
from nano_inference.models.spec.quantisation import Scheme
from nano_inference.ops.formats import Format as CodeFormat
from nano_inference.ops.quantised import Codes

Shape = tuple[int, ...]
Place = tuple[slice, ...]  # index among several matrices; empty if there is only one
# Numbers dequantized at a time: the size of temporary float32 memory.
PANEL = 2**22
_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Part:
    """Stored tensor that holds a part of a weight.

    Attributes:
        dtypes: Accepted dtypes, by safetensors' names.
        shape: Required shape, ignoring dimensions of 1. If the weight has several matrices, the
            shape for one of them.
        axis: Axis that is cut with the weight's rows. None means that the tensor is read whole.
        per_row: Length along that axis for each row of the weight.
    """

    dtypes: tuple[str, ...]
    shape: Shape
    axis: int | None = None
    per_row: Fraction = Fraction(1)


Cut = Mapping[str, Tensor]  # a weight's tensors, cut to some rows of a matrix


class Coded(NamedTuple):
    """Codes of a weight, for products that read them unchanged.

    Attributes:
        form: Format that holds the codes.
        read: Function from the cut tensors and the shape of the cut to the codes.
    """

    form: CodeFormat
    read: Callable[[Cut, Shape], Codes]


@dataclass(frozen=True, slots=True)
class Layout:
    """Storage layout of a weight.

    Attributes:
        parts: Parts by the suffixes of their names.
        decode: Function from the cut tensors and the shape of the cut to float32 numbers.
        coded: Function that returns the access to the codes, or the reason why products cannot read
            them. None if the codes are not integers.
    """

    parts: Mapping[str, Part]
    decode: Callable[[Cut, Shape], Tensor]
    coded: Callable[[], Coded | str] | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """Tensors that belong to one weight of a checkpoint.

    Attributes:
        name: Name of the weight.
        stem: Common prefix of its tensors' names.
        shape: Expected shape.
        scheme: Quantization scheme declared by the checkpoint.
        method, where: Quantization method, and the file that declares it.
        tensors: Tensors of the checkpoint by name, read by slices with safetensors' methods.
    """

    name: str
    stem: str
    shape: Shape
    scheme: Scheme
    method: str
    where: str
    tensors: Mapping[str, Any]

    def has(self, end: str) -> bool:
        """Return True if the weight has a tensor with this suffix."""
        return self.stem + end in self.tensors

    def tensor(self, end: str) -> Any:
        """Return one of the tensors, to be read by slices.

        Raises `ModelLoadError` if it is missing.
        """
        name = self.stem + end
        if name not in self.tensors:
            raise ModelLoadError(
                f"tensor {name!r} is missing; weight {self.name!r} ({self.method}) needs it."
            )
        return self.tensors[name]

    def read(self, end: str) -> Tensor:
        """Return the whole of a small tensor."""
        return self.tensor(end)[...].cpu()

    def wrong(self, end: str, what: str) -> ModelLoadError:
        """Return an error about one of the tensors."""
        return ModelLoadError(f"tensor {self.stem + end!r} {what}.")

    @property
    def matrix(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        if len(self.shape) != 2:
            raise ModelLoadError(
                f"weight {self.name!r} is quantized ({self.scheme.format}) but not a matrix: its "
                f"shape is {self.shape}."
            )
        return self.shape[0], self.shape[1]

    @property
    def block(self) -> tuple[int, int]:
        """Numbers of rows and columns that share a scale."""
        (rows, columns), (all_rows, all_columns) = self.scheme.block, self.matrix
        return rows or all_rows, columns or all_columns

    def groups(self) -> int:
        """Return the number of column groups that share a scale."""
        (_, columns), (_, group_size) = self.matrix, self.block
        if columns % group_size:
            raise ModelLoadError(
                f"weight {self.name!r} has {columns} columns, which is not a multiple of the group "
                f"size {group_size}."
            )
        return columns // group_size

    def words(self, count: int, codes: int, what: str) -> int:
        """Return the number of words that hold `count` codes, with `codes` in each."""
        if count % codes:
            raise ModelLoadError(
                f"weight {self.name!r} has {count} {what}, which is not a multiple of {codes} "
                "codes per word."
            )
        return count // codes


class QuantisedWeight:
    """Weight that is read by slices like a safetensors slice, and dequantized on reading.

    Memory: the result in `dtype`, and some panels of `PANEL` float32 numbers.
    """

    def __init__(self, stored: Stored, layout: Layout, dtype: Dtype) -> None:
        """Raise `ModelLoadError` for a tensor that is missing, or has a wrong dtype or shape."""
        self._stored, self._layout, self._dtype = stored, layout, dtype
        self._slices = {end: require_part(stored, end, part) for end, part in layout.parts.items()}
        self._unit = math.lcm(*(part.per_row.denominator for part in layout.parts.values()))

    @property
    def tensors(self) -> frozenset[str]:
        """Names of the tensors that hold the weight."""
        return frozenset(self._stored.stem + end for end in self._slices)

    @cached_property
    def _coded(self) -> Coded | str:
        if self._layout.coded is None:
            return f"codes of {self._stored.scheme.format} are not integers"
        return self._layout.coded()

    @property
    def form(self) -> CodeFormat | None:
        """Format of the codes, or None if products cannot read them."""
        return None if isinstance(self._coded, str) else self._coded.form

    @property
    def why(self) -> str | None:
        """Reason why products cannot read the codes, or None."""
        return self._coded if isinstance(self._coded, str) else None

    def codes(self, start: int, stop: int, matrix: int | None = None) -> Iterator[Codes]:
        """Yield the codes of rows [start, stop), a few rows at a time. `form` must not be None.

        `matrix` selects one of several matrices. Raises `ModelLoadError` for damaged scales.
        """
        assert not isinstance(self._coded, str)
        which = () if matrix is None else (slice(matrix, matrix + 1),)
        for at, end in self._panels(start, stop):
            cut = self._cut_all(which, at, end)
            codes = self._coded.read(cut, (end - at, self._stored.shape[-1]))
            self._require_finite(codes.scales)
            yield codes.rows(max(start - at, 0), min(end, stop) - at)

    def get_shape(self) -> list[int]:
        """Return the shape of the dequantized weight."""
        return list(self._stored.shape)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        """Return a slice of the weight in its dtype. Rows must be contiguous."""
        slices = index if isinstance(index, tuple) else (index,)
        if len(self._stored.shape) == 2:
            return self._matrix((), *slices)
        first, *others = slices
        every = range(self._stored.shape[0])[first]
        matrices = [self._matrix((slice(each, each + 1),), *others) for each in every]
        return (
            namespace(self._dtype).stack(matrices)
            if matrices
            else self._empty((0, *self._stored.shape[1:]))[slices]
        )

    def _matrix(self, which: Place, rows: slice = _ALL, columns: slice = _ALL) -> Tensor:
        """Return a part of a matrix, dequantized panel by panel."""
        height, width = self._stored.shape[-2:]
        start, stop, _ = rows.indices(height)
        shape = (max(stop - start, 0), len(range(width)[columns]))
        result: Tensor | None = None
        for at, last in self._panels(start, stop):
            begin, end = max(at, start), min(last, stop)
            panel = self._panel(which, at, last)
            if result is None:
                result = panel.new_empty(shape, dtype=self._dtype)
            result[begin - start : end - start] = panel[begin - at : end - at, columns]
        return self._empty(shape) if result is None else result

    def _panels(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield row ranges that cover [start, stop), extended to whole units."""
        height, width = self._stored.shape[-2:]
        last = min(ceil_div(stop, self._unit) * self._unit, height)
        size = max(1, PANEL // width // self._unit) * self._unit
        for at in range(start // self._unit * self._unit, stop, size):
            yield at, min(at + size, last)

    def _empty(self, shape: Shape) -> Tensor:
        return namespace(self._dtype).empty(shape, dtype=self._dtype)

    def _panel(self, which: Place, at: int, end: int) -> Tensor:
        """Return rows [at, end), which are whole units, in float32."""
        cut = self._cut_all(which, at, end)
        values = self._layout.decode(cut, (end - at, self._stored.shape[-1]))
        self._require_finite(values)
        return values

    def _require_finite(self, values: Tensor) -> None:
        if not bool(values.isfinite().all()):
            raise ModelLoadError(
                f"weight {self._stored.name!r} is dequantized to NaN or infinite numbers: its "
                "scales are damaged."
            )

    def _cut_all(self, which: Place, at: int, end: int) -> dict[str, Tensor]:
        parts = self._layout.parts
        return {name: self._cut(name, part, which, at, end) for name, part in parts.items()}

    def _cut(self, end: str, part: Part, which: Place, at: int, stop: int) -> Tensor:
        """Return the part of a tensor that belongs to rows [at, stop)."""
        stored = self._slices[end]
        if part.axis is None:
            return stored[...].reshape(part.shape)
        first = math.floor(at * part.per_row)
        last = min(math.ceil(stop * part.per_row), part.shape[part.axis])
        if which:
            return stored[(*which, slice(first, last))][0]
        if tuple(stored.get_shape()) != part.shape:  # differs in dimensions of 1
            return stored[...].reshape(part.shape).narrow(part.axis, first, last - first)
        return stored[(*(_ALL,) * part.axis, slice(first, last))]


def require_part(stored: Stored, end: str, part: Part) -> Any:
    """Return one of the tensors, to be read by slices.

    Raises `ModelLoadError` if its dtype or shape is not that of the part.
    """
    tensor = stored.tensor(end)
    dtype, shape = str(tensor.get_dtype()), tuple(tensor.get_shape())
    needed = (*stored.shape[:-2], *part.shape)
    if dtype not in part.dtypes:
        raise stored.wrong(end, f"has dtype {dtype}, expected {' or '.join(part.dtypes)}")
    if _without_ones(shape) != _without_ones(needed):
        rows, columns = (each or "all" for each in stored.scheme.block)
        raise stored.wrong(
            end,
            f"has shape {shape}, expected {needed}: by {stored.where}, codes have "
            f"{stored.scheme.bits} bits, {rows} rows and {columns} columns share a scale, and the "
            f"weight has shape {stored.shape}",
        )
    return tensor


def _without_ones(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def ceil_div(count: int, size: int) -> int:
    """Return the number of groups of `size` that hold `count`."""
    return -(-count // size)
