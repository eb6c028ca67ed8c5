"""`LatentWeight`: the weight of attention over latents, laid out for products per head."""

import math

from nano_inference.arrays import Dtype, Tensor, has_dtype, namespace
from nano_inference.ops.cpu.memory import Arena
from nano_inference.ops.cpu.weights import LANES, CpuWeight, PackedWeight
from nano_inference.ops.settings import Latent
from nano_inference.ops.stored_rows import count_rows, require_rows


class LatentWeight(CpuWeight):
    """A weight [heads * (plain + value), rank] as `LatentOps` defines it, written and read by rows.

    Queries are multiplied by the columns of the key rows, and attended latents by the value rows.
    These are two packed weights in one piece of memory.

    Attributes:
        keys: [heads * rank, plain]: each head's key rows, transposed.
        values: [heads * value, rank].
    """

    def __init__(
        self,
        rows: int,
        sizes: Latent,
        dtype: Dtype,
        num_threads: int,
        arena: Arena | None = None,
    ) -> None:
        require_sizes(sizes)
        super().__init__(rows, sizes.rank, dtype, num_threads)
        self.sizes = sizes
        self.heads = rows // self._step
        shapes = ((self.heads * sizes.rank, sizes.plain), (self.heads * sizes.value, sizes.rank))
        # bfloat16 columns are stored in pairs, even if their number is odd
        wide = [count * (-(-columns // 2) * 2) for count, columns in shapes]
        whole = (sum(wide),)
        self.data = (
            namespace(dtype).zeros(whole, dtype=dtype)
            if arena is None
            else arena.take(whole, dtype)
        )
        self.keys, self.values = (
            PackedWeight(*shape, dtype, num_threads, _Piece(data))
            for shape, data in zip(shapes, self.data.split(wide), strict=True)
        )

    @property
    def _step(self) -> int:
        """Number of rows per head."""
        return self.sizes.plain + self.sizes.value

    def write(self, start: int, tensor: Tensor) -> None:
        """Replace rows [start, start + n) by `tensor` [n, rank], rounded to this dtype."""
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
        """Write some of a head's key rows [n, rank] as columns of the transposed weight."""
        panels = self.sizes.rank // LANES
        data = self.keys.data.reshape(len(self.keys.data), -1, LANES, self._depth)
        columns = data[head * panels : (head + 1) * panels].permute(1, 3, 0, 2)
        places = namespace(self.dtype).arange(start, start + len(rows))
        numbers = rows.detach().to(self.device, self.dtype).reshape(len(rows), panels, LANES)
        columns[places // self._depth, places % self._depth] = numbers

    @property
    def _depth(self) -> int:
        """Number of adjacent columns in the memory layout."""
        return 2 if has_dtype(self, "bfloat16") else 1

    def patch(self, start: int, indices: Tensor, values: Tensor) -> None:
        """Set the numbers at flat row-major `indices` [n], counted from row `start`, to `values`
        [n], in place.
        """
        rows = start + indices.div(self.columns, rounding_mode="floor")
        if len(indices) and not 0 <= int(rows.min()) <= int(rows.max()) < self.rows:
            raise ValueError(
                f"indices from row {start} on are not within the shape {tuple(self.shape)}."
            )
        rank, plain, value = self.sizes.rank, self.sizes.plain, self.sizes.value
        heads, within, columns = rows // self._step, rows % self._step, indices % self.columns
        of_keys = within < plain
        turned = (heads * rank + columns) * plain + within
        kept = (heads * value + within - plain) * rank + columns
        self.keys.patch(0, turned[of_keys], values[of_keys])
        self.values.patch(0, kept[~of_keys], values[~of_keys])

    def read(self, start: int = 0, count: int | None = None) -> Tensor:
        """Return a copy of rows [start, start + count), [count, rank]. None: all remaining rows."""
        count = count_rows(self.rows, start, count)
        rank, value = self.sizes.rank, self.sizes.value
        first, last = start // self._step, -(-(start + count) // self._step)
        parts: list[Tensor] = []
        for head in range(first, last):
            parts.append(self.keys.read(head * rank, rank).T)
            parts.append(self.values.read(head * value, value))
        if not parts:
            return namespace(self.dtype).empty((0, self.columns), dtype=self.dtype)
        at = start - first * self._step
        return namespace(self.dtype).cat(parts)[at : at + count]

    def clone(self) -> "LatentWeight":
        """Return an independent copy."""
        copy = LatentWeight(self.rows, self.sizes, self.dtype, self.num_threads)
        copy.data.copy_(self.data)
        return copy


class _Piece(Arena):
    """Memory of a single weight, with the interface of an `Arena`."""

    def __init__(self, data: Tensor) -> None:
        self._data = data

    def take(self, shape: tuple[int, ...], dtype: Dtype) -> Tensor:
        """Return the memory, without the padding that the shape does not need."""
        assert dtype == self._data.dtype
        return self._data[: math.prod(shape)].reshape(shape)


def require_sizes(sizes: Latent) -> None:
    """Raise `ValueError` unless each head's products begin at a panel."""
    for name in ("rank", "value"):
        if getattr(sizes, name) % LANES:
            raise ValueError(f"{sizes} cannot be packed; {name} must be a multiple of {LANES}.")
