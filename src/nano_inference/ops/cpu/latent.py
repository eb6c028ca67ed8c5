"""`LatentWeight`: the weight of attention over latents, laid out for products by heads."""

import torch
from torch import Tensor

from nano_inference.ops.cpu.memory import Arena
from nano_inference.ops.cpu.weights import LANES, CpuWeight, PackedWeight
from nano_inference.ops.settings import Latent
from nano_inference.ops.stored_rows import count_rows, require_rows


class LatentWeight(CpuWeight):
    """A weight [heads * (plain + value), rank] as `LatentOps` has it, written and read by rows.

    Queries are multiplied by the columns of the rows that make keys, and attended latents by the
    rows that make values: two packed weights in one piece of memory.

    Attributes:
        keys: [heads * rank, plain]: of each head the rows that make its keys, turned.
        values: [heads * value, rank].
    """

    def __init__(
        self,
        rows: int,
        sizes: Latent,
        dtype: torch.dtype,
        num_threads: int,
        arena: Arena | None = None,
    ) -> None:
        require_sizes(sizes)
        super().__init__(rows, sizes.rank, dtype, num_threads)
        self.sizes = sizes
        self.heads = rows // self._step
        shapes = ((self.heads * sizes.rank, sizes.plain), (self.heads * sizes.value, sizes.rank))
        # two of bfloat16 lie side by side, also where the last has no neighbour
        wide = [count * (-(-columns // 2) * 2) for count, columns in shapes]
        whole = (sum(wide),)
        self.data = torch.zeros(whole, dtype=dtype) if arena is None else arena.take(whole, dtype)
        self.keys, self.values = (
            PackedWeight(*shape, dtype, num_threads, _Piece(data))
            for shape, data in zip(shapes, self.data.split(wide), strict=True)
        )

    @property
    def _step(self) -> int:
        """Rows of a head."""
        return self.sizes.plain + self.sizes.value

    def write(self, start: int, tensor: Tensor) -> None:
        """See `PackedWeight.write`."""
        require_rows(self.shape, start, tensor)
        stop, plain, value = start + len(tensor), self.sizes.plain, self.sizes.value
        for head in range(start // self._step, -(-stop // self._step)):
            first = head * self._step
            bounds = (first, first + plain, first + self._step)
            a, b, c = (min(max(bound, start), stop) for bound in bounds)
            if a < b:
                self._write_keys(head, a - first, tensor[a - start : b - start])
            if b < c:
                at = head * value + b - first - plain
                self.values.write(at, tensor[b - start : c - start])

    def _write_keys(self, head: int, start: int, rows: Tensor) -> None:
        """Some rows [n, rank] of those that make a head's keys: columns of the turned ones."""
        panels = self.sizes.rank // LANES
        data = self.keys.data.view(len(self.keys.data), -1, LANES, self._depth)
        columns = data[head * panels : (head + 1) * panels].permute(1, 3, 0, 2)
        places = torch.arange(start, start + len(rows))
        numbers = rows.detach().to(self.device, self.dtype).view(len(rows), panels, LANES)
        columns[places // self._depth, places % self._depth] = numbers

    @property
    def _depth(self) -> int:
        """Columns that lie side by side."""
        return 2 if self.dtype == torch.bfloat16 else 1

    def patch(self, start: int, indices: Tensor, values: Tensor) -> None:
        """See `PackedWeight.patch`."""
        rows = start + indices.div(self.columns, rounding_mode="floor")
        if len(indices) and not 0 <= int(rows.min()) <= int(rows.max()) < self.rows:
            raise ValueError(f"indices are not within {tuple(self.shape)} from row {start} on.")
        rank, plain, value = self.sizes.rank, self.sizes.plain, self.sizes.value
        heads, within, columns = rows // self._step, rows % self._step, indices % self.columns
        of_keys = within < plain
        turned = (heads * rank + columns) * plain + within
        kept = (heads * value + within - plain) * rank + columns
        self.keys.patch(0, turned[of_keys], values[of_keys])
        self.values.patch(0, kept[~of_keys], values[~of_keys])

    def read(self, start: int = 0, count: int | None = None) -> Tensor:
        """See `PackedWeight.read`."""
        count = count_rows(self.rows, start, count)
        rank, value = self.sizes.rank, self.sizes.value
        first, last = start // self._step, -(-(start + count) // self._step)
        parts: list[Tensor] = []
        for head in range(first, last):
            parts.append(self.keys.read(head * rank, rank).T)
            parts.append(self.values.read(head * value, value))
        if not parts:
            return torch.empty((0, self.columns), dtype=self.dtype)
        at = start - first * self._step
        return torch.cat(parts)[at : at + count]

    def clone(self) -> "LatentWeight":
        """A copy of its own."""
        copy = LatentWeight(self.rows, self.sizes, self.dtype, self.num_threads)
        copy.data.copy_(self.data)
        return copy


class _Piece(Arena):
    """Memory for one weight."""

    def __init__(self, data: Tensor) -> None:
        self._data = data

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """All of it that the shape needs."""
        assert dtype == self._data.dtype
        return self._data[: torch.Size(shape).numel()].view(shape)


def require_sizes(sizes: Latent) -> None:
    """Raise ValueError unless each head's products begin where a panel does."""
    for name in ("rank", "value"):
        if getattr(sizes, name) % LANES:
            raise ValueError(f"{sizes} cannot be packed: {name} must be a multiple of {LANES}.")
