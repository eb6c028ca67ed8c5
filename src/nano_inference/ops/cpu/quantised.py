"""`QuantisedWeight`: codes and scales in the layout of the kernels, written and read by rows."""

import ctypes
from itertools import pairwise

from nano_inference.arrays import Dtype, Tensor, has_dtype, namespace
from nano_inference.ops.cpu.library import load, struct
from nano_inference.ops.cpu.memory import ALIGNMENT, Arena
from nano_inference.ops.cpu.weights import LANES, CpuWeight, readable
from nano_inference.ops.formats import Format, Stack, bounds_of, groups_of
from nano_inference.ops.quantised import Codes, widened
from nano_inference.ops.stacked import StackedWeight
from nano_inference.ops.stored_rows import count_rows, require_rows

Quantised, Segments = struct("Quantised"), struct("Segments")
VALUES = 16  # numbers of a table
SCALES = ("half", "float", "steps", "exponents")  # Scales of quantised.h
MOST_COLUMNS = 2**31 // 128**2  # products of codes are summed in 32 bits


class QuantisedWeight(CpuWeight):
    """A weight [rows, columns] in a format of `ops.formats`, in panels of 16 rows.
    kernels/quantised.h describes the layout.

    Attributes:
        form: Format of the weight.
        bounds: Bounds of its segments.
        data: uint8: codes, scales, minima.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        dtype: Dtype,
        num_threads: int,
        form: Format,
        segments: tuple[int, ...] | None = None,
        arena: Arena | None = None,
        data: Tensor | None = None,
    ) -> None:
        if columns > MOST_COLUMNS:
            raise ValueError(
                f"{columns} columns exceed {MOST_COLUMNS}, the most that sums of 32 bits hold."
            )
        super().__init__(rows, columns, dtype, num_threads)
        self.form, self.bounds = form, bounds_of(segments, columns, form)
        codes, scales, size = _sizes(rows, columns, form, self.bounds)
        self.data = _memory(size, dtype, arena) if data is None else data
        address = self.data.data_ptr()
        segment_bounds = Segments(len(self.bounds) - 1, self.bounds)
        self._struct = Quantised(
            form.bits,
            form.group,
            SCALES.index(form.scales),
            address,
            address + codes,
            address + codes + scales if form.mins else None,
            segment_bounds,
            -(-rows // LANES),
            None,
            (*form.values, *form.values[-1:] * (VALUES - len(form.values))),
        )
        # address of the structure that describes the weight to the kernels, not moved by updates
        self.codes = ctypes.addressof(self._struct)
        if not load().nano_has_format(self.codes):
            raise ValueError(f"the CPU kernels do not support the format {form.name!r}: {form}.")

    def link(self, further: "QuantisedWeight") -> None:
        """Continue products with the rows of another weight. This one's rows must be whole
        panels.
        """
        self._struct.next = further.codes

    def data_ptr(self) -> int:
        """Return 0: kernels read `codes` instead of plain numbers."""
        return 0

    def write(self, start: int, tensor: Tensor) -> None:
        """Replace rows [start, start + n) by `tensor` [n, columns], rounded to codes."""
        require_rows(self.shape, start, tensor)
        source = readable(tensor)
        load().nano_quantise(
            source.data_ptr(),
            has_dtype(source, "bfloat16"),
            self.codes,
            start,
            len(source),
            self.columns,
            self.num_threads,
        )

    def write_codes(self, start: int, weight: Codes) -> None:
        """Replace rows [start, start + n) by these codes, unchanged. Their format must be one that
        this weight's format holds (`Format.holds`).
        """
        require_rows(self.shape, start, weight.codes)
        weight = widened(weight, self.form, self.bounds)
        codes = weight.codes if weight.codes.stride(1) == 1 else weight.codes.contiguous()
        tables = [
            None if table is None else table.float().contiguous()
            for table in (weight.scales, weight.mins, weight.steps, weight.min_steps)
        ]
        load().nano_store_codes(
            codes.data_ptr(),
            codes.stride(0),
            *(None if table is None else table.data_ptr() for table in tables),
            self.codes,
            start,
            len(codes),
            self.columns,
            self.num_threads,
        )

    def read(self, start: int = 0, count: int | None = None) -> Tensor:
        """Decode rows [start, start + count), [count, columns] in `dtype`. None: all remaining
        rows.
        """
        count = count_rows(self.rows, start, count)
        out = namespace(self.dtype).empty((count, self.columns))
        load().nano_dequantise(
            self.codes, start, count, self.columns, out.data_ptr(), self.num_threads
        )
        return out.to(self.dtype)

    def clone(self) -> "QuantisedWeight":
        """Return an independent copy."""
        copy = QuantisedWeight(
            self.rows, self.columns, self.dtype, self.num_threads, self.form, self.bounds
        )
        copy.data.copy_(self.data)
        return copy


class CpuStack(StackedWeight):
    """A weight whose rows have different formats, which kernels read as a chain.

    Attributes:
        data: uint8: the memory of the parts.
        codes: Address of the first part's structure.
    """

    def __init__(
        self,
        columns: int,
        dtype: Dtype,
        num_threads: int,
        form: Stack,
        segments: tuple[int, ...] | None = None,
        arena: Arena | None = None,
    ) -> None:
        sizes = [
            _aligned(_sizes(rows, columns, each, bounds_of(segments, columns, each))[2])
            for rows, each in form.parts
        ]
        self.data = _memory(sum(sizes), dtype, arena)
        parts = [
            QuantisedWeight(rows, columns, dtype, num_threads, each, segments, data=data)
            for (rows, each), data in zip(form.parts, self.data.split(sizes), strict=True)
        ]
        if any(rows % LANES for rows, _ in form.parts[:-1]):
            raise ValueError(f"the parts of {form.name} must have whole panels of {LANES} rows.")
        for part, further in pairwise(parts):
            part.link(further)
        super().__init__(form, parts)
        self.codes, self.num_threads, self.segments = parts[0].codes, num_threads, segments

    def clone(self) -> "CpuStack":
        """Return an independent copy."""
        copy = CpuStack(self.columns, self.dtype, self.num_threads, self.form, self.segments)
        copy.data.copy_(self.data)
        return copy


def _memory(size: int, dtype: Dtype, arena: Arena | None) -> Tensor:
    xp = namespace(dtype)
    return xp.zeros((size,), dtype=xp.uint8) if arena is None else arena.take((size,), xp.uint8)


def _sizes(rows: int, columns: int, form: Format, bounds: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the bytes of codes, of scales, and of a whole weight."""
    panels, whole = -(-rows // LANES), max(form.group, 4 if form.bits == 8 else 32)
    codes = _aligned(panels * LANES * (-(-columns // whole) * whole) * form.bits // 8)
    scales = _aligned(panels * LANES * _scale_bytes(form, len(groups_of(bounds, form))))
    return codes, scales, codes + scales * (2 if form.mins else 1)


def _scale_bytes(form: Format, num_groups: int) -> int:
    """Return the bytes of a row's scales."""
    if form.scales == "steps":
        each = form.groups_per_step
        return -(-num_groups // each) * (2 + each)
    return num_groups * {"half": 2, "float": 4, "exponents": 1}[form.scales]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
