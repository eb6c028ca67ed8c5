"""`QuantisedWeight` of the reference backend: each row stores its codes and scales together.
Products are those of `ops.quantised`.
"""

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from nano_inference.ops.formats import Format, bounds_of, groups_of
from nano_inference.ops.interface import TensorArena
from nano_inference.ops.quantised import Codes, encode, packed, product, unpacked, widened
from nano_inference.ops.stored_rows import count_rows, require_rows


class QuantisedWeight:
    """A weight [rows, columns] in a format of `ops.formats`.

    Args:
        shape: [rows, columns].
        dtype: Dtype that products read and `read` returns.
        device: Device that holds the weight.
        form: Format of the weight.
        segments: Segments of the columns, as passed to `Ops.linear`. `bounds_of` may merge them.
        arena: Memory that holds the weight. None: torch's.

    Attributes:
        bounds: Bounds of the segments.
        data: uint8 [rows, bytes of one]: codes (two per byte if they have 4 bits), then scales,
            minima, and the steps of both. Not initialized.
        alignment: Bytes to whose multiples codes and tables are padded.
    """

    alignment = 4  # scales are read as float32

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        form: Format,
        segments: tuple[int, ...] | None = None,
        arena: TensorArena | None = None,
    ) -> None:
        (rows, self.columns), self.dtype, self.form = shape, dtype, form
        self.bounds = bounds_of(segments, self.columns, form)
        size = (rows, self._ends[-1])
        if arena is None:
            self.data = torch.empty(size, dtype=torch.uint8, device=device)
        else:
            self.data = arena.take(size, torch.uint8)

    @property
    def rows(self) -> int:
        """Number of rows in the weight."""
        return len(self.data)

    @property
    def device(self) -> torch.device:
        """Device that holds the weight."""
        return self.data.device

    @property
    def shape(self) -> torch.Size:
        """Shape [rows, columns]."""
        return torch.Size((self.rows, self.columns))

    @property
    def scales_at(self) -> int:
        """Byte offset of the scales in a row."""
        return self._ends[0]

    def numel(self) -> int:
        """Return the number of weights."""
        return self.rows * self.columns

    def data_ptr(self) -> int:
        """Return the address of the data. Updates do not move it."""
        return self.data.data_ptr()

    def write(self, start: int, tensor: Tensor) -> None:
        """Replace rows [start, start + n) by `tensor` [n, columns], rounded to codes. Raise
        `ValueError` if the shape does not fit.
        """
        require_rows(self.shape, start, tensor)
        self.write_codes(start, encode(tensor.detach().to(self.device), self.form, self.bounds))

    def write_codes(self, start: int, weight: Codes) -> None:
        """Replace rows [start, start + n) by these codes, unchanged. Their format must be one that
        this weight's format holds (`Format.holds`).
        """
        require_rows(self.shape, start, weight.codes)
        weight = widened(weight, self.form, self.bounds)
        target = self.data[start : start + len(weight.codes)]
        parts = [packed(weight.codes, self.form)]
        tables = (weight.scales, weight.mins, weight.steps, weight.min_steps)
        parts += [table.to(self._scale) for table in tables if table is not None]
        for at, part in zip((0, *self._ends), parts, strict=False):
            stored = part.contiguous().view(torch.uint8)
            target[:, at : at + stored.shape[1]] = stored

    def read(self, start: int = 0, count: int | None = None) -> Tensor:
        """Decode rows [start, start + count), [count, columns] in `dtype`. None: all remaining
        rows. Raise `ValueError` for rows outside the weight.
        """
        count = count_rows(self.rows, start, count)
        return self.part(slice(start, start + count)).codes().numbers().to(self.dtype)

    def clone(self) -> "QuantisedWeight":
        """Return an independent copy."""
        return self._with(self.data.clone())

    def part(self, rows: slice | Tensor) -> "QuantisedWeight":
        """Return some rows: a view for a slice, a copy for row numbers [n]."""
        return self._with(self.data[rows])

    def chunk(self, count: int) -> list["QuantisedWeight"]:
        """Split into `count` weights with equal numbers of rows, not copied."""
        return [self._with(data) for data in self.data.chunk(count)]

    def codes(self) -> Codes:
        """Return the weight as plain tensors."""
        codes = unpacked(self.data, self.columns, self.form)
        tables = iter(
            self.data[:, start:end].view(self._scale)[:, :count].float()
            for (start, end), count in zip(pairwise(self._ends), self._counts, strict=True)
        )
        scales, mins = next(tables), next(tables) if self.form.mins else None
        steps, min_steps = next(tables, None), next(tables, None)
        return Codes(codes, scales, self.form, self.bounds, mins, steps, min_steps)

    @property
    def _scale(self) -> torch.dtype:
        return torch.float16 if self.form.scales == "half" else torch.float32

    @property
    def _counts(self) -> list[int]:
        """Numbers in a row's tables: scales, minima, steps of scales, steps of minima."""
        groups = len(groups_of(self.bounds, self.form))
        kinds = 2 if self.form.mins else 1
        steps = -(-groups // self.form.groups_per_step) if self.form.scales == "steps" else 0
        return [groups] * kinds + [steps] * (kinds if steps else 0)

    @property
    def _ends(self) -> list[int]:
        """Byte offsets in a row at which the codes and each table end."""
        codes = self._aligned(-(-self.columns // 2) if self.form.bits == 4 else self.columns)
        sizes = [self._aligned(count * self._scale.itemsize) for count in self._counts]
        return list(accumulate(sizes, initial=codes))

    def _aligned(self, size: int) -> int:
        return -(-size // self.alignment) * self.alignment

    def _with(self, data: Tensor) -> "QuantisedWeight":
        shape = (0, self.columns)
        other = self.__class__(shape, self.dtype, data.device, self.form, self.bounds)
        other.data = data
        return other


def quantised_linear(x: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
    """Implement `Ops.linear` in the weight's own segments: float32 [N, rows]. Inputs and bias are
    rounded to the weight's dtype first.
    """
    sums = product(x.to(weight.dtype), weight.codes())
    return sums if bias is None else sums + bias.to(weight.dtype).float()
