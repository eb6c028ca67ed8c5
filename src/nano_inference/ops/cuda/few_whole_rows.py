"""Products of a few rows and weights in int8, which round their input themselves: the bits of
`ops.quantised.product`.

A product with a launch for each of norm, codes, product and gate takes thirteen launches a layer.
These kernels take part of the work with them:

    up to `VECTOR_ROWS` rows      norm, codes, product, gate or addition    six launches a layer
    the same, schedule-invariant  codes, product, gate or addition          eight
    more rows                     norm, codes; product, gate or addition    ten

In the first form every program norms and rounds the rows again, which costs reads from the L2
cache: a kernel that would read more than `MOST_READ` leaves codes to a launch before it. A program
that rounds keeps a row's whole segment in registers to find its largest magnitude. Sums of codes
are whole numbers, so a tile of the weight may be cut anywhere. Scales of segments multiply them,
and segments are added in pairs, as in `quantised.whole_product`.

Norms in the first form add up squares in another order than `rows.rms_norm`. The third form norms
with the layout of that kernel, and the second launches it.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportUnreachable=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from itertools import pairwise
from typing import NamedTuple, TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.cuda import few_row_tiles as tiles
from nano_inference.ops.cuda.codes import INT8, encoded, is_finite, scale_and_inverse
from nano_inference.ops.cuda.few_row_tiles import (
    PADDED,
    columns_of_program,
    finish_rows,
    normed_part,
)
from nano_inference.ops.cuda.quantised import (
    AlignedWeight,
    codes_of,
    quantised_rows,
    store_codes,
    whole_product,
)
from nano_inference.ops.cuda.rows import (
    DTYPES,
    aligned,
    normed_row,
    overlapping,
    rms_norm,
    whole_row,
)
from nano_inference.ops.formats import FORMATS
from nano_inference.ops.interface import Weight
from nano_inference.ops.reference.quantised import QuantisedWeight
from nano_inference.ops.rowwise import Norm

MOST_READ = 16 << 20  # bytes of rows that programs read from L2: 3 µs, as much as a launch
TILE = 16 * 1024  # bytes of the weight that a program requests at a time
DEPTH = 256  # codes of a row that tensor cores multiply at a time
# A thread adds up as many squares at a time as it stores numbers: 8 of 16 bits, or 8 codes of rows
# up to this width. Codes of wider rows, or of float32, would change the order of additions.
MOST_NORMED = 4096
_EACH = tl.constexpr(16)  # codes that a thread loads at a time


class Launch(NamedTuple):
    """How products of a few rows are launched.

    Attributes:
        overlaps: True to start each kernel while its predecessor runs (sm_90 and later).
        norms: True if a kernel may norm rows in another order of additions than `rows.rms_norm`.
    """

    overlaps: bool = False
    norms: bool = True


DEFAULT = Launch()


class End(NamedTuple):
    """The end of a product: arguments of `few_row_tiles.finish_rows`."""

    kind: int  # STORE, ADD or GATE
    bias: Tensor | None
    residual: Tensor | None
    scale: float
    activation: int
    out: Tensor


def rounds_input(weight: Weight) -> TypeGuard[AlignedWeight]:
    """Return True if products of a weight round their input to codes."""
    return isinstance(weight, AlignedWeight) and weight.form == FORMATS["int8"]


def launch_whole(
    x: Tensor, norm: Norm | None, weight: AlignedWeight, end: End, how: Launch
) -> None:
    """Compute a product of at most `FEW_ROWS` rows.

    Args:
        x: Rows [N, K] of any dtype, or the float32 residual stream if there is a norm.
        norm: Norm of x before it is rounded to the weight's dtype, or None.
        weight: Weight in int8.
        end: The end of the product, with its output.
        how: How to launch it.
    """
    if norm is not None and not how.norms and _may_round(x, weight, norm.dtype.itemsize):
        x, norm = rms_norm(None, x, norm)[0], None
    bias = None if end.bias is None else end.bias.to(weight.dtype)
    numbers, factors = weight.data.view(torch.int8), weight.data.view(torch.float32)
    num_rows, (num_columns, depth) = len(x), weight.shape
    stride, scales_at = weight.data.stride(0), weight.scales_at // 4
    segments = len(weight.bounds) - 1
    options = {"enable_fp_fusion": False} | overlapping(how.overlaps)
    if _may_round(x, weight, x.element_size()):
        norm_weight = None if norm is None or norm.weight is None else aligned(norm.weight)
        eps, offset = (0.0, 0.0) if norm is None else (norm.eps, norm.offset)
        columns, width = tiles.columns_of_vector(num_columns, depth), _widest(weight)
        groups = triton.cdiv(triton.next_power_of_2(width), _EACH.value)  # in a segment
        tile = columns * segments * groups * _EACH.value  # bytes
        wide = tile >= TILE
        if tile > TILE:  # a thread holds this tile and the next one
            groups = max(groups * TILE // (2 * tile), 1)
        _vector_kernel[(triton.cdiv(num_columns, columns),)](
            aligned(x), norm_weight, numbers, factors, bias, end.residual, end.out, eps, offset,
            end.scale, num_columns, stride, scales_at, depth, weight.bounds, width, segments,
            width * segments == depth, num_rows, end.kind, end.activation, DTYPES[weight.dtype],
            columns, groups, triton.next_power_of_2(width), how.overlaps,
            num_warps=8 if wide else 4, **options,
        )  # fmt: skip
        return
    codes, scales = quantised_rows(x, weight) if norm is None else normed_codes(x, norm, weight)
    columns = 16 if num_columns <= 8192 else 32  # as in `quantised.tile_of`
    _tensor_kernel[(triton.cdiv(num_columns, columns),)](
        codes, scales, numbers, factors, bias, end.residual, end.out, num_rows, end.scale,
        num_columns, codes.stride(0), stride, scales_at, weight.bounds, segments, end.kind,
        end.activation, columns, DEPTH, how.overlaps, num_warps=4, num_stages=4, **options,
    )  # fmt: skip


def rounds_rows(x: Tensor, weight: Weight) -> bool:
    """Return True if a product of these rows takes one launch."""
    return rounds_input(weight) and len(x) > 0 and _may_round(x, weight, x.element_size())


def _may_round(x: Tensor, weight: QuantisedWeight, itemsize: int) -> bool:
    """Return True if the programs of a product round rows with numbers of `itemsize` bytes."""
    if len(x) > tiles.VECTOR_ROWS or len(weight.bounds) - 1 not in (1, 2, 4, 8):
        return False
    programs = weight.rows // tiles.columns_of_vector(weight.rows, weight.columns)
    return 2 * programs * len(x) * weight.columns * itemsize <= MOST_READ  # read twice


def _widest(weight: QuantisedWeight) -> int:
    """Return the number of columns of the widest segment."""
    return max(end - first for first, end in pairwise(weight.bounds))


def normed_codes(residual: Tensor, norm: Norm, weight: QuantisedWeight) -> tuple[Tensor, Tensor]:
    """Norm rows [N, K] of the residual stream as `rms_norm` does, and round them as
    `quantised_rows` does. Take one launch if the weight has one segment and 16 bits, and rows have
    a multiple of 8 columns.
    """
    rows, width = residual.shape
    alike = norm.dtype.itemsize == 2 and width <= MOST_NORMED and width % 8 == 0
    if norm.dtype != weight.dtype or len(weight.bounds) > 2 or not alike:
        return quantised_rows(rms_norm(None, residual, norm)[0], weight)
    codes, scales = codes_of(rows, weight)
    norm_weight = None if norm.weight is None else aligned(norm.weight)
    _norm_kernel[(rows,)](
        aligned(residual), norm_weight, codes, scales, norm.eps, norm.offset, width,
        codes.stride(0), DTYPES[norm.dtype], **whole_row(width),
    )  # fmt: skip
    return codes, scales


@triton.jit
def _norm_kernel(
    residual, weight, codes, scales, eps, offset, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm a row as `rows.rms_norm` does, and round it to codes. Grid (rows,)."""
    index = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    row = tl.load(residual + index * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    row = normed_row(row, weight, columns, inside, eps, offset, WIDTH)
    part = tl.where(inside, row.to(DTYPE).to(tl.float32), 0.0)
    store_codes(part, codes + index * STRIDE + columns, scales + index, inside)


@triton.jit
def _bounds_of(segments, BOUNDS: tl.constexpr, SEGMENTS: tl.constexpr, EVEN: tl.constexpr):
    """Return the first columns and the widths of segments. If all are equally wide, these follow
    from constants, and a thread loads 16 codes at a time.
    """
    if EVEN:
        return segments * BOUNDS[1], tl.full(segments.shape, BOUNDS[1], tl.int32)
    starts, widths = tl.zeros_like(segments), tl.zeros_like(segments)
    for segment in tl.static_range(SEGMENTS):
        here = segments == segment
        starts = tl.where(here, BOUNDS[segment], starts)
        widths = tl.where(here, BOUNDS[segment + 1] - BOUNDS[segment], widths)
    return starts, widths


@triton.jit
def _scales_of_row(
    x, norm_weight, eps, offset, K: tl.constexpr, BOUNDS: tl.constexpr, SEGMENTS: tl.constexpr,
    EVEN: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return 1 / rms of a row, and the scales [SEGMENTS] of its codes with their inverses, and 1
    for segments that are finite.
    """
    starts, widths = _bounds_of(tl.arange(0, SEGMENTS)[:, None], BOUNDS, SEGMENTS, EVEN)
    lanes = tl.arange(0, BLOCK)[None, :]
    columns, inside = starts + lanes, lanes < widths
    row = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0
    norm_part = norm_weight
    if norm_weight is not None:
        factor = tl.rsqrt(tl.sum(tl.sum(row * row, axis=1), axis=0) / K + eps)
        norm_part = norm_weight + columns
    row = normed_part(row, factor, norm_part, offset, inside, DTYPE)
    finite = tl.min(is_finite(row), axis=1)
    scale, inverse = scale_and_inverse(tl.max(tl.abs(row), axis=1), finite, INT8)
    return factor, scale, inverse, finite


@triton.jit
def _spread(numbers, SEGMENTS: tl.constexpr, GROUPS: tl.constexpr):
    """Return the number of each code's segment, [SEGMENTS * GROUPS, _EACH]."""
    whole = tl.broadcast_to(numbers[:, None, None], (SEGMENTS, GROUPS, _EACH))
    return tl.reshape(whole, (SEGMENTS * GROUPS, _EACH))


@triton.jit
def _codes_of_part(x, inside, factor, norm_weight, offset, inverse, finite, DTYPE: tl.constexpr):
    """Round a part of a row, of which x are the addresses, to codes as int32."""
    part = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    part = normed_part(part, factor, norm_weight, offset, inside, DTYPE)
    return encoded(part, inverse, finite, INT8).to(tl.int32)


@triton.jit
def _sum_of_segments(
    sums, x_scale, weight_scale, COLUMNS: tl.constexpr, SEGMENTS: tl.constexpr, GROUPS: tl.constexpr
):
    """Return the product [1, COLUMNS] from sums of codes [COLUMNS, SEGMENTS * GROUPS]: segments
    multiplied by both scales and added, neighbors first.
    """
    whole = tl.sum(tl.reshape(sums, (COLUMNS, SEGMENTS, GROUPS)), axis=2)
    total = whole.to(tl.float32) * (x_scale[None, :] * weight_scale) + 0.0
    if SEGMENTS == 8:
        even, odd = tl.split(tl.reshape(total, (COLUMNS, 4, 2)))
        total = even + odd
    if SEGMENTS >= 4:
        even, odd = tl.split(tl.reshape(total, (COLUMNS, 2, 2)))
        total = even + odd
    if SEGMENTS >= 2:
        even, odd = tl.split(tl.reshape(total, (COLUMNS, 1, 2)))
        total = even + odd
    return tl.reshape(total, (1, COLUMNS))


@triton.jit
def _vector_kernel(
    x, norm_weight, weight, weight_scales, bias, residual, out, eps, offset, scale, num_columns,
    STRIDE: tl.constexpr, SCALES_AT: tl.constexpr, K: tl.constexpr, BOUNDS: tl.constexpr,
    WIDEST: tl.constexpr, SEGMENTS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    FINISH: tl.constexpr, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr, COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Norm, round and multiply one or two rows. Grid (tiles of the weight's rows,). A tile of the
    weight is [COLUMNS, SEGMENTS * GROUPS, _EACH], a part of every segment.
    """
    if OVERLAPS:  # as in `few_rows._vector_kernel`
        tl.extra.cuda.gdc_launch_dependents()
    columns, column_mask = columns_of_program(num_columns, FINISH, COLUMNS)
    columns = columns.to(tl.int64)
    places = tl.arange(0, SEGMENTS * GROUPS)[:, None]
    within = places % GROUPS * _EACH + tl.arange(0, _EACH)[None, :]
    starts, widths = _bounds_of(places // GROUPS, BOUNDS, SEGMENTS, EVEN)
    at = starts + within
    start = weight + columns[:, None, None] * STRIDE + at[None, :, :]
    ours = column_mask[:, None, None]
    tile = tl.load(start, mask=ours & (within < widths)[None, :, :], other=0)
    segments = tl.arange(0, SEGMENTS)[None, :]
    scale_ptrs = weight_scales + columns[:, None] * (STRIDE // 4) + SCALES_AT + segments
    weight_scale = tl.load(scale_ptrs, mask=column_mask[:, None], other=0.0)
    tl.debug_barrier()  # keep the loads in flight, as in `few_rows._vector_kernel`
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()

    factor, x_scale, inverse, finite = _scales_of_row(
        x, norm_weight, eps, offset, K, BOUNDS, SEGMENTS, EVEN, DTYPE, BLOCK
    )
    inverse, finite = _spread(inverse, SEGMENTS, GROUPS), _spread(finite, SEGMENTS, GROUPS)
    next_factor, next_scale, next_inverse, next_finite = factor, x_scale, inverse, finite
    if ROWS == 2:
        next_factor, next_scale, next_inverse, next_finite = _scales_of_row(
            x + K, norm_weight, eps, offset, K, BOUNDS, SEGMENTS, EVEN, DTYPE, BLOCK
        )
        next_inverse = _spread(next_inverse, SEGMENTS, GROUPS)
        next_finite = _spread(next_finite, SEGMENTS, GROUPS)
    first = tl.zeros((COLUMNS, SEGMENTS * GROUPS), tl.int32)
    second = tl.zeros((COLUMNS, SEGMENTS * GROUPS), tl.int32)
    for k in range(0, WIDEST, GROUPS * _EACH):
        following = tile
        if GROUPS * _EACH < WIDEST:
            following = tl.load(
                start + (k + GROUPS * _EACH),
                mask=ours & (within < widths - k - GROUPS * _EACH)[None, :, :],
                other=0,
            )
        numbers = tile.to(tl.int32)
        inside = within < widths - k
        norm_part = norm_weight
        if norm_weight is not None:
            norm_part = norm_weight + k + at
        part = _codes_of_part(x + k + at, inside, factor, norm_part, offset, inverse, finite, DTYPE)
        first += tl.sum(numbers * part[None, :, :], axis=2)
        if ROWS == 2:
            part = _codes_of_part(
                x + K + k + at, inside, next_factor, norm_part, offset, next_inverse, next_finite,
                DTYPE,
            )  # fmt: skip
            second += tl.sum(numbers * part[None, :, :], axis=2)
        tile = following

    row = tl.arange(0, 1)
    sums = _sum_of_segments(first, x_scale, weight_scale, COLUMNS, SEGMENTS, GROUPS)
    finish_rows(
        sums, row, row == 0, columns, column_mask, bias, residual, out, scale, num_columns,
        FINISH, ACTIVATION, tl.float32, 1, COLUMNS,
    )  # fmt: skip
    if ROWS == 2:
        sums = _sum_of_segments(second, next_scale, weight_scale, COLUMNS, SEGMENTS, GROUPS)
        finish_rows(
            sums, row + 1, row == 0, columns, column_mask, bias, residual, out, scale, num_columns,
            FINISH, ACTIVATION, tl.float32, 1, COLUMNS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _tensor_kernel(
    x, x_scales, weight, weight_scales, bias, residual, out, num_rows, scale, num_columns,
    X_STRIDE: tl.constexpr, STRIDE: tl.constexpr, SCALES_AT: tl.constexpr, BOUNDS: tl.constexpr,
    SEGMENTS: tl.constexpr, FINISH: tl.constexpr, ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Multiply codes of rows on tensor cores. Grid (tiles of the weight's rows,)."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    columns, column_mask = columns_of_program(num_columns, FINISH, COLUMNS)
    columns = columns.to(tl.int64)
    rows, ks = tl.arange(0, PADDED), tl.arange(0, DEPTH)
    row_mask = rows < num_rows
    sums = whole_product(
        x + rows[:, None] * X_STRIDE + ks[None, :],
        x_scales + rows * SEGMENTS,
        row_mask,
        weight + columns[None, :] * STRIDE + ks[:, None],
        weight_scales + columns * (STRIDE // 4) + SCALES_AT,
        column_mask,
        BOUNDS,
        SEGMENTS,
        PADDED,
        COLUMNS,
        DEPTH,
    )
    finish_rows(
        sums, rows, row_mask, columns, column_mask, bias, residual, out, scale, num_columns,
        FINISH, ACTIVATION, tl.float32, PADDED, COLUMNS,
    )  # fmt: skip
