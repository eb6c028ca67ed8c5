"""The backward pass between products: norms, rotations, gates, and sums over rows.

Sums over rows are trees that depend only on the number and the width of the rows. No kernel adds
with atomics: a program owns its results.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportUnreachable=false, reportAttributeAccessIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.cuda.rows import (
    ACTIVATIONS,
    GELU,
    aligned,
    gate_kernel,
    norm_arguments,
    normed_heads,
    places_of_pairs,
)
from nano_inference.ops.gradients import HeadShape, Rotary, Rotated
from nano_inference.ops.rowwise import Norm
from nano_inference.ops.settings import CLAMP, SLOPE

_NUMBERS = 4096  # numbers of runs that a program norms together, or one run
_STEPS = 4  # such groups, one after another, whose weight gradients a program adds up
_ROWS, _COLUMNS = 32, 64  # tile of a sum over rows
_GATE_BLOCK = 1024
_ADD_BLOCK = 512
_MOST_HEADS = 8  # heads per program
_SLOPE, _CLAMP = tl.constexpr(SLOPE), tl.constexpr(CLAMP)


def norm_gradient(
    x: Tensor,
    norm: Norm,
    d_out: Tensor,
    d_x: Tensor,
    d_weight: Tensor | None,
    *,
    adds: bool = False,
    scale: float = 1.0,
) -> None:
    """Implement `GradientOps.norm_gradient`. A program owns some runs and adds up their part of the
    weight's gradient; a second kernel adds the parts.

    Raises:
        ValueError: The runs do not fit, or are wider than one program supports (65,536 numbers).
    """
    assert norm.weight is not None
    size = len(norm.weight)
    rows, width = x.shape
    if d_out.stride(0) != d_x.stride(0) or x.shape != d_out.shape or width % size or size > 65_536:
        raise ValueError(
            f"a norm of {size} numbers does not fit inputs {tuple(x.shape)} with gradients "
            f"{tuple(d_out.shape)}."
        )
    if not rows:
        return
    runs, block = width // size, triton.next_power_of_2(size)
    together = max(1, _NUMBERS // block)
    programs = triton.cdiv(rows * runs, together * _STEPS)
    parts = None
    if d_weight is not None:
        parts = torch.empty((programs, size), dtype=torch.float32, device=x.device)
    _norm_gradient_kernel[(programs,)](
        x,
        d_out,
        d_x,
        aligned(norm.weight),
        parts,
        x.stride(0),
        d_out.stride(0),
        rows * runs,
        scale,
        norm.eps,
        norm.offset,
        runs,
        size,
        block,
        together,
        _STEPS,
        adds,
        num_warps=min(max(together * block // 512, 1), 16),
        enable_fp_fusion=False,
    )
    if parts is not None:
        assert d_weight is not None
        add_columns(parts, d_weight)


def add_columns(rows: Tensor, total: Tensor) -> None:
    """Implement `GradientOps.add_columns`. A program owns 64 columns. It adds 32 rows at a time by
    a tree, and these sums in order.
    """
    num_rows, columns = rows.shape
    if num_rows:
        _add_columns_kernel[(triton.cdiv(columns, _COLUMNS),)](
            aligned(rows), total, num_rows, columns, _ROWS, _COLUMNS,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def add_rows(rows: Tensor, ids: Tensor, total: Tensor, scale: float = 1.0) -> None:
    """Implement `GradientOps.add_rows`. Rows are sorted by id, stably. The program of an id's first
    row adds all of its rows in order; the others end at once. Ids are not checked: that would wait
    for the device.
    """
    num_rows, width = rows.shape
    if not num_rows:
        return
    order = torch.argsort(ids, stable=True)
    _add_rows_kernel[(num_rows, triton.cdiv(width, _ADD_BLOCK))](
        aligned(rows), order, ids[order], total, scale, num_rows, width, _ADD_BLOCK,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def gate_rows(x: Tensor, activation: str, dtype: torch.dtype) -> Tensor:
    """Implement `GradientOps.gate` with programs of 1,024 columns."""
    rows, inner = len(x), x.shape[1] // 2
    out = torch.empty((rows, inner), dtype=dtype, device=x.device)
    if rows:
        gate_kernel[(rows, triton.cdiv(inner, _GATE_BLOCK))](
            aligned(x), out, inner, ACTIVATIONS[activation], _GATE_BLOCK,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def gate_gradient(x: Tensor, activation: str, d_out: Tensor) -> Tensor:
    """Implement `GradientOps.gate_gradient` with programs of 1,024 columns."""
    rows, inner = d_out.shape
    d_x = torch.empty((rows, 2 * inner), dtype=torch.float32, device=x.device)
    if rows:
        _gate_gradient_kernel[(rows, triton.cdiv(inner, _GATE_BLOCK))](
            aligned(x), aligned(d_out), d_x, inner, ACTIVATIONS[activation], _GATE_BLOCK,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return d_x


def rotated(
    rows: Tensor,
    shape: HeadShape,
    rotary: Rotary,
    norms: tuple[Norm | None, Norm | None],
    dtype: torch.dtype,
) -> Rotated:
    """Implement `GradientOps.rotate` with programs of up to 8 heads."""
    rows = aligned(rows)
    widths = (count * shape.head_dim for count in (shape.heads, shape.kv_heads, shape.kv_heads))
    made = (torch.empty((len(rows), width), dtype=dtype, device=rows.device) for width in widths)
    parts = Rotated(*made)
    _rotate(rows, parts, shape, rotary, norms, back=False)
    return parts


def rotation_gradient(parts: Rotated, shape: HeadShape, rotary: Rotary) -> Tensor:
    """Implement `GradientOps.rotate_gradient`: the rotation by the negative angle."""
    like = parts.queries
    rows = torch.empty((len(like), shape.columns), dtype=torch.float32, device=like.device)
    _rotate(rows, Rotated(*map(aligned, parts)), shape, rotary, (None, None), back=True)
    return rows


def _rotate(
    rows: Tensor,
    parts: Rotated,
    shape: HeadShape,
    rotary: Rotary,
    norms: tuple[Norm | None, Norm | None],
    *,
    back: bool,
) -> None:
    heads, kv_heads, size = shape
    if rows.shape[1] != shape.columns:
        raise ValueError(f"rows of {rows.shape[1]} numbers do not hold {shape}.")
    if not len(rows):
        return
    half = triton.next_power_of_2(size // 2)
    group = min(triton.next_power_of_2(kv_heads), _MOST_HEADS)
    programs = triton.cdiv(heads, group) + 2 * triton.cdiv(kv_heads, group)
    _rotate_kernel[(len(rows), programs)](
        rows, *parts, aligned(rotary.cos), aligned(rotary.sin), rotary.query_scales,
        rotary.positions,
        *norm_arguments(rows, norms[0], 0, heads, size),
        *norm_arguments(rows, norms[1], heads, kv_heads, size),
        heads, kv_heads, size, rotary.cos.shape[1], rotary.interleaved, group, half, back,
        num_warps=min(max(group * half // 256, 1), 4), enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _norm_gradient_kernel(
    x_ptr, d_out_ptr, d_x_ptr, weight_ptr, parts_ptr, x_stride, d_stride, count, scale, eps, offset,
    RUNS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr,
    STEPS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Differentiate some runs: r * (g - x * r^2 * mean(g * x)), where g = d_out * weight and r is
    1 / rms. Programs: (parts,).
    """
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < SIZE
    factor = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32) + offset
    part = tl.zeros((1, BLOCK), tl.float32)
    for step in range(STEPS):
        first = (tl.program_id(0).to(tl.int64) * STEPS + step) * TOGETHER
        run = first + tl.arange(0, TOGETHER)[:, None]
        mask = (run < count) & inside
        row, column = run // RUNS, run % RUNS * SIZE + columns
        x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0)
        at = row * d_stride + column
        d_out = tl.load(d_out_ptr + at, mask=mask, other=0.0) * scale
        root = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)[:, None]
        if parts_ptr is not None:
            part += tl.sum(d_out * (x * root), axis=0)[None, :]
        g = d_out * factor
        share = tl.sum(g * x, axis=1)[:, None] * root * root / SIZE
        d_x = root * (g - x * share)
        if ADDS:
            d_x += tl.load(d_x_ptr + at, mask=mask, other=0.0)
        tl.store(d_x_ptr + at, d_x, mask=mask)
    if parts_ptr is not None:
        tl.store(parts_ptr + tl.program_id(0).to(tl.int64) * SIZE + columns, part, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _add_columns_kernel(
    rows_ptr, total_ptr, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Add rows to 64 columns of the total. Programs: (blocks of columns,)."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    sums = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, num_rows, ROWS):
        rows = first + tl.arange(0, ROWS)
        mask = (rows < num_rows)[:, None] & inside[None, :]
        at = rows.to(tl.int64)[:, None] * width + columns[None, :]
        sums += tl.sum(tl.load(rows_ptr + at, mask=mask, other=0.0), axis=0)
    before = tl.load(total_ptr + columns, mask=inside, other=0.0)
    tl.store(total_ptr + columns, before + sums, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _add_rows_kernel(
    rows_ptr, order_ptr, ids_ptr, total_ptr, scale, num_rows, width, BLOCK: tl.constexpr
):
    """Add the rows of one id, of which this is the first. Programs: (rows, blocks of columns)."""
    first = tl.program_id(0)
    own_id = tl.load(ids_ptr + first)
    if tl.load(ids_ptr + first - 1, mask=first > 0, other=-1) == own_id:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total_ptrs = total_ptr + own_id * width + columns
    total = tl.load(total_ptrs, mask=inside, other=0.0)
    at = first
    while tl.load(ids_ptr + at, mask=at < num_rows, other=-1) == own_id:
        row = tl.load(order_ptr + at)
        values = tl.load(rows_ptr + row * width + columns, mask=inside, other=0.0)
        total = tl.fma(values, scale, total)
        at += 1
    tl.store(total_ptrs, total, mask=inside)


@triton.jit
def _gate_gradient_kernel(
    x_ptr, d_out_ptr, d_x_ptr, INNER: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    """Differentiate x * sigmoid(y(x)) * up, as `gated` defines y. Programs: (rows, blocks)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < INNER
    at = row * (2 * INNER) + columns
    first = tl.load(x_ptr + at, mask=inside, other=0.0)
    second = tl.load(x_ptr + at + INNER, mask=inside, other=0.0)
    d_out = tl.load(d_out_ptr + row * INNER + columns, mask=inside, other=0.0)
    y, slope = first, 1.0
    first_moves, second_moves = 1.0, 1.0
    if ACTIVATION == 1:
        y = GELU * (first + 0.044715 * first * first * first)
        slope = GELU * (1.0 + 0.134145 * first * first)
    if ACTIVATION == 2:
        first_moves = tl.where(first > _CLAMP, 0.0, 1.0)
        second_moves = tl.where((second > _CLAMP) | (second < -_CLAMP), 0.0, 1.0)
        first = tl.minimum(first, _CLAMP, propagate_nan=tl.PropagateNan.ALL)
        second = tl.minimum(second, _CLAMP, propagate_nan=tl.PropagateNan.ALL)
        second = tl.maximum(second, -_CLAMP, propagate_nan=tl.PropagateNan.ALL) + 1.0
        y, slope = first * _SLOPE, _SLOPE
    small = tl.exp(-tl.abs(y))  # the argument is at most 0: no overflow
    larger, smaller = 1 / (1 + small), small / (1 + small)
    sigmoid, other = tl.where(y >= 0, larger, smaller), tl.where(y >= 0, smaller, larger)
    rise = first * sigmoid * other * slope + sigmoid
    tl.store(d_x_ptr + at, d_out * second * rise * first_moves, mask=inside)
    tl.store(d_x_ptr + at + INNER, d_out * (first * sigmoid) * second_moves, mask=inside)


@triton.jit
def _rotate_kernel(
    rows_ptr, queries_ptr, keys_ptr, values_ptr, cos, sin, query_scales, positions,
    q_weight, q_factors, q_eps, q_offset, Q_KIND: tl.constexpr, Q_DTYPE: tl.constexpr,
    k_weight, k_factors, k_eps, k_offset, K_KIND: tl.constexpr, K_DTYPE: tl.constexpr,
    Q: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, TURNING: tl.constexpr,
    INTERLEAVED: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Norm and rotate some heads of a row, or turn their gradients back. Programs: (rows, groups of
    queries, then of keys, then of values).
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    Q_PARTS: tl.constexpr = (Q + GROUP - 1) // GROUP
    KV_PARTS: tl.constexpr = (KV + GROUP - 1) // GROUP
    is_query = part < Q_PARTS
    is_value = part >= Q_PARTS + KV_PARTS
    first_head = tl.where(is_query, part, (part - Q_PARTS) % KV_PARTS) * GROUP
    heads = first_head + tl.arange(0, GROUP)
    pairs = tl.arange(0, HALF)
    columns, others = places_of_pairs(pairs, D, TURNING, INTERLEAVED)
    turning = pairs < TURNING
    inside = (heads < tl.where(is_query, Q, KV))[:, None] & (pairs < D // 2)[None, :]
    begin = tl.where(is_query, 0, tl.where(is_value, (Q + KV) * D, Q * D))
    joint = rows_ptr + row * ((Q + 2 * KV) * D) + begin + heads[:, None] * D
    chosen = tl.where(is_query, queries_ptr, tl.where(is_value, values_ptr, keys_ptr))
    apart = chosen + row * (tl.where(is_query, Q, KV) * D) + heads[:, None] * D
    if BACK:
        source, target = apart, joint
    else:
        source, target = joint, apart
    first = tl.load(source + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + others[None, :], mask=inside, other=0.0).to(tl.float32)
    if not is_value:
        if is_query:
            first, second = normed_heads(
                first, second, row, heads, columns, others, inside,
                q_weight, q_factors, q_eps, q_offset, Q_KIND, Q_DTYPE, D,
            )  # fmt: skip
        else:
            first, second = normed_heads(
                first, second, row, heads, columns, others, inside,
                k_weight, k_factors, k_eps, k_offset, K_KIND, K_DTYPE, D,
            )  # fmt: skip
        position = tl.load(positions + row)
        angle = position * TURNING + pairs
        cosine = tl.load(cos + angle, mask=turning, other=1.0)[None, :]
        sine = tl.load(sin + angle, mask=turning, other=0.0)[None, :]
        if BACK:
            sine = -sine
        turned = first * cosine - second * sine, second * cosine + first * sine
        first = tl.where(turning[None, :], turned[0], first)
        second = tl.where(turning[None, :], turned[1], second)
        if query_scales is not None:  # noqa: SIM102 (known at compile time)
            if is_query:
                scale = tl.load(query_scales + position)
                first, second = first * scale, second * scale
    tl.store(target + columns[None, :], first.to(target.dtype.element_ty), mask=inside)
    tl.store(target + others[None, :], second.to(target.dtype.element_ty), mask=inside)
