"""Experts in a backward pass: products of rows sorted by expert, and sums over an expert's rows.

The tiles are those of `ops/cuda/moe.py`, with more rows. One launch serves all experts: a program
owns a tile of one expert's rows, or a part of one expert's gradient. It adds in the order of
`ops/cuda/gradient_products.py`. The bits of an expert's gradient therefore depend only on its rows
and their order. Experts without rows are neither read nor written.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.cuda.expert_tiles import ExpertTiles, expert_tiles, sorted_by_expert
from nano_inference.ops.cuda.gradient_products import SEGMENT, TILES, Tile, summed_products
from nano_inference.ops.cuda.rows import aligned
from nano_inference.ops.gradients import Choices

# tiles of an expert's rows: an expert often has fewer than 128. Key: float32
_ROW_TILES = {False: Tile(64, 128, 64, 8, 3), True: Tile(64, 64, 16, 8, 2)}
_ROWS, _COLUMNS = 32, 64  # tile of a sum over rows
_SUM_BLOCK = 1024


class ExpertGroups(NamedTuple):
    """Bounds of experts in the sorted choices of rows."""

    starts: Tensor  # int64 [E + 1]: first choice of each expert, and the end
    sorted_at: Tensor  # int64 [P]: index of each of the flattened ids in the sorted choices
    tiles: ExpertTiles


def choices_of(ids: Tensor, count: int, dtype: torch.dtype) -> Choices:
    """Implement `ExpertOps.choices` without waiting for the device. Ids are not checked."""
    order, starts = sorted_by_expert(ids.flatten(), count)
    tiles = expert_tiles(order, starts, _ROW_TILES[dtype == torch.float32].rows)
    return Choices(order, ids.shape[1], ExpertGroups(starts, order.argsort(), tiles))


def expert_products(
    x: Tensor, weights: Tensor, choices: Choices, bias: Tensor | None = None
) -> Tensor:
    """Implement `ExpertOps.expert_products` in one launch.

    Args:
        x: Sorted rows [P, K].
        weights: [E, K, M], contiguous or the turned view of a contiguous [E, M, K].
        choices: Choices of rows.
        bias: [E * M] or None.

    Raises:
        ValueError: Rows and weights do not fit together.
    """
    count, depth, columns = weights.shape
    if x.shape != (len(choices.order), depth) or x.dtype != weights.dtype:
        raise ValueError(
            f"rows {tuple(x.shape)} {x.dtype} and weights {tuple(weights.shape)} {weights.dtype} "
            f"do not fit {len(choices.order)} choices."
        )
    out = torch.empty((len(x), columns), dtype=torch.float32, device=x.device)
    tile, tiles = _ROW_TILES[x.dtype == torch.float32], choices.groups.tiles
    _products_kernel[(len(tiles.experts), triton.cdiv(columns, tile.columns))](
        aligned(x),
        weights,
        bias,
        out,
        tiles.experts,
        tiles.firsts,
        tiles.ends,
        count,
        depth,
        columns,
        weights.stride(2) != 1,
        SEGMENT,
        tile.rows,
        tile.columns,
        tile.depth,
        "ieee" if x.dtype == torch.float32 else "tf32",  # only used for float32
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )
    return out


def add_expert_outers(d_out: Tensor, x: Tensor, choices: Choices, total: Tensor) -> None:
    """Add d_out.T @ x of each expert's sorted rows to its part of `total`, float32 [E * R, C].

    Raises:
        ValueError: Shapes or dtypes do not fit together.
    """
    starts = choices.groups.starts
    count, (height, width) = len(starts) - 1, (d_out.shape[1], x.shape[1])
    if total.shape != (count * height, width) or len(d_out) != len(x) or d_out.dtype != x.dtype:
        raise ValueError(
            f"{tuple(d_out.shape)} {d_out.dtype} and {tuple(x.shape)} {x.dtype} of {count} experts "
            f"do not give {tuple(total.shape)}."
        )
    tile = TILES[x.dtype == torch.float32]
    _outers_kernel[(triton.cdiv(height, tile.rows), triton.cdiv(width, tile.columns), count)](
        aligned(d_out),
        aligned(x),
        total,
        starts,
        height,
        width,
        SEGMENT,
        tile.rows,
        tile.columns,
        tile.depth,
        "ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )


def add_expert_columns(rows: Tensor, choices: Choices, total: Tensor) -> None:
    """Implement `ExpertOps.add_expert_columns` in the order of `add_columns`."""
    starts, width = choices.groups.starts, rows.shape[1]
    _add_columns_kernel[(len(starts) - 1, triton.cdiv(width, _COLUMNS))](
        aligned(rows), total, starts, width, _ROWS, _COLUMNS, num_warps=4, enable_fp_fusion=False
    )


def sum_experts(rows: Tensor, choices: Choices, weights: Tensor | None) -> Tensor:
    """Implement `ExpertOps.sum_experts` with programs of 1,024 columns."""
    width, per_row = rows.shape[1], choices.per_row
    out = torch.empty((len(rows) // per_row, width), dtype=torch.float32, device=rows.device)
    _sum_kernel[(len(out), triton.cdiv(width, _SUM_BLOCK))](
        aligned(rows),
        choices.groups.sorted_at,
        weights,
        out,
        width,
        0 if weights is None else weights.shape[1],
        per_row,
        _SUM_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _products_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    experts_ptr,
    firsts_ptr,
    ends_ptr,
    num_experts,
    depth,
    num_columns,
    TURNED: tl.constexpr,  # weights are [E, columns, depth]
    SEGMENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply a tile of an expert's rows. Grid (tiles of rows, tiles of columns)."""
    expert = tl.load(experts_ptr + tl.program_id(0))
    if expert >= num_experts:
        return
    rows = tl.load(firsts_ptr + tl.program_id(0)) + tl.arange(0, ROWS)
    row_mask = (rows < tl.load(ends_ptr + tl.program_id(0)))[:, None]
    columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = (columns < num_columns)[None, :]
    ks = tl.arange(0, DEPTH).to(tl.int64)
    weight_ptr += expert * depth * num_columns
    if TURNED:
        weight_ptrs, step = weight_ptr + columns[None, :] * depth + ks[:, None], 1
    else:
        weight_ptrs = weight_ptr + columns[None, :] + ks[:, None] * num_columns
        step = num_columns
    total = summed_products(
        x_ptr + rows[:, None] * depth + ks[None, :], 1, weight_ptrs, step, row_mask, column_mask,
        depth, SEGMENT, ROWS, COLUMNS, DEPTH, PRECISION,
    )  # fmt: skip
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert * num_columns + columns
        bias = tl.load(bias_ptrs, mask=columns < num_columns, other=0.0)
        total += bias.to(tl.float32)[None, :]
    out_ptrs = out_ptr + rows[:, None] * num_columns + columns[None, :]
    tl.store(out_ptrs, total, mask=row_mask & column_mask)


