"""Products of a backward pass: rows times a weight, rows times a turned weight, and outer products
that are added to a weight's gradient.

One kernel reads both operands in either layout, so that no weight is copied to turn it. An element
of the result is a sum over k in pieces of `SEGMENT`, added in order. Within a piece, the same
instruction adds to a float32 accumulator, `depth` elements of k at a time. The order therefore
depends only on the number of k and the dtype. cuBLAS also repeats its bits for one shape, version
and card; this order does not depend on its choice of a kernel.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.cuda.matmul import GROUP, tile_of_program

# Elements of k that share an accumulator. Longer sums would lose digits (`GradientOps.most_added`).
SEGMENT = 4096


class Tile(NamedTuple):
    """Rows and columns of the result, and elements of k, that a program loads together."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


TILES = {False: Tile(128, 128, 64, 8, 3), True: Tile(64, 64, 16, 8, 2)}  # key: float32


def add_matrices(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    adds: bool = True,
) -> None:
    """Compute out = scale * (left [N, K] @ right [K, M] + bias), or add it to `out`.

    Args:
        left, right: Matrices of one dtype, each contiguous or the turned view of a contiguous one.
        out: Float32 [N, M], the columns of wider rows if need be.
        bias: [M] or None.
        scale: Factor of the product.
        adds: Add to `out`.

    Raises:
        ValueError: Shapes or dtypes do not fit together, or a matrix has gaps.
    """
    (num_rows, depth), num_columns = left.shape, right.shape[1]
    if right.shape[0] != depth or out.shape != (num_rows, num_columns) or left.dtype != right.dtype:
        raise ValueError(
            f"{tuple(left.shape)} {left.dtype} times {tuple(right.shape)} {right.dtype} does not "
            f"give {tuple(out.shape)}."
        )
    if out.dtype != torch.float32 or out.stride(1) != 1:
        raise ValueError("the output must be float32 with adjacent columns.")
    if out.numel() == 0:
        return
    left_turned, right_turned = _is_turned(left), _is_turned(right)
    tile = TILES[left.dtype == torch.float32]
    programs = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns)
    _product_kernel[(programs,)](
        left,
        right,
        bias,
        out,
        depth if left_turned else num_rows,
        num_rows if left_turned else depth,
        num_columns,
        left.stride(1 if left_turned else 0),
        right.stride(1 if right_turned else 0),
        out.stride(0),
        scale,
        left_turned,
        right_turned,
        adds,
        SEGMENT,
        tile.rows,
        tile.columns,
        tile.depth,
        GROUP,
        "ieee" if left.dtype == torch.float32 else "tf32",  # only used for float32
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )


def _is_turned(matrix: Tensor) -> bool:
    """Return True if a matrix is the turned view of rows with adjacent numbers."""
    if matrix.stride(1) == 1:
        return False
    if matrix.stride(0) == 1:
        return True
    shape, strides = tuple(matrix.shape), matrix.stride()
    raise ValueError(f"a matrix {shape} has strides {strides}; copy it first.")


@triton.jit(do_not_specialize=["batch"])
def _product_kernel(
    left_ptr,
    right_ptr,
    bias_ptr,
    out_ptr,
    batch,  # rows of a micro-batch, for whose number no kernel is compiled
    width,
    num_columns,
    left_stride,
    right_stride,
    out_stride,
    scale,
    LEFT_TURNED: tl.constexpr,
    RIGHT_TURNED: tl.constexpr,
    ADDS: tl.constexpr,
    SEGMENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply one tile. Grid (tiles,)."""
    if LEFT_TURNED:
        num_rows, depth = width, batch
    else:
        num_rows, depth = batch, width
    rows, columns = tile_of_program(num_rows, num_columns, ROWS, COLUMNS, GROUP)
    row_mask, column_mask = (rows < num_rows)[:, None], (columns < num_columns)[None, :]
    ks = tl.arange(0, DEPTH).to(tl.int64)
    if LEFT_TURNED:
        left_ptrs, left_step = left_ptr + rows[:, None] + ks[None, :] * left_stride, left_stride
    else:
        left_ptrs, left_step = left_ptr + rows[:, None] * left_stride + ks[None, :], 1
    if RIGHT_TURNED:
        right_ptrs, right_step = right_ptr + columns[None, :] * right_stride + ks[:, None], 1
    else:
        right_ptrs = right_ptr + columns[None, :] + ks[:, None] * right_stride
        right_step = right_stride
    total = summed_products(
        left_ptrs, left_step, right_ptrs, right_step, row_mask, column_mask, depth,
        SEGMENT, ROWS, COLUMNS, DEPTH, PRECISION,
    )  # fmt: skip
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns, mask=columns < num_columns, other=0.0).to(tl.float32)[
            None, :
        ]
    total *= scale
    out_ptrs = out_ptr + rows[:, None] * out_stride + columns[None, :]
    if ADDS:
        total += tl.load(out_ptrs, mask=row_mask & column_mask, other=0.0)
    tl.store(out_ptrs, total, mask=row_mask & column_mask)


@triton.jit
def summed_products(
    left_ptrs,
    left_step,
    right_ptrs,
    right_step,
    row_mask,
    column_mask,
    depth,
    SEGMENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the sums of products [ROWS, COLUMNS] over `depth` k in the order of this module. The
    pointers are those of the first `DEPTH` k, and the steps lead to the next k.
    """
    ks = tl.arange(0, DEPTH).to(tl.int64)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, depth, SEGMENT):
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(first, tl.minimum(first + SEGMENT, depth), DEPTH):
            inside = ks < depth - k
            at = tl.cast(k, tl.int64)
            left = tl.load(left_ptrs + at * left_step, mask=row_mask & inside[None, :], other=0.0)
            right = tl.load(
                right_ptrs + at * right_step, mask=column_mask & inside[:, None], other=0.0
            )
            sums = tl.dot(left, right, sums, input_precision=PRECISION)
        total += sums
    return total
