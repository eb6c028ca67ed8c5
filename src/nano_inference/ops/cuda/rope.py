"""Rotary embedding of queries and keys, and storing keys and values, in one kernel.

A program owns a few heads of one row, all of them queries, keys or values. Where a norm is of
single heads it is part of that kernel; one over all heads of a row asks for a pass before, that
leaves one factor for each row.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportUnreachable=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.backend import KvcacheView, Norm
from nano_inference.ops.cuda.rows import aligned, whole_row

_MOST_HEADS = 8  # of one program
_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_NO_NORM, _ROUNDED, _HEAD, _FULL = (tl.constexpr(kind) for kind in range(4))


def rope_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    view: KvcacheView,
    layer: int,
    slot_mapping: Tensor,
    num_heads: int,
    num_kv_heads: int,
    norms: tuple[Norm, Norm] | None = None,
) -> Tensor:
    """See `Ops.rope_and_store`. A row whose slot is negative is padding: nothing of it is stored.

    Raises:
        ValueError: a norm is neither of one head nor of all heads of a row.
    """
    rows, head_dim = len(qkv), qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    out = torch.empty((rows, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not rows:
        return out
    qkv = aligned(qkv)
    q_norm = _norm_arguments(qkv, norms and norms[0], 0, num_heads, head_dim)
    k_norm = _norm_arguments(qkv, norms and norms[1], num_heads, num_kv_heads, head_dim)
    unit, place = view.storage.places[layer]
    unit_map = view.storage.unit_map
    # [kv heads, units, block_size, D]
    keys, values = view.storage.keys[place], view.storage.values[place]
    half = triton.next_power_of_2(head_dim // 2)
    group = min(triton.next_power_of_2(num_kv_heads), _MOST_HEADS)
    parts = triton.cdiv(num_heads, group) + 2 * triton.cdiv(num_kv_heads, group)
    _rope_kernel[(rows, parts)](
        qkv, aligned(cos), aligned(sin), positions.contiguous(), slot_mapping.contiguous(),
        None if unit_map is None else unit_map.units()[unit], keys, values, out, *q_norm, *k_norm,
        keys.stride(0), keys.shape[2], num_heads, num_kv_heads, head_dim, group, half,
        num_warps=min(max(group * half // 256, 1), 4), enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _norm_arguments(
    qkv: Tensor, norm: Norm | None, first: int, heads: int, head_dim: int
) -> tuple[Any, ...]:
    """(weight, factor of each row, eps, offset, kind, dtype) of one norm, as the kernel takes
    them.
    """
    if norm is None:
        return None, None, 0.0, 0.0, _NO_NORM.value, tl.float32
    rounded = _DTYPES[norm.dtype]
    if norm.weight is None:
        return None, None, norm.eps, norm.offset, _ROUNDED.value, rounded
    width, weight = len(norm.weight), aligned(norm.weight)
    if width == head_dim:
        return weight, None, norm.eps, norm.offset, _HEAD.value, rounded
    if width != heads * head_dim:
        raise ValueError(
            f"rope_and_store: a norm of {width} weights; a head has {head_dim}, all {heads} "
            f"{heads * head_dim}."
        )
    factors = torch.empty(len(qkv), dtype=torch.float32, device=qkv.device)
    _factor_kernel[(len(qkv),)](
        qkv, factors, norm.eps, qkv.shape[1], first * head_dim, width, **whole_row(width)
    )
    return weight, factors, norm.eps, norm.offset, _FULL.value, rounded


@triton.jit
def _factor_kernel(
    qkv,
    factors,
    eps,
    STRIDE: tl.constexpr,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """1 / rms of columns FIRST .. FIRST + WIDTH of each row. Programs: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x = tl.load(qkv + row * STRIDE + FIRST + columns, mask=columns < WIDTH, other=0.0).to(
        tl.float32
    )
    tl.store(factors + row, tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps))


