"""Tiles of products of a few rows: their columns, the norm before and the addition or gate after
them. `few_rows.py` and `few_whole_rows.py` share them.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

import triton
import triton.language as tl

from nano_inference.ops.cuda.rows import gated

VECTOR_ROWS = 2  # most rows that are multiplied without tensor cores
PROGRAMS = 256  # almost two for each of an H100's 132 SMs
LEAST_BYTES = 8192  # least bytes of a weight per program
PADDED = tl.constexpr(16)  # rows of a product on tensor cores
STORE, ADD, GATE = (tl.constexpr(kind) for kind in range(3))  # after a product


def columns_of_vector(num_columns: int, row_bytes: int) -> int:
    """Return the number of a weight's rows per program: up to 16 for weights with many rows, more
    if rows are short.
    """
    columns = 2  # a gate row and its up row
    while columns < 16 and 2 * columns * PROGRAMS <= num_columns:
        columns *= 2
    while columns < 64 and columns * row_bytes < LEAST_BYTES:
        columns *= 2
    return columns


@triton.jit
def columns_of_program(num_columns, FINISH: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the weight's rows of this program. For a gate, gate rows alternate with their up
    rows.
    """
    places = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    columns = places
    if FINISH == GATE:
        columns = places // 2 + places % 2 * (num_columns // 2)
    return columns, places < num_columns


@triton.jit
def normed_part(x, factor, weight, offset, inside, DTYPE: tl.constexpr):
    """Norm and round a part of rows for the product. `weight` points at the norm's weight for this
    part, or is None.
    """
    if weight is not None:
        x = x * factor * (tl.load(weight, mask=inside, other=0.0).to(tl.float32) + offset)
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def finish_rows(
    sums, rows, row_mask, columns, column_mask, bias, residual, out, scale, num_columns,
    FINISH: tl.constexpr, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr, HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the bias to sums [HEIGHT, COLUMNS], round them once, then gate, add or store. Every
    column belongs to one program only.
    """
    if bias is not None:
        sums += tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    values = sums.to(DTYPE)
    if FINISH == GATE:
        first, second = tl.split(tl.reshape(values.to(tl.float32), (HEIGHT, COLUMNS // 2, 2)))
        places = tl.program_id(0) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        target = rows[:, None].to(tl.int64) * (num_columns // 2) + places[None, :]
        mask = row_mask[:, None] & (places < num_columns // 2)[None, :]
        tl.store(out + target, gated(first, second, ACTIVATION).to(out.dtype.element_ty), mask=mask)
    else:
        target = rows[:, None].to(tl.int64) * num_columns + columns[None, :]
        mask = row_mask[:, None] & column_mask[None, :]
        if FINISH == ADD:
            before = tl.load(residual + target, mask=mask, other=0.0)
            tl.store(out + target, before + values.to(tl.float32) * scale, mask=mask)
        else:
            tl.store(out + target, values, mask=mask)
