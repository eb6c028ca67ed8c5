"""`PackedWeight`: a matrix in the layout of the kernels, written and read by rows."""

from nano_inference.arrays import Device, Dtype, Tensor, dtype_name, has_dtype, namespace
from nano_inference.ops.cpu.library import load
from nano_inference.ops.cpu.memory import Arena
from nano_inference.ops.stored_rows import count_rows, require_rows

LANES = 16
DTYPES = ("bfloat16", "float32")


class CpuWeight:
    """A weight [rows, columns] in the backend's own memory.

    Attributes:
        data: Memory of the weight.
        dtype: Dtype that products read and `read` returns.
        num_threads: Number of threads that write and read it.
    """

    data: Tensor

    def __init__(self, rows: int, columns: int, dtype: Dtype, num_threads: int) -> None:
        self.rows, self.columns, self.dtype, self.num_threads = rows, columns, dtype, num_threads

    @property
    def shape(self) -> tuple[int, int]:
        """Shape [rows, columns], without padding."""
        return self.rows, self.columns

    @property
    def device(self) -> Device:
        """Device of the memory: the CPU."""
        return self.data.device

    def numel(self) -> int:
        """Return the number of weights, without padding."""
        return self.rows * self.columns


def readable(tensor: Tensor) -> Tensor:
    """Return the same numbers in a form that the kernels read: contiguous, on the CPU, in bfloat16
    if they are bfloat16 and otherwise in float32.
    """
    source = tensor.detach().to("cpu")
    return (source if dtype_name(source.dtype) in DTYPES else source.float()).contiguous()


class PackedWeight(CpuWeight):
    """A weight [rows, columns] in panels of 16 rows, so that one load feeds 16 outputs.

    bfloat16: [rows / 16, columns / 2, 16, 2], float32: [rows / 16, columns, 16]. Both are padded
    with zeros.
    """

    codes: int | None = None  # only a `QuantisedWeight` has codes

    def __init__(
        self,
        rows: int,
        columns: int,
        dtype: Dtype,
        num_threads: int,
        arena: Arena | None = None,
    ) -> None:
        super().__init__(rows, columns, dtype, num_threads)
        panels = -(-rows // LANES)
        xp = namespace(dtype)
        shape = (
            (panels, -(-columns // 2), LANES, 2)
            if dtype == xp.bfloat16
            else (panels, columns, LANES)
        )
        self.data = xp.zeros(shape, dtype=dtype) if arena is None else arena.take(shape, dtype)
        self.data_ptr = self.data.data_ptr  # updates do not move it

    def write(self, start: int, tensor: Tensor) -> None:
        """Replace rows [start, start + n) by `tensor` [n, columns], rounded to this dtype."""
        require_rows(self.shape, start, tensor)
        source = readable(tensor)
        load().nano_pack(
            source.data_ptr(),
            has_dtype(source, "bfloat16"),
            self.data_ptr(),
            has_dtype(self, "bfloat16"),
            start,
            len(source),
            self.columns,
            self.num_threads,
        )

    def patch(self, start: int, indices: Tensor, values: Tensor) -> None:
        """Set the numbers at flat row-major `indices` [n], counted from row `start`, to `values`
        [n], in place.
        """
        group = 2 if has_dtype(self, "bfloat16") else 1  # adjacent columns in the memory layout
        rows = start + indices.div(self.columns, rounding_mode="floor")
        columns = indices % self.columns
        if len(indices) and not 0 <= int(rows.min()) <= int(rows.max()) < self.rows:
            raise ValueError(
                f"indices from row {start} on are not within the shape {tuple(self.shape)}."
            )
        lines = rows.div(LANES, rounding_mode="floor") * self.data.shape[1] + columns.div(
            group, rounding_mode="floor"
        )
        places = (lines * LANES + rows % LANES) * group + columns % group
        self.data.reshape(-1).index_copy_(0, places, values.to(self.dtype))

    def read(self, start: int = 0, count: int | None = None) -> Tensor:
        """Return a copy of rows [start, start + count), [count, columns]. None: all remaining
        rows.
        """
        count = count_rows(self.rows, start, count)
        out = namespace(self.dtype).empty((count, self.columns), dtype=self.dtype)
        load().nano_unpack(
            self.data_ptr(), out.data_ptr(), has_dtype(self, "bfloat16"), start, count, self.columns
        )
        return out

    def clone(self) -> "PackedWeight":
        """Return an independent copy."""
        copy = PackedWeight(self.rows, self.columns, self.dtype, self.num_threads)
        copy.data.copy_(self.data)
        return copy
