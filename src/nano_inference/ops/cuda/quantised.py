"""Products of weights in 8 bits as sums of whole numbers: the bits of `ops.quantised.product`.

Inputs are rounded to codes row by row, tensor cores add up products of codes in 32 bits, and both
scales multiply each segment's sum. Whole numbers have the same sum in any order, so tiles are
chosen by the number of rows and no bit depends on them: with and without batch invariance, and on
the CPU kernels, a product of the same row has the same bits.

A program computes a tile of a product, segment by segment. Sums of segments are added in pairs as
they come, so that at most four tiles are in registers.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.cuda.codes import (
    INT8,
    capability_of,
    decoded,
    encoded,
    is_finite,
    kind_of,
    scale_and_inverse,
    scale_of,
)
from nano_inference.ops.cuda.matmul import GROUP, tile_of_program
from nano_inference.ops.cuda.rows import DTYPES, aligned, whole_row
from nano_inference.ops.reference.quantised import QuantisedWeight

# numbers of rows that have kernels of their own: `few_row_tiles.VECTOR_ROWS`, then `tile_of`
KINDS_OF_ROWS = (1, 2, 3, 17, 65)
MOST_COLUMNS = 2**31 // 128**2  # products of codes are added up in 32 bits


class AlignedWeight(QuantisedWeight):
    """A quantized weight whose rows begin at multiples of 16 bytes, as many as a load reads."""

    alignment = 16


class Tile(NamedTuple):
    """Part of a product that a program computes."""

    rows: int
    columns: int
    depth: int  # codes of a row that are loaded together
    num_warps: int
    num_stages: int


def quantised_rows(x: Tensor, weight: QuantisedWeight) -> tuple[Tensor, Tensor]:
    """Round rows [N, K] to the weight's dtype, then to codes. Return int8 [N, K or a little more]
    and the scales, float32 [N, segments].
    """
    rows, columns = x.shape
    codes, scales = codes_of(rows, weight)
    widest = max(end - first for first, end in zip(weight.bounds, weight.bounds[1:], strict=False))
    if rows:
        _quantise_kernel[(rows,)](
            aligned(x), codes, scales, columns, codes.stride(0), weight.bounds, scales.shape[1],
            DTYPES[weight.dtype], **whole_row(widest),
        )  # fmt: skip
    return codes, scales


def codes_of(rows: int, weight: QuantisedWeight) -> tuple[Tensor, Tensor]:
    """Allocate codes and scales of rows for a product, as `quantised_rows` returns them."""
    stride = triton.cdiv(weight.columns, AlignedWeight.alignment) * AlignedWeight.alignment
    codes = torch.empty((rows, stride), dtype=torch.int8, device=weight.device)
    shape = (rows, len(weight.bounds) - 1)
    return codes, torch.empty(shape, dtype=torch.float32, device=weight.device)


def quantised_product(x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None) -> Tensor:
    """Compute x [N, K] @ weight [M, K].T (+ bias) -> float32 [N, M]. Inputs and bias are rounded to
    the weight's dtype first.

    Args:
        x: Rows of any dtype.
        weight: A weight in the format `"int8"`, with at most 131,072 columns.
        bias: [M] or None.
    """
    num_rows, num_columns = len(x), weight.rows
    out = torch.empty((num_rows, num_columns), dtype=torch.float32, device=x.device)
    if out.numel() == 0:
        return out
    codes, scales = quantised_rows(x, weight)
    segments = len(weight.bounds) - 1
    tile = tile_of(num_rows, num_columns, segments)
    stride, scales_at = weight.data.stride(0), weight.scales_at
    grid = (triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns),)
    _product_kernel[grid](
        codes,
        scales,
        weight.data.view(torch.int8),
        weight.data.view(torch.float32),
        None if bias is None else bias.to(weight.dtype),
        out,
        num_rows,
        num_columns,
        codes.stride(0),
        stride,
        scales_at // 4,
        weight.bounds,
        segments,
        tile.rows,
        tile.columns,
        tile.depth,
        GROUP,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )
    return out


def tile_of(num_rows: int, num_columns: int, segments: int) -> Tile:
    """Return the tile of a product. No bit depends on it."""
    if num_rows <= 16:
        # two programs for each of an H100's SMs read a weight at full speed
        return Tile(16, 16 if num_columns <= 8192 else 32, 256, 4, 4)
    if segments > 1:  # up to four tiles of sums in registers
        return Tile(64, 32, 128, 8, 3)
    if num_rows <= 64:
        return Tile(64, 64, 128, 4, 4)
    return Tile(128, 128, 128, 8, 3)


def quantised_embedding(input_ids: Tensor, weight: QuantisedWeight, scale: float) -> Tensor:
    """Return rows of a quantized embedding, decoded and scaled, float32 [N, K]."""
    columns = weight.columns
    out = torch.empty((len(input_ids), columns), dtype=torch.float32, device=weight.device)
    if len(input_ids):
        _embed_codes_kernel[(len(input_ids),)](
            input_ids.contiguous(),
            weight.data.view(torch.int8),
            weight.data.view(torch.float32),
            out,
            scale,
            columns,
            weight.data.stride(0),
            weight.scales_at // 4,
            kind_of("fp8" if weight.form.floats else "int8", capability_of(weight.device)),
            **whole_row(columns),
        )
    return out


@triton.jit
def _quantise_kernel(
    x, codes, scales, K: tl.constexpr, STRIDE: tl.constexpr, BOUNDS: tl.constexpr,
    SEGMENTS: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Round a row to codes, segment by segment. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    for segment in tl.static_range(SEGMENTS):
        columns = BOUNDS[segment] + lanes
        inside = columns < BOUNDS[segment + 1]
        part = tl.load(x + row * K + columns, mask=inside, other=0.0).to(DTYPE).to(tl.float32)
        store_codes(part, codes + row * STRIDE + columns, scales + row * SEGMENTS + segment, inside)


@triton.jit
def store_codes(part, codes, scale, inside):
    """Round numbers that share a scale, and store codes and scale at these addresses."""
    finite = tl.min(is_finite(part), axis=0)
    factor, inverse = scale_and_inverse(tl.max(tl.abs(part), axis=0), finite, INT8)
    tl.store(scale, factor)
    tl.store(codes, encoded(part, inverse, finite, INT8), mask=inside)


@triton.jit
def whole_product(
    x_ptrs,  # int8 [ROWS, DEPTH]: codes of rows, at the first column
    x_scale_ptrs,  # float32 [ROWS]: the first scale of each row
    row_mask,
    weight_ptrs,  # int8 [DEPTH, COLUMNS]
    weight_scale_ptrs,  # float32 [COLUMNS]
    column_mask,
    BOUNDS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return a tile of a product, float32 [ROWS, COLUMNS]."""
    ks = tl.arange(0, DEPTH)
    one = tl.zeros((ROWS, COLUMNS), tl.float32)  # sums of so many segments
    two = tl.zeros((ROWS, COLUMNS), tl.float32)
    four = tl.zeros((ROWS, COLUMNS), tl.float32)
    for segment in tl.static_range(SEGMENTS):
        sums = tl.zeros((ROWS, COLUMNS), tl.int32)
        for k in range(BOUNDS[segment], BOUNDS[segment + 1], DEPTH):
            x_mask, weight_mask = row_mask[:, None], column_mask[None, :]
            if (BOUNDS[segment + 1] - BOUNDS[segment]) % DEPTH != 0:
                x_mask = x_mask & (ks[None, :] < BOUNDS[segment + 1] - k)
                weight_mask = weight_mask & (ks[:, None] < BOUNDS[segment + 1] - k)
            x = tl.load(x_ptrs + k, mask=x_mask, other=0)
            weight = tl.load(weight_ptrs + k, mask=weight_mask, other=0)
            sums = tl.dot(x, weight, sums, out_dtype=tl.int32)
        x_scale = tl.load(x_scale_ptrs + segment, mask=row_mask, other=0.0)
        weight_scale = tl.load(weight_scale_ptrs + segment, mask=column_mask, other=0.0)
        total = sums.to(tl.float32) * (x_scale[:, None] * weight_scale[None, :]) + 0.0
        # sums of 1, 2, 4 or 8 segments, neighbors first
        if segment % 2 == 1:
            total = one + total
        if segment % 4 == 3:
            total = two + total
        if segment % 8 == 7:
            total = four + total
        if segment % 2 == 0:
            one = total
        if segment % 4 == 1:
            two = total
        if segment % 8 == 3:
            four = total
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x_ptr,  # int8 [N, X_STRIDE]
    x_scales_ptr,  # float32 [N, SEGMENTS]
    weight_ptr,  # int8 [M, WEIGHT_STRIDE]
    weight_scales_ptr,  # the same memory as float32
    bias_ptr,
    out_ptr,  # float32 [N, M]
    num_rows,
    num_columns,
    X_STRIDE: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    SCALES_AT: tl.constexpr,  # number of the first scale within a row of the weight
    BOUNDS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Multiply one tile. Grid (tiles,), in groups of tiles of rows that share tiles of columns."""
    rows, columns = tile_of_program(num_rows, num_columns, ROWS, COLUMNS, GROUP)
    row_mask, column_mask = rows < num_rows, columns < num_columns
    ks = tl.arange(0, DEPTH)
    total = whole_product(
        x_ptr + rows[:, None] * X_STRIDE + ks[None, :],
        x_scales_ptr + rows * SEGMENTS,
        row_mask,
        weight_ptr + columns[None, :] * WEIGHT_STRIDE + ks[:, None],
        weight_scales_ptr + columns * (WEIGHT_STRIDE // 4) + SCALES_AT,
        column_mask,
        BOUNDS,
        SEGMENTS,
        ROWS,
        COLUMNS,
        DEPTH,
    )
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + rows[:, None] * num_columns + columns[None, :]
    tl.store(out_ptrs, total, mask=row_mask[:, None] & column_mask[None, :])


@triton.jit
def _embed_codes_kernel(
    ids, codes, scales, out, scale, K: tl.constexpr, STRIDE: tl.constexpr, SCALES_AT: tl.constexpr,
    CODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    token = tl.load(ids + row)
    part = tl.load(codes + token * STRIDE + columns, mask=columns < K, other=0)
    factor = tl.load(scales + token * (STRIDE // 4) + SCALES_AT)
    values = decoded(part, tl.float32, CODES) * scale_of(factor, CODES)
    tl.store(out + row * K + columns, values * scale, mask=columns < K)
