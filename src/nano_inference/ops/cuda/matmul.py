"""Products of matrices: the vendor's, or our own where a row's bits must not depend on how many
rows there are.

The order of additions of `invariant_product` is a function of the weight's shape [M, K] and dtype
alone:

- K is cut into `segments` at fixed places (`tiling`). Within one, products are added to a float32
  accumulator in the order of k, by the same instruction for any number of rows: on Hopper wgmma
  m64n128k16, of which a tile of 64 rows issues one and a tile of 128 rows two for each sixteen k;
  before it mma m16n8k16; in float32 one fma for each k.
- The segments' sums are added in order, starting from zero, in float32; then the bias; then one
  rounding.

What the number of rows chooses is who does that. With few tiles, each segment is a program of its
own, which leaves its sum in memory for a second kernel to add up: a decode step reads a weight with
all of the card. With many, one program runs a tile's segments one after another and adds up in
registers. Both add the same numbers in the same order.

Why it should be fast is in docs/performance.md, "CUDA: predictions".
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

COLUMNS = 128  # rows of the weight in a tile; n of the one wgmma
SEGMENTED = ((32, 512), (128, 2048))  # K is halved below so many programs, if segments stay so long
MOST_SEGMENTS = 8  # each costs a float32 written and read for each output element
MOST_SPLIT_TILES = 48  # with more tiles than that, the idle SMs cost less than sums left in memory
GROUP = 8  # tiles of rows that share a tile of the weight before the next one is read
SUMS = 512  # elements that a program of the second kernel adds up
PROCESSORS = 132  # of an H100; a program that has one to itself may have all of its shared memory
MOST_STAGES = 6  # tiles on their way; more would hide no more latency


class WeightCut(NamedTuple):
    """How a weight is cut. Only `segment` and `depth` are part of the arithmetic."""

    columns: int  # rows of the weight, which are columns of the result
    depth: int  # elements of k that are loaded at once
    segment: int  # elements of k that are added up in one accumulator; a multiple of `depth`
    num_segments: int


class RowTile(NamedTuple):
    """How many rows a program computes, and with how many warps."""

    rows: int
    num_warps: int


# By whether the weight is float32: the tile for few rows, and that for more rows than it has.
_ROW_TILES = {False: (RowTile(64, 4), RowTile(128, 8)), True: (RowTile(16, 4), RowTile(64, 8))}


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X [N, K] @ weight [M, K].T (+ bias) -> [N, M] in the weight's dtype, by the vendor's
    library.
    """
    if _would_round(weight):
        return invariant_product(x, weight, bias, weight.dtype)
    return functional.linear(x.to(weight.dtype), weight, bias)


def product_float32(x: Tensor, weight: Tensor) -> Tensor:
    """The same, not rounded: float32 [N, M]."""
    if x.is_cuda and weight.dtype != torch.float32:
        # CUDA alone has `out_dtype`
        return torch.mm(x.to(weight.dtype), weight.t(), out_dtype=torch.float32)
    if _would_round(weight):
        return invariant_product(x, weight, None, torch.float32)
    return functional.linear(x.float(), weight.float())


def _would_round(weight: Tensor) -> bool:
    """Whether the vendor's product would round float32 inputs to TF32, because someone in this
    process allowed it.

    The setting is the process's and may be a trainer's, so it is read and never written; "none"
    means IEEE here.
    """
    exact = torch.backends.cuda.matmul.fp32_precision in ("none", "ieee")
    return weight.is_cuda and weight.dtype == torch.float32 and not exact


