"""Products of matrices: the vendor's, or our own if a row's bits must not depend on the number of
rows.

The order of additions of `invariant_product` depends only on the weight's shape [M, K] and dtype:

- K is cut into `segments` at fixed positions (`tiling`). Within a segment, products are added to a
  float32 accumulator in the order of k, by the same instruction for any number of rows. On Hopper
  it is wgmma m64n128k16: for every sixteen k, a tile of 64 rows issues one and a tile of 128 rows
  two. Before Hopper it is mma m16n8k16, and in float32 one fma for each k.
- The segments' sums are added in order, starting from zero, in float32. Then the bias is added, and
  the result is rounded once.

The number of rows only chooses the programs that do this. With few tiles, each segment is a
separate program, which stores its sum for a second kernel to add up. A decode step thus reads a
weight with the whole GPU. With many tiles, one program computes a tile's segments one after
another and adds them up in registers. Both add the same numbers in the same order.

docs/performance.md, "CUDA: predictions", explains the expected speed.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from nano_inference.ops.cuda.codes import PLAIN, capability_of, decoded, kind_of, scale_of
from nano_inference.ops.reference.quantised import QuantisedWeight

COLUMNS = 128  # rows of the weight per tile, n of the wgmma instruction
# (programs, least): with fewer programs, halve segments as long as they keep `least` elements of k
SEGMENTED = ((32, 512), (128, 2048))
MOST_SEGMENTS = 8  # each costs a float32 written and read for each output element
MOST_SPLIT_TILES = 48  # with more tiles, idle SMs cost less than sums stored in memory
GROUP = 8  # tiles of rows that share a tile of the weight before the next one is read
SUMS = 512  # elements that a program of the second kernel adds up
# SMs of an H100; a program that has an SM to itself may use all of its shared memory
PROCESSORS = 132
MOST_STAGES = 6  # tiles in flight: more would hide no more latency


class WeightCut(NamedTuple):
    """Division of a weight into tiles and segments. Only `segment` and `depth` affect the
    arithmetic.
    """

    columns: int  # rows of the weight, which are columns of the result
    depth: int  # elements of k that are loaded together
    segment: int  # elements of k that share an accumulator, a multiple of `depth`
    num_segments: int


class RowTile(NamedTuple):
    """Number of rows and warps of a program."""

    rows: int
    num_warps: int


# Key: True for float32 weights. Value: the tile for few rows, and the tile for more rows.
_ROW_TILES = {False: (RowTile(64, 4), RowTile(128, 8)), True: (RowTile(16, 4), RowTile(64, 8))}


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x [N, K] @ weight [M, K].T (+ bias) -> [N, M] in the weight's dtype, by the vendor's
    library.
    """
    if _would_round(weight):
        return invariant_product(x, weight, bias, weight.dtype)
    return functional.linear(x.to(weight.dtype), weight, bias)


def product_float32(x: Tensor, weight: Tensor) -> Tensor:
    """Compute the product without rounding: float32 [N, M]."""
    if x.is_cuda and weight.dtype != torch.float32:
        # only CUDA has `out_dtype`
        return torch.mm(x.to(weight.dtype), weight.t(), out_dtype=torch.float32)
    if _would_round(weight):
        return invariant_product(x, weight, None, torch.float32)
    return functional.linear(x.float(), weight.float())


def _would_round(weight: Tensor) -> bool:
    """Return True if the vendor's product would round float32 inputs to TF32, because this process
    allows it.

    The setting belongs to the process, possibly to a trainer, so it is read and never written.
    "none" means IEEE here.
    """
    exact = torch.backends.cuda.matmul.fp32_precision in ("none", "ieee")
    return weight.is_cuda and weight.dtype == torch.float32 and not exact


