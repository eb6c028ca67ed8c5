"""Attention over latents on a GPU: `LatentOps`, the operations next to the attention itself.

Two kernels store a step's latents and make its queries:

- `_by_head_kernel` multiplies the plain numbers of each query by the head's key rows, and attended
  latents by the head's value rows. Each head's weight is read where the checkpoint has it, so
  updates need no second copy.
- `_latent_kernel` rotates the queries' other numbers. It norms and rotates each row's key, and
  writes it to its slot.

A product adds up in the order of k, by the same instruction for any number of rows, and a row's
other operations are its own. So a row's bits do not depend on other rows.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.cuda.rows import DTYPES, aligned, units_of
from nano_inference.ops.interface import KvcacheView, LatentOps, LatentWeights, RopeArgs

COLUMNS = 128  # columns of a head's product per program
ROWS = 64  # rows per program: m of the wgmma instruction
_GROUP = 8  # heads whose numbers a program rotates


def store(
    q: Tensor,
    c: Tensor,
    weights: LatentWeights,
    rope: RopeArgs,
    positions: Tensor,
    slot_mapping: Tensor,
    view: KvcacheView,
    layer: int,
) -> Tensor:
    """Implement `LatentOps.store`. A row with a negative slot is padding and not stored.

    Raises:
        ValueError: The rotary table does not rotate exactly the rotary part of a key.
    """
    kv, norm, sizes = weights
    assert isinstance(kv, Tensor)
    if 2 * rope.cos.shape[1] != sizes.rotary:
        raise ValueError(
            f"the rotary table turns {2 * rope.cos.shape[1]} numbers; the keys of {sizes} have "
            f"{sizes.rotary}."
        )
    rows, heads = len(q), rope.num_heads
    out = torch.empty((rows, heads, sizes.key), dtype=view.format.dtype, device=q.device)
    if not rows:
        return out
    q, c, keys = aligned(q), aligned(c), view.lie(layer)[0]
    by_head = sizes.plain + sizes.value
    _multiply(
        _Columns(q, sizes.plain + sizes.rotary, 0, sizes.plain),
        _Columns(out, sizes.key, sizes.rotary, sizes.rank),
        _Columns(kv, by_head * sizes.rank, 0, 0),
        strides=(sizes.rank, 1),
        heads=heads,
        scales=rope.query_scales,
        positions=positions,
    )
    _latent_kernel[(rows, triton.cdiv(heads, _GROUP) + 1)](
        q,
        c,
        None if norm.weight is None else aligned(norm.weight),
        aligned(rope.cos),
        aligned(rope.sin),
        positions.contiguous(),
        slot_mapping.contiguous(),
        units_of(view, layer),
        keys,
        out,
        rope.query_scales,
        norm.eps,
        norm.offset,
        DTYPES[kv.dtype],
        DTYPES[norm.dtype],
        heads,
        sizes.plain,
        sizes.rotary,
        sizes.rank,
        rope.interleaved,
        view.block_size,
        keys.stride(1),
        _GROUP,
        triton.next_power_of_2(sizes.rotary // 2),
        triton.next_power_of_2(sizes.rank),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def values(attended: Tensor, weights: LatentWeights) -> Tensor:
    """Implement `LatentOps.values` with one product per head."""
    kv, _, sizes = weights
    assert isinstance(kv, Tensor)
    by_head = sizes.plain + sizes.value
    heads = len(kv) // by_head
    out = torch.empty((len(attended), heads * sizes.value), dtype=kv.dtype, device=kv.device)
    if len(attended):
        _multiply(
            _Columns(aligned(attended), sizes.key, sizes.rotary, sizes.rank),
            _Columns(out, sizes.value, 0, sizes.value),
            _Columns(kv, by_head * sizes.rank, sizes.plain * sizes.rank, 0),
            strides=(1, sizes.rank),
            heads=heads,
        )
    return out


LATENT_OPS = LatentOps[Tensor](store, values)


class _Columns(NamedTuple):
    """A head's numbers in a tensor of all heads.

    Attributes:
        tensor: The tensor.
        step: Numbers from one head to the next.
        first: The first head's first number.
        width: Numbers of a head in each row. 0: unused.
    """

    tensor: Tensor
    step: int
    first: int
    width: int


def _multiply(
    x: _Columns,
    out: _Columns,
    weight: _Columns,
    *,
    strides: tuple[int, int],
    heads: int,
    scales: Tensor | None = None,
    positions: Tensor | None = None,
) -> None:
    """Multiply some numbers of each head by the head's part of a weight.

    Args:
        x, out: Rows, of which `width` numbers per head are factors, or results.
        weight: The weight. A number of a head's matrix [columns of x, columns of out] is at the two
            `strides`.
        scales: Factors of the results by position, applied after they are rounded.
    """
    is_float32 = weight.tensor.dtype == torch.float32
    rows, columns, depth = (16, 64, 32) if is_float32 else (ROWS, COLUMNS, 64)
    num_rows = len(x.tensor)
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(out.width, columns), heads)
    _by_head_kernel[grid](
        x.tensor,
        weight.tensor,
        out.tensor,
        scales,
        None if scales is None else positions,
        num_rows,
        x.tensor.stride(0),
        x.step,
        x.first,
        out.tensor.stride(0),
        out.step,
        out.first,
        weight.step,
        weight.first,
        *strides,
        x.width,
        out.width,
        rows,
        columns,
        depth,
        "ieee" if is_float32 else "tf32",  # only used for float32
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _by_head_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    scales_ptr,
    positions_ptr,
    num_rows,
    X_STRIDE: tl.constexpr,
    X_STEP: tl.constexpr,
    X_FIRST: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    OUT_STEP: tl.constexpr,
    OUT_FIRST: tl.constexpr,
    WEIGHT_STEP: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    K_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    K: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply a tile of rows of one head. Grid (tiles of rows, tiles of columns, heads): programs
    that share a part of the weight are neighbors.
    """
    head = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_mask, column_mask = (rows < num_rows)[:, None], (columns < OUT)[None, :]
    ks = tl.arange(0, DEPTH)
    DTYPE: tl.constexpr = weight_ptr.dtype.element_ty
    x_ptrs = x_ptr + rows[:, None] * X_STRIDE + head * X_STEP + X_FIRST + ks[None, :]
    weight_ptrs = weight_ptr + head * WEIGHT_STEP + WEIGHT_FIRST
    weight_ptrs += ks[:, None] * K_STRIDE + columns[None, :] * COLUMN_STRIDE
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, K, DEPTH):
        x = tl.load(x_ptrs + k, mask=row_mask & (ks[None, :] < K - k), other=0.0).to(DTYPE)
        weight = tl.load(
            weight_ptrs + k * K_STRIDE, mask=(ks[:, None] < K - k) & column_mask, other=0.0
        )
        sums = tl.dot(x, weight, sums, input_precision=PRECISION)
    result = sums.to(DTYPE)
    if scales_ptr is not None:
        position = tl.load(positions_ptr + rows, mask=rows < num_rows, other=0)
        scale = tl.load(scales_ptr + position, mask=rows < num_rows, other=0.0)
        result = result.to(tl.float32) * scale[:, None]
    out_ptrs = out_ptr + rows[:, None] * OUT_STRIDE + head * OUT_STEP + OUT_FIRST + columns[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=row_mask & column_mask)