@triton.jit
def _normed(
    first,
    second,
    row,
    places,
    inside,
    weight,
    factors,
    eps,
    offset,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
    D: tl.constexpr,
):
    """Halves of heads [heads, D / 2], float32, of unit root mean square and rounded; `places`: of
    their weights.
    """
    if weight is not None:
        if KIND == _HEAD:
            squares = tl.sum(first * first + second * second, axis=1)
            factor = tl.rsqrt(squares / D + eps)[:, None]
        else:
            factor = tl.load(factors + row)
        first = (
            first
            * factor
            * (tl.load(weight + places, mask=inside, other=0.0).to(tl.float32) + offset)
        )
        second = (
            second
            * factor
            * (tl.load(weight + places + D // 2, mask=inside, other=0.0).to(tl.float32) + offset)
        )
    if KIND != _NO_NORM:
        first, second = first.to(DTYPE).to(tl.float32), second.to(DTYPE).to(tl.float32)
    return first, second


@triton.jit
def _rope_kernel(
    qkv, cos, sin, positions, slots, units, keys, values, out,
    q_weight, q_factors, q_eps, q_offset, Q_KIND: tl.constexpr, Q_DTYPE: tl.constexpr,
    k_weight, k_factors, k_eps, k_offset, K_KIND: tl.constexpr, K_DTYPE: tl.constexpr,
    head_stride, BLOCK_SIZE: tl.constexpr, Q: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
    GROUP: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Programs: (rows, groups of queries, then of keys, then of values)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    Q_PARTS: tl.constexpr = (Q + GROUP - 1) // GROUP
    KV_PARTS: tl.constexpr = (KV + GROUP - 1) // GROUP
    is_query = part < Q_PARTS
    is_value = part >= Q_PARTS + KV_PARTS

    # Which heads, counted among those of their kind, and where the row's begin.
    first_head = (
        tl.where(is_query, part, tl.where(is_value, part - Q_PARTS - KV_PARTS, part - Q_PARTS))
        * GROUP
    )
    begin = tl.where(is_query, 0, tl.where(is_value, (Q + KV) * D, Q * D))
    heads = first_head + tl.arange(0, GROUP)
    columns = tl.arange(0, HALF)
    inside = (heads < tl.where(is_query, Q, KV))[:, None] & (columns < D // 2)[None, :]
    places = heads[:, None] * D + columns[None, :]
    source = qkv + row * ((Q + 2 * KV) * D) + begin + places
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + D // 2, mask=inside, other=0.0).to(tl.float32)

    if not is_value:
        if is_query:
            weights = (
                places if Q_KIND == _FULL else tl.broadcast_to(columns[None, :], (GROUP, HALF))
            )
            first, second = _normed(
                first,
                second,
                row,
                weights,
                inside,
                q_weight,
                q_factors,
                q_eps,
                q_offset,
                Q_KIND,
                Q_DTYPE,
                D,
            )
        else:
            weights = (
                places if K_KIND == _FULL else tl.broadcast_to(columns[None, :], (GROUP, HALF))
            )
            first, second = _normed(
                first,
                second,
                row,
                weights,
                inside,
                k_weight,
                k_factors,
                k_eps,
                k_offset,
                K_KIND,
                K_DTYPE,
                D,
            )
        angle = tl.load(positions + row) * (D // 2) + columns
        cosine = tl.load(cos + angle, mask=columns < D // 2, other=0.0)[None, :]
        sine = tl.load(sin + angle, mask=columns < D // 2, other=0.0)[None, :]
        first, second = first * cosine - second * sine, second * cosine + first * sine

    first, second = first.to(out.dtype.element_ty), second.to(out.dtype.element_ty)
    if is_query:
        target = out + row * (Q * D) + places
        tl.store(target, first, mask=inside)
        tl.store(target + D // 2, second, mask=inside)
    else:
        slot = tl.load(slots + row)
        if slot >= 0:
            block = slot // BLOCK_SIZE
            if units is not None:
                block = tl.load(units + block)
            within = (block * BLOCK_SIZE + slot % BLOCK_SIZE) * D
            cache = tl.where(is_value, values, keys)
            target = cache + (heads[:, None].to(tl.int64) * head_stride + within + columns[None, :])
            tl.store(target, first.to(keys.dtype.element_ty), mask=inside)
            tl.store(target + D // 2, second.to(keys.dtype.element_ty), mask=inside)