def invariant_product(
    x: Tensor, weight: Tensor | QuantisedWeight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Compute x [N, K] @ weight [M, K].T (+ bias) -> [N, M]. A row's bits depend only on that row
    and the weight.

    Args:
        x: Rows, rounded to the weight's dtype first.
        weight: float32, bfloat16 or float16, with adjacent elements in a row, or FP8 codes.
        bias: [M] or None, added before the result is rounded.
        dtype: Dtype of the result. float32 is not rounded.
    """
    (num_rows, depth), num_columns = x.shape, weight.shape[0]
    numbers, scales, codes = parts_of_weight(weight)
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
        numbers,
        scales,
        bias,
        sums,
        num_rows,
        num_columns,
        numbers.stride(0),
        depth,
        cut.segment,
        split,
        bias is not None and not split,
        num_columns % cut.columns != 0,
        tile.rows,
        cut.columns,
        cut.depth,
        GROUP,
        "ieee" if weight.dtype == torch.float32 else "tf32",  # only used for float32
        num_warps=tile.num_warps,
        CODES=codes,
        num_stages=_num_stages(cut, tile, programs, weight.dtype.itemsize, x.device),
        enable_fp_fusion=False,
    )
    if split:
        _add_segments_kernel[(triton.cdiv(out.numel(), SUMS),)](
            sums,
            scales,
            bias,
            out,
            num_columns,
            numbers.stride(0) // 4,
            out.numel(),
            cut.num_segments,
            bias is not None,
            codes,
            SUMS,
            enable_fp_fusion=False,
        )
    return out


def parts_of_weight(weight: Tensor | QuantisedWeight) -> tuple[Tensor, Tensor | None, int]:
    """Return a weight's numbers or codes, [M, K or more], the float32 view in which each row's
    scale follows its codes, and the kind of codes.
    """
    if isinstance(weight, Tensor):
        return weight, None, PLAIN.value
    scales = weight.data.view(torch.float32)[:, weight.scales_at // 4 :]
    codes = kind_of("fp8", capability_of(weight.device))
    return weight.data.view(torch.int8), scales, codes


def tiling(num_columns: int, depth: int, dtype: torch.dtype) -> WeightCut:
    """Return the cut of a weight [num_columns, depth]. It does not depend on the number of rows."""
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
    """Return True if the segments of a tile are separate programs. No bit depends on it."""
    return cut.num_segments > 1 and num_tiles <= MOST_SPLIT_TILES


def kinds_of_rows(
    num_columns: int, depth: int, dtype: torch.dtype, most: int, device: torch.device
) -> list[int]:
    """Return numbers of rows up to `most`, one for each kernel that `invariant_product` compiles
    for a weight [num_columns, depth].
    """
    cut = tiling(num_columns, depth, dtype)
    few, many = _ROW_TILES[dtype == torch.float32]
    examples: dict[tuple[RowTile, bool, int], int] = {}
    rows = 1
    while rows <= most:
        tile = few if rows <= few.rows else many
        num_tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(num_columns, cut.columns)
        split = is_split(cut, num_tiles)
        programs = num_tiles * (cut.num_segments if split else 1)
        examples.setdefault(
            (tile, split, _num_stages(cut, tile, programs, dtype.itemsize, device)), rows
        )
        if not split and programs > PROCESSORS and tile is many:
            break  # more rows use the same kernel
        rows = few.rows + 1 if tile is few else (rows - 1) // tile.rows * tile.rows + tile.rows + 1
    return list(examples.values())


def _num_stages(
    cut: WeightCut, tile: RowTile, programs: int, itemsize: int, device: torch.device
) -> int:
    """Return the number of tiles in flight: as many as fit if two programs share an SM, or each has
    an SM to itself.
    """
    stage = (tile.rows + cut.columns) * cut.depth * itemsize
    memory = shared_memory(device) // (1 if programs <= PROCESSORS else 2)
    return max(2, min(MOST_STAGES, memory // stage))


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may use. Without a device (the
    interpreter), return those of an H100.
    """
    if device.type != "cuda":
        return 227 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@triton.jit
def tile_of_program(
    num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr
):
    """Return the rows and columns of a program's tile, int64 [ROWS] and [COLUMNS].

    Tiles are ordered by groups of `GROUP` tiles of rows, then columns, then rows of the group.
    """
    row_tiles = tl.cdiv(num_rows, ROWS)
    group_tiles = GROUP * tl.cdiv(num_columns, COLUMNS)
    first_row_tile = tl.program_id(0) // group_tiles * GROUP
    height = tl.minimum(row_tiles - first_row_tile, GROUP)
    row_tile = first_row_tile + tl.program_id(0) % group_tiles % height
    column_tile = tl.program_id(0) % group_tiles // height

    rows = row_tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = column_tile.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    return rows, columns


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(  # noqa: C901 - most conditions are known at compile time
    x_ptr,
    weight_ptr,
    scales_ptr,  # None, or float32 scales of the weight's rows, which are as far apart as the rows
    bias_ptr,
    out_ptr,  # [N, M], or float32 [segments, N, M] if SPLIT
    num_rows,
    num_columns,
    weight_stride,
    K: tl.constexpr,
    SEGMENT: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RAGGED: tl.constexpr,  # the last tile of columns is partial
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    CODES: tl.constexpr,
):
    """Multiply one tile. Grid (tiles, segments if SPLIT, else 1)."""
    rows, columns = tile_of_program(num_rows, num_columns, ROWS, COLUMNS, GROUP)
    row_mask, column_mask = rows < num_rows, columns < num_columns
    ks = tl.arange(0, DEPTH)
    x_ptrs = x_ptr + rows[:, None] * K + ks[None, :]
    weight_ptrs = weight_ptr + columns[None, :] * weight_stride + ks[:, None]
    first = tl.program_id(1) * SEGMENT
    end = tl.minimum(first + SEGMENT, K) if SPLIT else K
    total = tl.zeros((ROWS, COLUMNS), tl.float32)  # sum of whole segments
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)  # sum of this segment
    for k in range(first, end, DEPTH):
        x_mask = row_mask[:, None]
        if K % DEPTH != 0:
            x_mask = x_mask & (ks[None, :] < K - k)
        x = tl.load(x_ptrs + k, mask=x_mask, other=0.0)
        if K % DEPTH != 0:
            weight = tl.load(
                weight_ptrs + k, mask=column_mask[None, :] & (ks[:, None] < K - k), other=0
            )
        elif RAGGED:
            weight = tl.load(weight_ptrs + k, mask=column_mask[None, :], other=0)
        else:
            weight = tl.load(weight_ptrs + k)
        if CODES != PLAIN:
            weight = decoded(weight, x.dtype, CODES)
        sums = tl.dot(x, weight, sums, input_precision=PRECISION)
        if not SPLIT and SEGMENT < K:  # noqa: SIM102 (known at compile time, the next one is not)
            if (k + DEPTH) % SEGMENT == 0:
                total += sums
                sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    if SPLIT or SEGMENT >= K:
        total = sums
    elif tl.cdiv(K, DEPTH) * DEPTH % SEGMENT != 0:
        total += sums
    if CODES != PLAIN and not SPLIT:
        scale = tl.load(scales_ptr + columns * (weight_stride // 4), mask=column_mask, other=0.0)
        total *= scale_of(scale, CODES)[None, :]
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
    scales_ptr,
    bias_ptr,
    out_ptr,  # [N, M]
    num_columns,
    scale_stride,
    size,  # N * M, small since few tiles are split
    SEGMENTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the segments' sums in order. Grid (blocks of N * M elements)."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    total = tl.zeros((BLOCK,), tl.float32)
    for segment in tl.static_range(SEGMENTS):
        total += tl.load(sums_ptr + segment * size + places, mask=mask, other=0.0)
    if CODES != PLAIN:
        at = (places % num_columns).to(tl.int64) * scale_stride
        total *= scale_of(tl.load(scales_ptr + at, mask=mask, other=0.0), CODES)
    if HAS_BIAS:
        total += tl.load(bias_ptr + places % num_columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=mask)
