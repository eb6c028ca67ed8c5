"""Operations on single rows: embedding, RMS norm with the residual stream, rotary embedding with
storage of keys and values, the MLP's gate, and updates of a step's inputs.

A program owns a row or a part of one. Its work depends only on the widths, so a row's bits do not
depend on other rows. Widths are compile-time constants: if they are divisible by eight, each thread
reads 16 bytes at a time.

A program of the rotary kernel owns a few heads of one row, either queries, keys or values. Norms of
single heads are part of that kernel. A norm over all heads of a row needs a preceding pass, which
computes one factor per row.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportUnreachable=false, reportAttributeAccessIssue=false

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.cuda.codes import PLAIN, encoded, is_finite, kind_of, scale_and_inverse
from nano_inference.ops.interface import KvcacheView, RopeArgs, embed_part
from nano_inference.ops.rowwise import Norm
from nano_inference.ops.settings import CLAMP, SLOPE

_GATE_BLOCK = 1024  # columns per program: 8 for each of 128 threads
_ITEM_BLOCK = 256  # items per program, for kernels in which an item is a number
GELU = tl.constexpr(2 * math.sqrt(2 / math.pi))
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}  # codes for `gated`
_SLOPE, _CLAMP = tl.constexpr(SLOPE), tl.constexpr(CLAMP)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)


def embed(
    input_ids: Tensor, weight: Tensor, scale: float = 1.0, part: tuple[int, int] | None = None
) -> Tensor:
    """Implement `Ops.embed` with one program per row."""
    if part is not None:
        return embed_part(embed, input_ids, weight, scale, part)
    weight, width = aligned(weight), weight.shape[1]
    out = torch.empty((len(input_ids), width), dtype=torch.float32, device=weight.device)
    if len(input_ids):
        _embed_kernel[(len(input_ids),)](
            input_ids.contiguous(), weight, out, scale, width, **whole_row(width)
        )
    return out


def rms_norm(
    x: Tensor | None, residual: Tensor, norm: Norm, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Implement `Ops.rms_norm`. The returned residual is a new tensor, or the old one if nothing is
    added.

    Raises:
        ValueError: The rows are wider than one program supports (65,536 numbers).
    """
    rows, width = residual.shape
    if width > 65_536:
        raise ValueError(f"rms_norm: rows must have at most 65,536 numbers; got {width:,}.")
    residual, x = aligned(residual), None if x is None else aligned(x)
    normed = torch.empty((rows, width), dtype=norm.dtype, device=residual.device)
    added = (
        residual
        if x is None
        else torch.empty((rows, width), dtype=torch.float32, device=residual.device)
    )
    if rows:
        weight = None if norm.weight is None else aligned(norm.weight)
        _rms_norm_kernel[(rows,)](
            x,
            residual,
            weight,
            normed,
            added,
            scale,
            norm.eps,
            norm.offset,
            width,
            **whole_row(width),
        )
    return normed, added


def normed_rows(x: Tensor, norm: Norm) -> Tensor:
    """Implement `Ops.normed_rows`, whose sums have the order of `rms_norm`."""
    return rms_norm(None, x.reshape(-1, x.shape[-1]), norm)[0].view(x.shape)


