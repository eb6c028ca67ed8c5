"""Gradients of logprobs with respect to the head's products, of which only some rows are in memory.

One program reduces a row to its maximum and its sum of odds, block by block in order. A second
kernel replaces the products, one program for each block.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.cuda.rows import aligned
from nano_inference.ops.gradients import LogitRule

_BLOCK = 2048  # tokens
LOWEST = tl.constexpr(float("-inf"))


def logit_gradient(
    logits: Tensor,
    targets: tuple[Tensor, Tensor, Tensor],
    masks: tuple[Tensor, Tensor],
    rule: LogitRule,
) -> None:
    """Implement `GradientOps.logit_gradient` in two launches."""
    rows, vocab = logits.shape
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits must be contiguous float32; got {logits.dtype}.")
    if not rows:
        return
    mask_rows, words = masks
    limits = mask_rows, words, words.shape[1] if words.numel() else 0
    starts, ids, gradients = map(aligned, targets)
    levels = rule.divisor, rule.cap or None, rule.temperature
    stats = torch.empty((rows, 2), dtype=torch.float32, device=logits.device)
    sizes = {"VOCAB": vocab, "BLOCK": _BLOCK, "num_warps": 4, "enable_fp_fusion": False}
    _odds_kernel[(rows,)](logits, *limits, stats, *levels, **sizes)
    _logit_gradient_kernel[(rows, triton.cdiv(vocab, _BLOCK))](
        logits, *limits, stats, starts, ids, gradients, *levels, **sizes
    )


@triton.jit
def _level(z, divisor, cap, temperature):
    """Return the scaled and capped logit over the temperature, and the slope of the cap."""
    z = z / divisor
    slope = 1.0
    if cap is not None:
        part = 1 - 2 / (1 + tl.exp(2 * (z / cap)))  # tanh; an infinite power gives 1
        z = cap * part
        slope = 1 - part * part
    return z / temperature, slope


@triton.jit
def _drawable(mask_rows_ptr, words_ptr, width, columns, VOCAB: tl.constexpr):
    """Return the tokens of a block that the row's mask permits."""
    mask_row = tl.load(mask_rows_ptr + tl.program_id(0))
    there = columns < VOCAB
    masked = tl.where(mask_row < 0, 0, width * 32)  # tokens that have a bit
    word = columns // 32
    bits = tl.load(words_ptr + mask_row * width + word, mask=there & (columns < masked), other=0)
    free = tl.where(mask_row < 0, VOCAB, 0)
    return there & ((columns < free) | ((bits >> (columns % 32)) & 1 == 1))


@triton.jit(do_not_specialize=["width"])
def _odds_kernel(
    logits_ptr, mask_rows_ptr, words_ptr, width, stats_ptr, divisor, cap, temperature,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a row's highest level and its sum of exp(level - highest). Programs: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    highest = tl.full((), LOWEST, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for first in range(0, VOCAB, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        may = _drawable(mask_rows_ptr, words_ptr, width, columns, VOCAB)
        z = tl.load(logits_ptr + row * VOCAB + columns, mask=columns < VOCAB, other=0.0)
        level, _ = _level(z, divisor, cap, temperature)
        level = tl.where(may, level, LOWEST)
        higher = tl.maximum(highest, tl.max(level, axis=0))
        origin = tl.where(higher == LOWEST, 0.0, higher)  # nothing permitted yet
        total = total * tl.exp(highest - origin) + tl.sum(tl.exp(level - origin), axis=0)
        highest = higher
    tl.store(stats_ptr + row * 2, highest)
    tl.store(stats_ptr + row * 2 + 1, total)


@triton.jit(do_not_specialize=["width"])
def _logit_gradient_kernel(
    logits_ptr, mask_rows_ptr, words_ptr, width, stats_ptr, starts_ptr, ids_ptr, gradients_ptr,
    divisor, cap, temperature, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace a block of a row's products. Programs: (rows, blocks)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < VOCAB
    may = _drawable(mask_rows_ptr, words_ptr, width, columns, VOCAB)
    at = logits_ptr + row * VOCAB + columns
    level, slope = _level(tl.load(at, mask=there, other=0.0), divisor, cap, temperature)
    highest, total = tl.load(stats_ptr + row * 2), tl.load(stats_ptr + row * 2 + 1)
    odds = tl.where(may, tl.exp(level - highest), 0.0)
    whole = tl.full((), 0.0, tl.float32)
    wanted = tl.zeros((BLOCK,), tl.float32)
    for target in range(tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)):
        gradient = tl.load(gradients_ptr + target)
        whole += gradient
        wanted += tl.where(columns == tl.load(ids_ptr + target), gradient, 0.0)
    d = (wanted - odds * (whole / total)) / (divisor * temperature) * slope
    tl.store(at, d, mask=there)
