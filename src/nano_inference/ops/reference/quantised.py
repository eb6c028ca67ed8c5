"""`QuantisedWeight` of the reference backend: a row is its codes and its scales, and products are
those of `ops.quantised`.
"""

import torch
from torch import Tensor

from nano_inference.ops.formats import Format, bounds_of, groups_of
from nano_inference.ops.quantised import Codes, encode, packed, product, unpacked, widened
from nano_inference.ops.stored_rows import count_rows, require_rows

ALIGNMENT = 4  # bytes: scales are read as float32


class QuantisedWeight:
    """A weight [rows, columns] in a format of `ops.quantised`.

    Args:
        shape: [rows, columns].
        dtype: of what products read, and of what `read` gives.
        device: where it lies.
        form: its format.
        segments: of its columns, as `Ops.linear` is told of them; see `bounds_of`.

    Attributes:
        bounds: of its segments.
        data: uint8 [rows, bytes of one]: its codes, two in a byte where they have 4 bits, then its
            scales, then its minima. Not initialised.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        form: Format,
        segments: tuple[int, ...] | None = None,
    ) -> None:
        (rows, self.columns), self.dtype, self.form = shape, dtype, form
        self.bounds = bounds_of(segments, self.columns, form)
        width = self._ends[2]
        self.data = torch.empty((rows, width), dtype=torch.uint8, device=device)

    @property
    def rows(self) -> int:
        """Of the weight."""
        return len(self.data)

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.data.device

    @property
    def shape(self) -> torch.Size:
        """[rows, columns]."""
        return torch.Size((self.rows, self.columns))

    def numel(self) -> int:
        """Numbers in it."""
        return self.rows * self.columns

    def data_ptr(self) -> int:
        """Where it lies; updates do not move it."""
        return self.data.data_ptr()

    def write(self, start: int, tensor: Tensor) -> None:
        """Rows [start, start + n) become `tensor` [n, columns], rounded to codes. Raises
        `ValueError` where it does not fit.
        """
        require_rows(self.shape, start, tensor)
        self.write_codes(start, encode(tensor.detach().to(self.device), self.form, self.bounds))

    def write_codes(self, start: int, given: Codes) -> None:
        """Rows [start, start + n) become these codes, as they are; of a format that this one holds
        (`Format.holds`).
        """
        require_rows(self.shape, start, given.codes)
        given = widened(given, self.form, self.bounds)
        own = self.data[start : start + len(given.codes)]
        parts = [packed(given.codes, self.form), given.scales.to(self._scale)]
        parts += [] if given.mins is None else [given.mins]
        for at, part in zip((0, *self._ends), parts, strict=False):
            stored = part.contiguous().view(torch.uint8)
            own[:, at : at + stored.shape[1]] = stored

    def read(self, start: int = 0, count: int | None = None) -> Tensor:
        """What the codes of rows [start, start + count) stand for, [count, columns] in `dtype`;
        None: all that follow. Raises `ValueError` for rows that there are not.
        """
        count = count_rows(self.rows, start, count)
        return self.part(slice(start, start + count)).codes().numbers().to(self.dtype)

    def clone(self) -> "QuantisedWeight":
        """A copy of its own."""
        return self._with(self.data.clone())

    def part(self, rows: slice | Tensor) -> "QuantisedWeight":
        """Some rows: of a slice not copied, or a copy of those of these numbers [n]."""
        return self._with(self.data[rows])

    def chunk(self, count: int) -> list["QuantisedWeight"]:
        """As many weights of equally many rows each, not copied."""
        return [self._with(data) for data in self.data.chunk(count)]

    def codes(self) -> Codes:
        """As plain tensors."""
        groups = len(groups_of(self.bounds, self.form))
        first, second, end = self._ends
        scales = self.data[:, first:second].view(self._scale)[:, :groups].float()
        mins = self.data[:, second:end].view(torch.float32) if self.form.mins else None
        codes = unpacked(self.data, self.columns, self.form)
        return Codes(codes, scales, self.form, self.bounds, mins)

    @property
    def _scale(self) -> torch.dtype:
        return torch.float32 if self.form.wide else torch.float16

    @property
    def _ends(self) -> tuple[int, int, int]:
        """Where, in a row, codes, scales and minima end."""
        groups = len(groups_of(self.bounds, self.form))
        codes = _aligned(-(-self.columns * self.form.bits // 8))
        scales = codes + _aligned(groups * self._scale.itemsize)
        return codes, scales, scales + (4 * groups if self.form.mins else 0)

    def _with(self, data: Tensor) -> "QuantisedWeight":
        shape = (0, self.columns)
        other = QuantisedWeight(shape, self.dtype, data.device, self.form, self.bounds)
        other.data = data
        return other


def quantised_linear(x: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
    """`Ops.linear` in the segments that the weight has: float32 [N, rows]. Inputs and bias are
    rounded to the weight's dtype first.
    """
    sums = product(x.to(weight.dtype), weight.codes())
    return sums if bias is None else sums + bias.to(weight.dtype).float()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