def gate(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """Implement `Ops.gate` with programs of 1,024 columns."""
    rows, inner = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        gate_kernel[(rows, triton.cdiv(inner, _GATE_BLOCK))](
            aligned(gate_up),
            out,
            inner,
            ACTIVATIONS[activation],
            _GATE_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


def relay_tokens(input_ids: Tensor, sources: Tensor, tokens: Tensor) -> None:
    """Fill in tokens that the previous step has drawn: input_ids[i] = tokens[sources[i]] if
    sources[i] >= 0, in place.

    Args:
        input_ids: int64 [N].
        sources: int64 [N], -1 if the host knew the token.
        tokens: int64 [R], of the previous step.
    """
    _each_item(_relay_kernel, len(input_ids), input_ids, sources, tokens)


def make_noise_keys(streams: Tensor, positions: Tensor, keys: Tensor) -> None:
    """Compute `sampling.noise.stream_keys` on the device, in place.

    Args:
        streams: int64 [R], the bits of uint64.
        positions: int64 [R].
        keys: int64 [R, 2], filled.
    """
    _each_item(_noise_keys_kernel, len(streams), streams, positions, keys)


def _each_item(kernel: Any, count: int, *tensors: Tensor) -> None:
    if count:
        grid = (triton.cdiv(count, _ITEM_BLOCK),)
        kernel[grid](*tensors, count, _ITEM_BLOCK, num_warps=4, enable_fp_fusion=False)


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous and at an address divisible by 16. For other tensors, Triton
    would compile different code, which may add up in another order.
    """
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def whole_row(width: int) -> dict[str, Any]:
    """Return launch options for a kernel whose program holds a row: 8 columns per thread, more for
    wide rows.
    """
    block = triton.next_power_of_2(width)
    return {
        "BLOCK": block,
        "num_warps": min(max(block // 256, 1), 32 if block > 16_384 else 16),
        "enable_fp_fusion": False,
    }


def overlapping(overlaps: bool) -> dict[str, bool]:
    """Return launch options of a kernel that starts while its predecessor runs (programmatic
    dependent launch), or none.

    Such a kernel lets its successor start at once. Each of its programs calls `gdc_wait` before it
    reads the output of another kernel, and before it writes. A kernel that has ended has
    therefore seen the end of all kernels before it, and only the newest must be waited for.
    """
    return {"launch_pdl": True} if overlaps else {}


# Kernels. Programs of the first three: (rows, parts of a row).


@triton.jit
def _embed_kernel(ids, weight, out, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    token = tl.load(ids + row)
    values = tl.load(weight + token * WIDTH + columns, mask=columns < WIDTH).to(tl.float32)
    tl.store(out + row * WIDTH + columns, values * scale, mask=columns < WIDTH)


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, normed, added, scale, eps, offset, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * WIDTH
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    row = tl.load(residual + start + columns, mask=inside, other=0.0).to(tl.float32)
    if x is not None:
        row += tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32) * scale
        tl.store(added + start + columns, row, mask=inside)
    row = normed_row(row, weight, columns, inside, eps, offset, WIDTH)
    tl.store(normed + start + columns, row.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def normed_row(row, weight, columns, inside, eps, offset, WIDTH: tl.constexpr):
    """Return the norm of a row, or the row if there is no weight."""
    if weight is not None:
        factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + offset
        row = row * tl.rsqrt(tl.sum(row * row, axis=0) / WIDTH + eps) * factor
    return row


@triton.jit
def gated(first, second, ACTIVATION: tl.constexpr):
    """Return activation(first) * second, float32. All activations are x * sigmoid(y): SiLU, GELU
    with tanh (arXiv:1606.08415), and that of gpt-oss, which clamps both sides.
    """
    if ACTIVATION == 2:
        first = tl.minimum(first, _CLAMP, propagate_nan=tl.PropagateNan.ALL)
        second = tl.minimum(second, _CLAMP, propagate_nan=tl.PropagateNan.ALL)
        second = tl.maximum(second, -_CLAMP, propagate_nan=tl.PropagateNan.ALL) + 1.0
    y = first
    if ACTIVATION == 2:
        y = _SLOPE * first
    if ACTIVATION == 1:
        y = GELU * (first + 0.044715 * first * first * first)
    small = tl.exp(-tl.abs(y))  # the argument is at most 0: no overflow
    return first * (tl.where(y >= 0, 1.0, small) / (1 + small)) * second


@triton.jit
def gate_kernel(gate_up, out, INNER: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < INNER
    first = tl.load(gate_up + row * (2 * INNER) + columns, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(gate_up + row * (2 * INNER) + INNER + columns, mask=inside, other=0.0).to(
        tl.float32
    )
    tl.store(
        out + row * INNER + columns,
        gated(first, second, ACTIVATION).to(out.dtype.element_ty),
        mask=inside,
    )


@triton.jit(do_not_specialize=["count"])
def _relay_kernel(input_ids, sources, tokens, count, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources + rows, mask=rows < count, other=-1)
    tl.store(
        input_ids + rows, tl.load(tokens + source, mask=source >= 0, other=0), mask=source >= 0
    )


@triton.jit(do_not_specialize=["count"])
def _noise_keys_kernel(streams, positions, keys, count, BLOCK: tl.constexpr):
    """Compute SplitMix64 (Steele, Lea, Flood 2014) of stream ^ position, in halves."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < count
    stream = tl.load(streams + rows, mask=inside, other=0)
    state = (stream ^ tl.load(positions + rows, mask=inside, other=0)).to(
        tl.uint64, bitcast=True
    ) + _GOLDEN
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state = state ^ (state >> 31)
    tl.store(keys + 2 * rows, (state & 0xFFFFFFFF).to(tl.int64), mask=inside)
    tl.store(keys + 2 * rows + 1, (state >> 32).to(tl.int64), mask=inside)


_MOST_HEADS = 8  # heads per program
DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_NO_NORM, _ROUNDED, _HEAD, _FULL = (tl.constexpr(kind) for kind in range(4))


def rope_and_store(
    qkv: Tensor,
    rope: RopeArgs,
    positions: Tensor,
    slot_mapping: Tensor,
    view: KvcacheView,
    layer: int,
    *,
    overlaps: bool = False,
) -> Tensor:
    """Implement `Ops.rope_and_store`. A row with a negative slot is padding, and none of it is
    stored. With `overlaps`, the kernel starts while its predecessor runs (sm_90 and later).

    Raises:
        ValueError: A norm's width is neither that of one head nor of all heads of a row.
    """
    num_heads, num_kv_heads = rope.num_heads, rope.num_kv_heads
    of_keys = num_heads if rope.joint else num_heads + num_kv_heads  # first head of the values
    rows, head_dim = len(qkv), qkv.shape[1] // (of_keys + num_kv_heads)
    # qkv of a quantized weight is float32
    out = torch.empty((rows, num_heads, head_dim), dtype=view.format.dtype, device=qkv.device)
    if not rows:
        return out
    qkv = aligned(qkv)
    q_norm = norm_arguments(qkv, rope.norms.queries, 0, num_heads, head_dim)
    k_norm = norm_arguments(qkv, rope.norms.keys, num_heads, num_kv_heads, head_dim)
    v_norm = norm_arguments(qkv, rope.norms.values, of_keys, num_kv_heads, head_dim)
    keys, values = view.lie(layer)  # [kv heads, units, block_size, row width]
    key_scales, value_scales = scales_within(keys, view), scales_within(values, view)
    half = triton.next_power_of_2(head_dim // 2)
    group = min(triton.next_power_of_2(num_kv_heads or num_heads), _MOST_HEADS)
    kinds = 1 if view.values is view.keys else 2  # latents are stored once
    parts = triton.cdiv(num_heads, group) + kinds * triton.cdiv(num_kv_heads, group)
    _rope_kernel[(rows, parts)](
        qkv, aligned(rope.cos), aligned(rope.sin), positions.contiguous(),
        slot_mapping.contiguous(), units_of(view, layer), keys, values, key_scales,
        value_scales, out, rope.query_scales,
        *q_norm, *k_norm, *v_norm, keys.stride(0), keys.shape[2], keys.stride(1), num_heads,
        num_kv_heads, rope.joint, head_dim, rope.cos.shape[1], rope.interleaved, group, half,
        kind_of(view.format.codes), overlaps,
        num_warps=min(max(group * half // 256, 1), 4), enable_fp_fusion=False,
        **overlapping(overlaps),
    )  # fmt: skip
    return out


def units_of(view: KvcacheView, layer: int) -> Tensor | None:
    """Return the units [blocks] that hold a layer's keys, or None if block ids are unit ids."""
    unit_map = view.unit_map
    return None if unit_map is None else unit_map.units()[view.places[layer][0]]


def scales_within(cache: Tensor, view: KvcacheView) -> Tensor | None:
    """Return the float32 view of a layer's keys or values that holds the scales of codes, or None
    for plain numbers.
    """
    return cache.view(torch.float32) if view.format.coded else None


def norm_arguments(
    qkv: Tensor, norm: Norm | None, first: int, heads: int, head_dim: int
) -> tuple[Any, ...]:
    """Return (weight, factor of each row, eps, offset, kind, dtype) of one norm for the kernel."""
    if norm is None:
        return None, None, 0.0, 0.0, _NO_NORM.value, tl.float32
    rounded = DTYPES[norm.dtype]
    if norm.weight is None:
        return None, None, norm.eps, norm.offset, _ROUNDED.value, rounded
    width, weight = len(norm.weight), aligned(norm.weight)
    if width == head_dim:
        return weight, None, norm.eps, norm.offset, _HEAD.value, rounded
    if width != heads * head_dim:
        raise ValueError(
            f"rope_and_store: a norm of {width} weights; expected {head_dim} for one head or "
            f"{heads * head_dim} for all {heads} heads."
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
    """Compute 1 / rms of columns FIRST .. FIRST + WIDTH of each row. Programs: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x = tl.load(qkv + row * STRIDE + FIRST + columns, mask=columns < WIDTH, other=0.0).to(
        tl.float32
    )
    tl.store(factors + row, tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps))


@triton.jit
def normed_heads(
    first, second, row, heads, columns, others, inside, weight, factors, eps, offset,
    KIND: tl.constexpr, DTYPE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Norm and round heads, given as the first and second numbers of all pairs: float32 [heads,
    D / 2] each.
    """
    if weight is not None:
        if KIND == _HEAD:
            begin = tl.zeros_like(heads)
            squares = tl.sum(first * first + second * second, axis=1)
            factor = tl.rsqrt(squares / D + eps)[:, None]
        else:
            begin = heads * D
            factor = tl.load(factors + row)
        places = begin[:, None] + columns[None, :]
        scale = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32) + offset
        first = first * factor * scale
        places = begin[:, None] + others[None, :]
        scale = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32) + offset
        second = second * factor * scale
    if KIND != _NO_NORM:
        first, second = first.to(DTYPE).to(tl.float32), second.to(DTYPE).to(tl.float32)
    return first, second


@triton.jit
def places_of_pairs(pairs, D: tl.constexpr, TURNING: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the places in a head of the first and second numbers of pairs. The first TURNING pairs
    rotate; the remaining numbers are processed in twos as well.
    """
    if INTERLEAVED:
        columns, others = 2 * pairs, 2 * pairs + 1
    else:
        columns, others = pairs, pairs + TURNING
    turning = pairs < TURNING
    return tl.where(turning, columns, pairs + TURNING), tl.where(turning, others, pairs + D // 2)


@triton.jit
def _rope_kernel(
    qkv, cos, sin, positions, slots, units, keys, values, key_scales, value_scales, out,
    query_scales, q_weight, q_factors, q_eps, q_offset, Q_KIND: tl.constexpr, Q_DTYPE: tl.constexpr,
    k_weight, k_factors, k_eps, k_offset, K_KIND: tl.constexpr, K_DTYPE: tl.constexpr,
    v_weight, v_factors, v_eps, v_offset, V_KIND: tl.constexpr, V_DTYPE: tl.constexpr,
    head_stride, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, Q: tl.constexpr,
    KV: tl.constexpr, JOINT: tl.constexpr, D: tl.constexpr, TURNING: tl.constexpr,
    INTERLEAVED: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, CODES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Rotate and store some heads of a row. Programs: (rows, groups of queries, then of keys, then
    of values). If JOINT, the values are made of the keys' numbers.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    Q_PARTS: tl.constexpr = (Q + GROUP - 1) // GROUP
    KV_PARTS: tl.constexpr = (KV + GROUP - 1) // GROUP
    OF_VALUES: tl.constexpr = Q if JOINT else Q + KV  # their first head
    is_query = part < Q_PARTS
    is_value = part >= Q_PARTS + KV_PARTS

    # Heads of this program, counted within their kind, and the first column of the kind.
    first_head = (
        tl.where(is_query, part, tl.where(is_value, part - Q_PARTS - KV_PARTS, part - Q_PARTS))
        * GROUP
    )
    begin = tl.where(is_query, 0, tl.where(is_value, OF_VALUES * D, Q * D))
    heads = first_head + tl.arange(0, GROUP)
    pairs = tl.arange(0, HALF)
    turning = pairs < TURNING
    inside = (heads < tl.where(is_query, Q, KV))[:, None] & (pairs < D // 2)[None, :]
    columns, others = places_of_pairs(pairs, D, TURNING, INTERLEAVED)
    source = qkv + row * ((OF_VALUES + KV) * D) + begin + heads[:, None] * D
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
        turned = first * cosine - second * sine, second * cosine + first * sine
        first = tl.where(turning[None, :], turned[0], first)
        second = tl.where(turning[None, :], turned[1], second)
        if query_scales is not None:  # noqa: SIM102 (known at compile time)
            if is_query:
                scale = tl.load(query_scales + position)
                first, second = first * scale, second * scale
    elif V_KIND != _NO_NORM:
        first, second = normed_heads(
            first, second, row, heads, columns, others, inside,
            v_weight, v_factors, v_eps, v_offset, V_KIND, V_DTYPE, D,
        )  # fmt: skip

    first, second = first.to(out.dtype.element_ty), second.to(out.dtype.element_ty)
    if is_query:
        target = out + row * (Q * D) + heads[:, None] * D
        tl.store(target + columns[None, :], first, mask=inside)
        tl.store(target + others[None, :], second, mask=inside)
    else:
        slot = tl.load(slots + row)
        if slot >= 0:
            block = slot // BLOCK_SIZE
            if units is not None:
                block = tl.load(units + block)
            _store_heads(
                first, second, keys, values, key_scales, value_scales, is_value, heads,
                head_stride, block * BLOCK_STRIDE, slot % BLOCK_SIZE, columns, others, inside,
                BLOCK_SIZE, KV, D, CODES,
            )  # fmt: skip


@triton.jit
def _store_heads(
    first, second, keys, values, key_scales, value_scales, is_value, heads,
    head_stride, block_start, token, columns, others, inside,
    BLOCK_SIZE: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Store heads of a row, as numbers or as codes with a scale a head (`ops/kv_codes.py`)."""
    cache = tl.where(is_value, values, keys)
    starts = heads[:, None].to(tl.int64) * head_stride
    if CODES == PLAIN:
        target = cache + (starts + (block_start + token * D))
        tl.store(target + columns[None, :], first.to(cache.dtype.element_ty), mask=inside)
        tl.store(target + others[None, :], second.to(cache.dtype.element_ty), mask=inside)
    else:
        one, other = first.to(tl.float32), second.to(tl.float32)
        finite = tl.min(tl.minimum(is_finite(one), is_finite(other)), axis=1)
        largest = tl.max(tl.maximum(tl.abs(one), tl.abs(other)), axis=1)
        scale, inverse = scale_and_inverse(largest, finite, CODES)
        target = cache + (starts + (block_start + token * D))
        inverse, finite = inverse[:, None], finite[:, None]
        tl.store(target + columns[None, :], encoded(one, inverse, finite, CODES), mask=inside)
        tl.store(target + others[None, :], encoded(other, inverse, finite, CODES), mask=inside)
        at = heads.to(tl.int64) * (head_stride // 4) + (block_start + BLOCK_SIZE * D) // 4 + token
        tl.store(tl.where(is_value, value_scales, key_scales) + at, scale, mask=heads < KV)