@triton.jit
def _outers_kernel(
    d_out_ptr,
    x_ptr,
    total_ptr,
    starts_ptr,
    height,
    width,
    SEGMENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add up a tile of one expert's gradient. Grid (tiles of rows, tiles of columns, experts)."""
    expert = tl.program_id(2).to(tl.int64)
    start, end = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    if start == end:
        return
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    row_mask, column_mask = (rows < height)[:, None], (columns < width)[None, :]
    ks = start + tl.arange(0, DEPTH)
    sums = summed_products(
        d_out_ptr + ks[None, :] * height + rows[:, None], height,
        x_ptr + ks[:, None] * width + columns[None, :], width, row_mask, column_mask,
        (end - start).to(tl.int32), SEGMENT, ROWS, COLUMNS, DEPTH, PRECISION,
    )  # fmt: skip
    mask = row_mask & column_mask
    total_ptrs = total_ptr + (expert * height + rows[:, None]) * width + columns[None, :]
    tl.store(total_ptrs, tl.load(total_ptrs, mask=mask, other=0.0) + sums, mask=mask)


@triton.jit
def _add_columns_kernel(
    rows_ptr, total_ptr, starts_ptr, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Add one expert's rows to 64 columns of its total. Grid (experts, blocks of columns)."""
    expert = tl.program_id(0).to(tl.int64)
    start, end = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    if start == end:
        return
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    sums = tl.zeros((COLUMNS,), tl.float32)
    for first in range(start, end, ROWS):
        rows = first + tl.arange(0, ROWS)
        mask = (rows < end)[:, None] & inside[None, :]
        at = rows[:, None] * width + columns[None, :]
        sums += tl.sum(tl.load(rows_ptr + at, mask=mask, other=0.0), axis=0)
    total_ptrs = total_ptr + expert * width + columns
    tl.store(total_ptrs, tl.load(total_ptrs, mask=inside, other=0.0) + sums, mask=inside)


@triton.jit
def _sum_kernel(
    rows_ptr,
    sorted_at_ptr,
    weights_ptr,
    out_ptr,
    width,
    WEIGHTS: tl.constexpr,  # numbers per row of the weights
    PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up the rows of one row's choices in order. Grid (rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(PER_ROW):
        at = tl.load(sorted_at_ptr + row * PER_ROW + choice)
        part = tl.load(rows_ptr + at * width + columns, mask=inside, other=0.0)
        if weights_ptr is not None:
            part *= tl.load(weights_ptr + row * WEIGHTS + choice)
        total += part
    tl.store(out_ptr + row * width + columns, total, mask=inside)
