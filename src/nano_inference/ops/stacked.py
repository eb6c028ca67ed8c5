"""`StackedWeight`: a weight whose rows have different formats, as parts with one format each."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from nano_inference.arrays import Device, Dtype, Tensor, namespace
from nano_inference.ops.formats import Stack
from nano_inference.ops.quantised import Codes
from nano_inference.ops.stored_rows import count_rows, require_rows


class Part(Protocol):
    """The operations of a quantized weight that stacks use."""

    rows: int
    columns: int
    dtype: Dtype
    device: Device

    def write(self, start: int, tensor: Tensor) -> None: ...
    def write_codes(self, start: int, weight: Codes) -> None: ...
    def read(self, start: int, count: int) -> Tensor: ...
    def clone(self) -> Any: ...


class StackedWeight:
    """A weight [rows, columns] in formats that differ by rows.

    Args:
        form: Formats and numbers of rows.
        parts: A weight in each of these formats.
    """

    def __init__(self, form: Stack, parts: Sequence[Any]) -> None:
        self.form, self.parts = form, tuple(parts)
        first: Part = self.parts[0]
        self.columns, self.dtype, self.device = first.columns, first.dtype, first.device
        self.rows = sum(rows for rows, _ in form.parts)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape [rows, columns], without padding."""
        return self.rows, self.columns

    def numel(self) -> int:
        """Return the number of weights, without padding."""
        return self.rows * self.columns

    def data_ptr(self) -> int:
        """Return 0: the parts have separate memory."""
        return 0

    def write(self, start: int, tensor: Tensor) -> None:
        """Replace rows [start, start + n) by `tensor` [n, columns], rounded to codes. Raise
        `ValueError` if the shape does not fit.
        """
        require_rows(self.shape, start, tensor)
        for part, first, low, high in self._overlaps(start, len(tensor)):
            part.write(first, tensor[low:high])

    def write_codes(self, start: int, weight: Codes) -> None:
        """Replace rows [start, start + n) by these codes, unchanged. All rows must be in parts
        whose format holds them (`Format.holds`).
        """
        require_rows(self.shape, start, weight.codes)
        for part, first, low, high in self._overlaps(start, len(weight.codes)):
            part.write_codes(first, weight.rows(low, high))

    def read(self, start: int = 0, count: int | None = None) -> Tensor:
        """Decode rows [start, start + count), [count, columns] in `dtype`. None: all remaining
        rows. Raise `ValueError` for rows outside the weight.
        """
        count = count_rows(self.rows, start, count)
        pieces = [
            part.read(first, high - low) for part, first, low, high in self._overlaps(start, count)
        ]
        return namespace(self.dtype).cat(pieces or [self.parts[0].read(0, 0)])

    def clone(self) -> "StackedWeight":
        """Return an independent copy."""
        return StackedWeight(self.form, [part.clone() for part in self.parts])

    def _overlaps(self, start: int, count: int) -> Iterator[tuple[Part, int, int, int]]:
        """Yield the parts that hold some of the rows [start, start + count): the part, its first
        row of these, and which of these rows they are as [low, high).
        """
        at = 0
        for part in self.parts:
            low, high = max(at - start, 0), min(at + part.rows - start, count)
            if low < high:
                yield part, start + low - at, low, high
            at += part.rows
