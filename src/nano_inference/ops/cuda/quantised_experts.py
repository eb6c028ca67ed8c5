"""Products of rows with quantized experts: tiles of `ops/cuda/moe.py`, arithmetic of
`ops/cuda/quantised.py`.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.cuda.quantised import quantised_rows, whole_product
from nano_inference.ops.cuda.rows import ACTIVATIONS, gated
from nano_inference.ops.moe import Experts
from nano_inference.ops.reference.quantised import QuantisedWeight

ROWS, COLUMNS, DEPTH = 16, 64, 128


def quantised_experts(
    x: Tensor, rows: Tensor, tiles: tuple[Tensor, ...], experts: Experts
) -> Tensor:
    """Implement `MoeSteps.products` for weights in the format `"int8"`: float32 [P, H].

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
        _launch(source, weight, bias, result, columns, activation, rows, tiles, experts.num_held)
    return out


def _launch(
    source: Tensor,
    weight: QuantisedWeight,
    bias: Tensor | None,
    result: Tensor,
    columns: int,
    activation: int | None,
    rows: Tensor,
    tiles: tuple[Tensor, ...],
    num_experts: int,
) -> None:
    codes, scales = quantised_rows(source, weight)
    _products_kernel[(len(tiles[1]), triton.cdiv(columns, COLUMNS))](
        codes,
        scales,
        weight.data.view(torch.int8),
        weight.data.view(torch.float32),
        bias,
        result,
        rows,
        *tiles,
        num_experts,
        columns,
        codes.stride(0),
        weight.data.stride(0),
        weight.scales_at // 4,
        weight.bounds,
        len(weight.bounds) - 1,
        activation is not None,
        activation or 0,
        ROWS,
        COLUMNS,
        DEPTH,
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=False,
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
    places = tl.load(firsts_ptr + tl.program_id(0)) + tl.arange(0, ROWS)
    mask = places < tl.load(ends_ptr + tl.program_id(0))
    who = tl.load(order_ptr + places, mask=mask, other=0)
    sources = tl.load(rows_ptr + who, mask=mask, other=0) if GATE else places
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = columns < COLUMNS_IN_ALL
    first_row = expert * COLUMNS_IN_ALL
    if GATE:
        first_row = first_row * 2
    ks = tl.arange(0, DEPTH)
    x_ptrs = x_ptr + sources[:, None] * X_STRIDE + ks[None, :]
    x_scale_ptrs = x_scales_ptr + sources * SEGMENTS
    weight_ptrs = weight_ptr + (first_row + columns)[None, :] * WEIGHT_STRIDE + ks[:, None]
    scale_ptrs = weight_scales_ptr + (first_row + columns) * (WEIGHT_STRIDE // 4) + SCALES_AT
    sums = whole_product(
        x_ptrs, x_scale_ptrs, mask, weight_ptrs, scale_ptrs, column_mask,
        BOUNDS, SEGMENTS, ROWS, COLUMNS, DEPTH,
    )  # fmt: skip
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + first_row + columns
        sums += tl.load(bias_ptrs, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    targets = who
    if GATE:
        others = whole_product(
            x_ptrs, x_scale_ptrs, mask, weight_ptrs + COLUMNS_IN_ALL * WEIGHT_STRIDE,
            scale_ptrs + COLUMNS_IN_ALL * (WEIGHT_STRIDE // 4), column_mask,
            BOUNDS, SEGMENTS, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip
        if bias_ptr is not None:
            bias = tl.load(bias_ptrs + COLUMNS_IN_ALL, mask=column_mask, other=0.0)
            others += bias.to(tl.float32)[None, :]
        sums = gated(sums, others, ACTIVATION)
        targets = places
    out_ptrs = out_ptr + targets[:, None] * COLUMNS_IN_ALL + columns[None, :]
    tl.store(out_ptrs, sums, mask=mask[:, None] & column_mask[None, :])