def invariant_product(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """X [N, K] @ weight [M, K].T (+ bias) -> [N, M], where a row's bits depend on that row and the
    weight alone.

    Args:
        x: rows; rounded to the weight's dtype first.
        weight: float32, bfloat16 or float16, elements of a row side by side.
        bias: [M] or None; added before the result is rounded.
        dtype: of the result; float32 is not rounded.
    """
    (num_rows, depth), num_columns = x.shape, len(weight)
    x = x.to(weight.dtype).contiguous()
    out = torch.empty((num_rows, num_columns), dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    cut = tiling(num_columns, depth, weight.dtype)
    few, many = _ROW_TILES[weight.dtype == torch.float32]
    tile = few if num_rows <= few.rows else many
    num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, cut.columns)
    split = is_split(cut, num_tiles)
    programs = num_tiles * (cut.num_segments if split else 1)
    sums = torch.empty((cut.num_segments, num_rows, num_columns), device=x.device) if split else out
    _product_kernel[num_tiles, cut.num_segments if split else 1](
        x,
        weight,
        bias,
        sums,
        num_rows,
        num_columns,
        weight.stride(0),
        depth,
        cut.segment,
        split,
        bias is not None and not split,
        num_columns % cut.columns != 0,
        tile.rows,
        cut.columns,
        cut.depth,
        GROUP,
        "ieee" if weight.dtype == torch.float32 else "tf32",  # no choice but for float32
        num_warps=tile.num_warps,
        num_stages=_num_stages(cut, tile, programs, weight.element_size(), weight.device),
        enable_fp_fusion=False,
    )
    if split:
        _add_segments_kernel[(triton.cdiv(out.numel(), SUMS),)](
            sums,
            bias,
            out,
            num_columns,
            out.numel(),
            cut.num_segments,
            bias is not None,
            SUMS,
            enable_fp_fusion=False,
        )
    return out


def tiling(num_columns: int, depth: int, dtype: torch.dtype) -> WeightCut:
    """How a weight [num_columns, depth] is cut, which the number of rows has no part in."""
    columns, step = (64, 32) if dtype == torch.float32 else (COLUMNS, 64)
    segments, tiles = 1, triton.cdiv(num_columns, columns)
    for programs, least in SEGMENTED:
        while (
            segments < MOST_SEGMENTS
            and segments * tiles < programs
            and depth >= 2 * segments * least
        ):
            segments *= 2
    segment = triton.cdiv(triton.cdiv(depth, step), segments) * step
    return WeightCut(columns, step, segment, triton.cdiv(depth, segment))


def is_split(cut: WeightCut, num_tiles: int) -> bool:
    """Whether the segments of a tile are programs of their own; no bit depends on it."""
    return cut.num_segments > 1 and num_tiles <= MOST_SPLIT_TILES


def kinds_of_rows(
    num_columns: int, depth: int, dtype: torch.dtype, most: int, device: torch.device
) -> list[int]:
    """Numbers of rows up to `most`, one for each kernel that `invariant_product` is compiled to for
    a weight [num_columns, depth].
    """
    cut = tiling(num_columns, depth, dtype)
    few, many = _ROW_TILES[dtype == torch.float32]
    found: dict[tuple[RowTile, bool, int], int] = {}
    rows = 1
    while rows <= most:
        tile = few if rows <= few.rows else many
        num_tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(num_columns, cut.columns)
        split = is_split(cut, num_tiles)
        programs = num_tiles * (cut.num_segments if split else 1)
        found.setdefault(
            (tile, split, _num_stages(cut, tile, programs, dtype.itemsize, device)), rows
        )
        if not split and programs > PROCESSORS and tile is many:
            break  # nothing changes any more
        rows = few.rows + 1 if tile is few else (rows - 1) // tile.rows * tile.rows + tile.rows + 1
    return list(found.values())


def _num_stages(
    cut: WeightCut, tile: RowTile, programs: int, itemsize: int, device: torch.device
) -> int:
    """As many tiles on their way as fit, where two programs share an SM or each has one to
    itself.
    """
    stage = (tile.rows + cut.columns) * cut.depth * itemsize
    memory = shared_memory(device) // (1 if programs <= PROCESSORS else 2)
    return max(2, min(MOST_STAGES, memory // stage))


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one program may have. Where there is no device (the interpreter), an H100's."""
    if device.type != "cuda":
        return 227 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,  # [N, M], or where SPLIT float32 [segments, N, M]
    num_rows,
    num_columns,
    weight_stride,
    K: tl.constexpr,
    SEGMENT: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RAGGED: tl.constexpr,  # the last tile of columns is not whole
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (tiles, segments where SPLIT, else 1). Tiles go by groups of rows, then columns, then
    rows of the group.
    """
    row_tiles = tl.cdiv(num_rows, ROWS)
    group_tiles = GROUP * tl.cdiv(num_columns, COLUMNS)
    first_row_tile = tl.program_id(0) // group_tiles * GROUP
    height = tl.minimum(row_tiles - first_row_tile, GROUP)
    row_tile = first_row_tile + tl.program_id(0) % group_tiles % height
    column_tile = tl.program_id(0) % group_tiles // height

    rows = row_tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = column_tile.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    row_mask, column_mask = rows < num_rows, columns < num_columns
    ks = tl.arange(0, DEPTH)
    x_ptrs = x_ptr + rows[:, None] * K + ks[None, :]
    weight_ptrs = weight_ptr + columns[None, :] * weight_stride + ks[:, None]
    first = tl.program_id(1) * SEGMENT
    end = tl.minimum(first + SEGMENT, K) if SPLIT else K
    total = tl.zeros((ROWS, COLUMNS), tl.float32)  # of whole segments
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)  # of this segment
    for k in range(first, end, DEPTH):
        x_mask = row_mask[:, None]
        if K % DEPTH != 0:
            x_mask = x_mask & (ks[None, :] < K - k)
        x = tl.load(x_ptrs + k, mask=x_mask, other=0.0)
        if K % DEPTH != 0:
            weight = tl.load(
                weight_ptrs + k, mask=column_mask[None, :] & (ks[:, None] < K - k), other=0.0
            )
        elif RAGGED:
            weight = tl.load(weight_ptrs + k, mask=column_mask[None, :], other=0.0)
        else:
            weight = tl.load(weight_ptrs + k)
        sums = tl.dot(x, weight, sums, input_precision=PRECISION)
        if not SPLIT and SEGMENT < K:  # noqa: SIM102 (known when compiled, unlike the next one)
            if (k + DEPTH) % SEGMENT == 0:
                total += sums
                sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    if SPLIT or SEGMENT >= K:
        total = sums
    elif tl.cdiv(K, DEPTH) * DEPTH % SEGMENT != 0:
        total += sums
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    out_rows = rows + tl.program_id(1).to(tl.int64) * num_rows
    out_ptrs = out_ptr + out_rows[:, None] * num_columns + columns[None, :]
    tl.store(
        out_ptrs, total.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :]
    )


@triton.jit
def _add_segments_kernel(
    sums_ptr,  # float32 [segments, N, M]
    bias_ptr,
    out_ptr,  # [N, M]
    num_columns,
    size,  # N * M; small, since few tiles are split
    SEGMENTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (blocks of N * M elements): adds the segments' sums in order."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    total = tl.zeros((BLOCK,), tl.float32)
    for segment in tl.static_range(SEGMENTS):
        total += tl.load(sums_ptr + segment * size + places, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + places % num_columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=mask)
