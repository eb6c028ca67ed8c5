"""Row by row: embedding, RMS norm with the residual stream, the MLP's gate, and what a step's
inputs become.

A program owns a row or a part of one; what it does depends on the widths alone, so a row's bits
know nothing of the others. Widths are constants of the kernels: whatever is divisible by eight is
read 16 bytes a thread.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportUnreachable=false

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.backend import Norm, embed_part

_GATE_BLOCK = 1024  # columns of one program: 8 for each of 128 threads
_ITEM_BLOCK = 256  # items of one program where an item is a number
_GELU = tl.constexpr(2 * math.sqrt(2 / math.pi))
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)


def embed(
    input_ids: Tensor, weight: Tensor, scale: float = 1.0, part: tuple[int, int] | None = None
) -> Tensor:
    """See `Ops.embed`."""
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
    """See `Ops.rms_norm`. The residual that is returned is a new tensor, or the old one where
    nothing is added.

    Raises:
        ValueError: the rows are wider than one program holds (65,536 numbers).
    """
    rows, width = residual.shape
    if width > 65_536:
        raise ValueError(f"rms_norm: rows of {width:,} numbers; one program holds at most 65,536.")
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


def gate(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """See `Ops.gate`."""
    rows, inner = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _gate_kernel[(rows, triton.cdiv(inner, _GATE_BLOCK))](
            aligned(gate_up),
            out,
            inner,
            activation == "silu",
            _GATE_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


def relay_tokens(input_ids: Tensor, sources: Tensor, tokens: Tensor) -> None:
    """Rows whose token the step before has drawn: input_ids[i] = tokens[sources[i]] where
    sources[i] >= 0, in place.

    Args:
        input_ids: int64 [N].
        sources: int64 [N], -1 where the host knew the token.
        tokens: int64 [R], of the step before.
    """
    _each_item(_relay_kernel, len(input_ids), input_ids, sources, tokens)


def make_noise_keys(streams: Tensor, positions: Tensor, keys: Tensor) -> None:
    """`sampling.noise.stream_keys` on the device, in place.

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
    """The tensor without gaps, at an address divisible by 16: Triton makes other code, with other
    sums, of others.
    """
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def whole_row(width: int) -> dict[str, Any]:
    """How a kernel is launched whose program holds a row: 8 columns a thread, more where rows are
    wide.
    """
    block = triton.next_power_of_2(width)
    return {
        "BLOCK": block,
        "num_warps": min(max(block // 256, 1), 32 if block > 16_384 else 16),
        "enable_fp_fusion": False,
    }


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
    if weight is not None:
        factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + offset
        row = row * tl.rsqrt(tl.sum(row * row, axis=0) / WIDTH + eps) * factor
    tl.store(normed + start + columns, row.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def gated(first, second, SILU: tl.constexpr):
    """Activation(first) * second, float32: SiLU, or GELU with tanh, which is x * sigmoid(y) too
    (arXiv:1606.08415).
    """
    y = first
    if not SILU:
        y = _GELU * (first + 0.044715 * first * first * first)
    small = tl.exp(-tl.abs(y))  # of what is not above 0: nothing overflows
    return first * (tl.where(y >= 0, 1.0, small) / (1 + small)) * second


@triton.jit
def _gate_kernel(gate_up, out, INNER: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < INNER
    first = tl.load(gate_up + row * (2 * INNER) + columns, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(gate_up + row * (2 * INNER) + INNER + columns, mask=inside, other=0.0).to(
        tl.float32
    )
    tl.store(
        out + row * INNER + columns,
        gated(first, second, SILU).to(out.dtype.element_ty),
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
    """SplitMix64 (Steele, Lea, Flood 2014) of stream ^ position, in halves."""
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
