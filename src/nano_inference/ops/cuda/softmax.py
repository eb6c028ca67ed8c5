"""Softmax over a vocabulary in blocks at fixed positions, shared by the kernels of the draw.

One program reduces each block of a row to its maximum and its sum of exp((logit - maximum) /
temperature). The blocks are merged in order. Their number depends only on the vocabulary, so no bit
depends on the batch.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.cuda.rows import aligned

BLOCK = 2048  # tokens per block: 4 loads of 16 bytes for each of 128 threads
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(1.1754943508222875e-38)  # the bounds of `pipeline.divide`
HIGHEST = tl.constexpr(3.4028234663852886e38)
# 2**126: its reciprocal is not denormal, otherwise -inf would become NaN
LARGEST_DIVISOR = tl.constexpr(8.507059173023462e37)


def num_blocks(vocab: int) -> int:
    """Return the number of blocks per row."""
    return triton.cdiv(vocab, BLOCK)


def as_rows(logits: Tensor) -> Tensor:
    """Return logits in the layout that the kernels read: contiguous rows at an address that is a
    multiple of 16 bytes.

    The compiled code, and with it the order of additions, depends on the alignment of the address.

    Raises:
        ValueError: The logits are not float32 [L, V].
    """
    if logits.dtype != torch.float32 or logits.dim() != 2:
        raise ValueError(f"logits must be float32 [L, V]; got {logits.dtype} {list(logits.shape)}.")
    return aligned(logits)


@triton.jit
def divisor_of(temperature):
    """Return the temperature in float32, and a flag for greedy samples, which divide by 1, as in
    `pipeline.divide`.
    """
    greedy = temperature == 0
    wide = tl.where(greedy, 1.0, temperature.to(tl.float64))
    return tl.minimum(tl.maximum(wide, LOWEST), HIGHEST).to(tl.float32), greedy


@triton.jit
def slope_of(divisor):
    """Return the factor that turns a logit's distance into a power of 2."""
    return tl.div_rn(1.0, tl.minimum(divisor, LARGEST_DIVISOR)) * LOG2_E


@triton.jit
def finite_or_zero(highest):
    """Return a maximum that can be subtracted from logits, also if all of them are -inf."""
    return tl.where(highest == -float("inf"), 0.0, highest)


@triton.jit
def block_odds(x, slope):
    """Return the maximum of a block of logits, and exp((logit - maximum) / temperature)."""
    highest = tl.max(x, axis=0)
    return highest, tl.exp2((x - finite_or_zero(highest)) * slope)


@triton.jit
def merge_blocks(maxima, sums, slope):
    """Return the row's maximum, the factor of each block's odds, and the sum over the row.

    The sum is a number above 0 unless the row contains NaN or +inf, or only -inf.
    """
    highest = tl.max(maxima, axis=0)
    factors = tl.exp2((maxima - finite_or_zero(highest)) * slope)
    return highest, factors, tl.sum(factors * sums, axis=0)


@triton.jit
def is_sound(total):
    """Return True if a row can be drawn from."""
    return (total > 0) & (total < float("inf"))