@triton.jit
def _rotate(
    source_ptr, target_ptr, mask, columns, others, cosine, sine, scale, DTYPE: tl.constexpr
):
    """Round pairs of numbers to DTYPE, rotate them, and store them times `scale`."""
    first = tl.load(source_ptr + columns, mask=mask, other=0.0).to(DTYPE).to(tl.float32)
    second = tl.load(source_ptr + others, mask=mask, other=0.0).to(DTYPE).to(tl.float32)
    one, other = first * cosine - second * sine, second * cosine + first * sine
    if scale is not None:
        one, other = one * scale, other * scale
    tl.store(target_ptr + columns, one.to(target_ptr.dtype.element_ty), mask=mask)
    tl.store(target_ptr + others, other.to(target_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_latent(
    source_ptr, target_ptr, norm_ptr, eps, offset, DTYPE: tl.constexpr, RANK: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Norm a latent, round it to DTYPE and store it."""
    numbers = tl.arange(0, WIDTH)
    inside = numbers < RANK
    latent = tl.load(source_ptr + numbers, mask=inside, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        factor = tl.load(norm_ptr + numbers, mask=inside, other=0.0).to(tl.float32) + offset
        latent = latent * tl.rsqrt(tl.sum(latent * latent, axis=0) / RANK + eps) * factor
    tl.store(target_ptr + numbers, latent.to(DTYPE).to(target_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _latent_kernel(
    q_ptr,
    c_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    slots_ptr,
    units_ptr,
    keys_ptr,
    out_ptr,
    scales_ptr,
    eps,
    offset,
    DTYPE: tl.constexpr,
    NORM_DTYPE: tl.constexpr,
    HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    ROTARY: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Rotate some heads' queries, or make and store the key of a row. Programs: (rows, groups of
    heads, then the key).
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    PARTS: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    KEY: tl.constexpr = ROTARY + RANK
    pairs = tl.arange(0, HALF)
    turning = (pairs < ROTARY // 2)[None, :]
    if INTERLEAVED:
        columns, others = 2 * pairs[None, :], 2 * pairs[None, :] + 1
    else:
        columns, others = pairs[None, :], pairs[None, :] + ROTARY // 2
    position = tl.load(positions_ptr + row)
    angle = (position * (ROTARY // 2) + pairs)[None, :]
    cosine = tl.load(cos_ptr + angle, mask=turning, other=1.0)
    sine = tl.load(sin_ptr + angle, mask=turning, other=0.0)
    if part < PARTS:
        heads = (part * GROUP + tl.arange(0, GROUP))[:, None]
        scale = None
        if scales_ptr is not None:
            scale = tl.load(scales_ptr + position)
        _rotate(
            q_ptr + row * (HEADS * (PLAIN + ROTARY)) + heads * (PLAIN + ROTARY) + PLAIN,
            out_ptr + row * (HEADS * KEY) + heads * KEY,
            (heads < HEADS) & turning, columns, others, cosine, sine, scale, DTYPE,
        )  # fmt: skip
    else:
        slot = tl.load(slots_ptr + row)
        if slot >= 0:
            block = slot // BLOCK_SIZE
            if units_ptr is not None:
                block = tl.load(units_ptr + block)
            source_ptr = c_ptr + row * KEY
            target_ptr = keys_ptr + (block * BLOCK_STRIDE + slot % BLOCK_SIZE * KEY)
            _rotate(
                source_ptr + RANK, target_ptr, turning, columns, others, cosine, sine, None, DTYPE
            )
            _store_latent(
                source_ptr, target_ptr + ROTARY, norm_ptr, eps, offset, NORM_DTYPE, RANK, WIDTH
            )
