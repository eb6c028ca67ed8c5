"""Products of rows with quantized experts: tiles of `ops/cuda/moe.py`, arithmetic of
`ops/cuda/quantised.py` (8 bits) and of `ops/cuda/microscaling.py` (MXFP4).
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.cuda.expert_tiles import store_tile, tile_of_expert
from nano_inference.ops.cuda.microscaling import (
    MicroscaledWeight,
    grouped_rows,
    microscaled_product,
)
from nano_inference.ops.cuda.quantised import quantised_rows, whole_product
from nano_inference.ops.cuda.rows import ACTIVATIONS
from nano_inference.ops.formats import GROUP
from nano_inference.ops.moe import Experts
from nano_inference.ops.reference.quantised import QuantisedWeight

ROWS, COLUMNS, DEPTH = 16, 64, 128
_GROUP = tl.constexpr(GROUP)


def quantised_experts(
    x: Tensor, rows: Tensor, tiles: tuple[Tensor, ...], experts: Experts
) -> Tensor:
    """Implement `MoeSteps.products` for weights in the format `"int8"` or in MXFP4: float32 [P, H].

    Args:
        x: Rows [M, H].
        rows: Row of x for each product, int64 [P].
        tiles: `ExpertTiles` of the products.
        experts: Experts, both of whose weights are quantized.
    """
    hidden, inner = x.shape[1], experts.down.shape[1]
    out = torch.empty((len(rows), hidden), dtype=torch.float32, device=x.device)
    between = torch.empty((len(rows), inner), dtype=torch.float32, device=x.device)
    _, gate_up_bias, down_bias = experts.biases or (None, None, None)
    for source, weight, bias, result, columns, activation in (
        (x, experts.gate_up, gate_up_bias, between, inner, ACTIVATIONS[experts.activation]),
        (between, experts.down, down_bias, out, hidden, None),
    ):
        launch = _launch_microscaled if isinstance(weight, MicroscaledWeight) else _launch
        options = {"GATE": activation is not None, "ACTIVATION": activation or 0}
        options |= {"num_warps": 4, "enable_fp_fusion": False}
        grid = (len(tiles[1]), triton.cdiv(columns, COLUMNS))
        launch(
            grid, source, weight, (bias, result, rows, *tiles, experts.num_held, columns), options
        )
    return out


def _launch(
    grid: tuple[int, int],
    source: Tensor,
    weight: QuantisedWeight,
    tiled: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    codes, scales = quantised_rows(source, weight)
    _products_kernel[grid](
        codes,
        scales,
        weight.data.view(torch.int8),
        weight.data.view(torch.float32),
        *tiled,
        codes.stride(0),
        weight.data.stride(0),
        weight.scales_at // 4,
        weight.bounds,
        len(weight.bounds) - 1,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        DEPTH=DEPTH,
        num_stages=3,
        **options,
    )


def _launch_microscaled(
    grid: tuple[int, int],
    source: Tensor,
    weight: QuantisedWeight,
    tiled: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    codes, scales = grouped_rows(source, weight)
    _microscaled_kernel[grid](
        codes,
        scales,
        weight.data,
        *tiled,
        weight.data.stride(0),
        weight.scales_at,
        scales.shape[1] // 2,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_stages=4,
        **options,
    )


@triton.jit
def _products_kernel(
    x_ptr,  # int8 [M, X_STRIDE], or sorted [P, X_STRIDE] if not GATE
    x_scales_ptr,
    # [experts * rows, WEIGHT_STRIDE]: COLUMNS_IN_ALL rows per expert, then as many up rows if GATE
    weight_ptr,
    weight_scales_ptr,
    bias_ptr,  # one number per row of the weight, or None
    out_ptr,  # float32 [P, columns], sorted by expert if GATE
    rows_ptr,  # row of x for each product
    order_ptr,
    experts_ptr,
    firsts_ptr,
    ends_ptr,
    num_experts,
    COLUMNS_IN_ALL: tl.constexpr,
    X_STRIDE: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    SCALES_AT: tl.constexpr,
    BOUNDS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute one tile of rows by one tile of columns. Grid (tiles, tiles of columns)."""
    expert = tl.load(experts_ptr + tl.program_id(0))
    if expert >= num_experts:
        return
    sources, targets, mask, columns, column_mask, first_row = tile_of_expert(
        expert, rows_ptr, order_ptr, firsts_ptr, ends_ptr, COLUMNS_IN_ALL, GATE, ROWS, COLUMNS
    )
    ks = tl.arange(0, DEPTH)
    x_ptrs = x_ptr + sources[:, None] * X_STRIDE + ks[None, :]
    x_scale_ptrs = x_scales_ptr + sources * SEGMENTS
    weight_ptrs = weight_ptr + (first_row + columns)[None, :] * WEIGHT_STRIDE + ks[:, None]
    scale_ptrs = weight_scales_ptr + (first_row + columns) * (WEIGHT_STRIDE // 4) + SCALES_AT
    sums = whole_product(
        x_ptrs, x_scale_ptrs, mask, weight_ptrs, scale_ptrs, column_mask,
        BOUNDS, SEGMENTS, ROWS, COLUMNS, DEPTH,
    )  # fmt: skip
    others = sums
    if GATE:
        others = whole_product(
            x_ptrs, x_scale_ptrs, mask, weight_ptrs + COLUMNS_IN_ALL * WEIGHT_STRIDE,
            scale_ptrs + COLUMNS_IN_ALL * (WEIGHT_STRIDE // 4), column_mask,
            BOUNDS, SEGMENTS, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip
    store_tile(
        out_ptr, sums, others, bias_ptr, targets, mask, columns, column_mask, first_row,
        COLUMNS_IN_ALL, GATE, ACTIVATION,
    )  # fmt: skip


@triton.jit
def _microscaled_kernel(
    x_ptr,  # int8 [M, PAIRS * 64], or sorted [P, PAIRS * 64] if not GATE
    x_scales_ptr,  # float32 [M or P, PAIRS * 2]
    weight_ptr,  # uint8 [experts * rows, WEIGHT_STRIDE], as in `_products_kernel`
    bias_ptr,
    out_ptr,
    rows_ptr,
    order_ptr,
    experts_ptr,
    firsts_ptr,
    ends_ptr,
    num_experts,
    COLUMNS_IN_ALL: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    EXPONENTS_AT: tl.constexpr,
    PAIRS: tl.constexpr,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute one tile of rows by one tile of columns. Grid (tiles, tiles of columns)."""
    expert = tl.load(experts_ptr + tl.program_id(0))
    if expert >= num_experts:
        return
    sources, targets, mask, columns, column_mask, first_row = tile_of_expert(
        expert, rows_ptr, order_ptr, firsts_ptr, ends_ptr, COLUMNS_IN_ALL, GATE, ROWS, COLUMNS
    )
    ks = tl.arange(0, _GROUP)
    x_ptrs = x_ptr + sources[:, None] * (PAIRS * 2 * _GROUP) + ks[None, :]
    x_scale_ptrs = x_scales_ptr + sources * (PAIRS * 2)
    rows_at = weight_ptr + (first_row + columns) * WEIGHT_STRIDE
    weight_ptrs = rows_at[None, :] + ks[:, None]
    exponent_ptrs = rows_at + EXPONENTS_AT
    sums = microscaled_product(
        x_ptrs, x_scale_ptrs, mask, weight_ptrs, exponent_ptrs, column_mask, PAIRS, ROWS, COLUMNS
    )
    others = sums
    if GATE:
        up: tl.constexpr = COLUMNS_IN_ALL * WEIGHT_STRIDE
        others = microscaled_product(
            x_ptrs, x_scale_ptrs, mask, weight_ptrs + up, exponent_ptrs + up, column_mask,
            PAIRS, ROWS, COLUMNS,
        )  # fmt: skip
    store_tile(
        out_ptr, sums, others, bias_ptr, targets, mask, columns, column_mask, first_row,
        COLUMNS_IN_ALL, GATE, ACTIVATION,
    )  # fmt: skip
