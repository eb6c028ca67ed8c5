"""Rows sorted by expert and cut into tiles, and parts of a kernel that multiplies a tile of rows by
columns of one expert: which rows and columns they are, and their results.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.cuda.rows import gated


class ExpertTiles(NamedTuple):
    """Rows sorted by expert and cut into tiles. A place is an index into the sorted rows."""

    order: Tensor  # int64 [P]: the original index at each place
    # int64 [T]: expert of each tile, or the number of experts if the tile is not needed
    experts: Tensor
    firsts: Tensor  # int64 [T]: first place of each tile
    ends: Tensor  # int64 [T]: end of its expert's places


def sorted_by_expert(held: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort rows stably by their experts, int64 [P]: the original index at each place, and the first
    place of each expert and the end, int64 [E + 1].
    """
    by_expert, order = held.sort(stable=True)
    return order, torch.searchsorted(by_expert, torch.arange(num_experts + 1, device=held.device))


def expert_tiles(order: Tensor, starts: Tensor, rows: int) -> ExpertTiles:
    """Cut rows that are sorted by expert into tiles of at most `rows`. Their number follows from
    the number of rows, so the host waits for nothing.
    """
    num_experts = len(starts) - 1
    # number of tiles up to and including each expert
    ends = ((starts.diff() + rows - 1) // rows).cumsum(0)
    tiles = torch.arange(-(-len(order) // rows) + min(num_experts, len(order)), device=order.device)
    experts = torch.searchsorted(ends, tiles, right=True)
    known = experts.clamp(max=num_experts - 1)
    before = torch.where(known > 0, ends[(known - 1).clamp(min=0)], 0)
    return ExpertTiles(order, experts, starts[known] + (tiles - before) * rows, starts[known + 1])


@triton.jit
def tile_of_expert(
    expert,
    rows_ptr,
    order_ptr,
    firsts_ptr,
    ends_ptr,
    COLUMNS_IN_ALL: tl.constexpr,
    GATE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return a program's rows of x, places of results, mask of rows, columns, their mask, and the
    row of the weight that is the expert's first. Grid (tiles, tiles of columns).
    """
    places = tl.load(firsts_ptr + tl.program_id(0)) + tl.arange(0, ROWS)
    mask = places < tl.load(ends_ptr + tl.program_id(0))
    who = tl.load(order_ptr + places, mask=mask, other=0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = columns < COLUMNS_IN_ALL
    first_row = expert * COLUMNS_IN_ALL
    if GATE:  # up rows follow the gate's, and results are sorted by expert
        sources = tl.load(rows_ptr + who, mask=mask, other=0)
        return sources, places, mask, columns, column_mask, first_row * 2
    return places, who, mask, columns, column_mask, first_row


@triton.jit
def store_tile(
    out_ptr,
    sums,
    others,
    bias_ptr,
    targets,
    mask,
    columns,
    column_mask,
    first_row,
    COLUMNS_IN_ALL: tl.constexpr,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Add biases, apply the gate `sums` to `others` if GATE, and store the results."""
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + first_row + columns
        sums += tl.load(bias_ptrs, mask=column_mask, other=0.0).to(tl.float32)[None, :]
        if GATE:
            bias = tl.load(bias_ptrs + COLUMNS_IN_ALL, mask=column_mask, other=0.0)
            others += bias.to(tl.float32)[None, :]
    if GATE:
        sums = gated(sums, others, ACTIVATION)
    out_ptrs = out_ptr + targets[:, None] * COLUMNS_IN_ALL + columns[None, :]
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=mask[:, None] & column_mask[None, :])
