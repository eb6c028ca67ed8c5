"""Softmax over a vocabulary in blocks at fixed positions: what the kernels of the draw have in
common.

Every block of a row is reduced by one program to its maximum and its sum of exp((logit - maximum) /
temperature); the blocks are merged in their order. How many there are depends on the vocabulary
alone, so no bit depends on the batch.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.cuda.rows import aligned

BLOCK = 2048  # of the vocabulary: 4 loads of 16 bytes for each of 128 threads
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(1.1754943508222875e-38)  # the bounds of `pipeline.divide`
HIGHEST = tl.constexpr(3.4028234663852886e38)
# 2**126: its reciprocal is not denormal, which -inf needs
LARGEST_DIVISOR = tl.constexpr(8.507059173023462e37)


def num_blocks(vocab: int) -> int:
    """In how many blocks a row is reduced."""
    return triton.cdiv(vocab, BLOCK)


def as_rows(logits: Tensor) -> Tensor:
    """Logits as the kernels read them: whole rows one after another, from an address that is a
    multiple of 16 bytes.

    What the compiler makes of the kernels, and with it the order of additions, depends on the
    address.

    Raises:
        ValueError: they are not float32 [L, V].
    """
    if logits.dtype != torch.float32 or logits.dim() != 2:
        raise ValueError(f"logits must be float32 [L, V], not {logits.dtype} {list(logits.shape)}.")
    return aligned(logits)


@triton.jit
def divisor_of(temperature):
    """Temperature in float32, and whether it is greedy, which divides by 1. See
    `pipeline.divide`.
    """
    greedy = temperature == 0
    wide = tl.where(greedy, 1.0, temperature.to(tl.float64))
    return tl.minimum(tl.maximum(wide, LOWEST), HIGHEST).to(tl.float32), greedy


@triton.jit
def slope_of(divisor):
    """What a logit's distance is multiplied with to be a power of 2."""
    return tl.div_rn(1.0, tl.minimum(divisor, LARGEST_DIVISOR)) * LOG2_E


@triton.jit
def finite_or_zero(highest):
    """What may be subtracted from the logits of a row, or of a block, that is cut whole."""
    return tl.where(highest == -float("inf"), 0.0, highest)


@triton.jit
def block_odds(x, slope):
    """Maximum of a block of logits, and exp((logit - maximum) / temperature)."""
    highest = tl.max(x, axis=0)
    return highest, tl.exp2((x - finite_or_zero(highest)) * slope)


@triton.jit
def merge_blocks(maxima, sums, slope):
    """The row's maximum, what each block's odds are multiplied with, and the sum over the row.

    The sum is a number above 0 unless the row holds NaN or +inf, or nothing but -inf.
    """
    highest = tl.max(maxima, axis=0)
    factors = tl.exp2((maxima - finite_or_zero(highest)) * slope)
    return highest, factors, tl.sum(factors * sums, axis=0)


@triton.jit
def is_sound(total):
    """Whether a row can be drawn from."""
    return (total > 0) & (total < float("inf"))
