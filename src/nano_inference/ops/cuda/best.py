"""The most probable tokens of each sample, ties by lower id. See
`sampling.logprobs.best_tokens`.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.cuda.filters import Filtered, asks, keeps, row_maximum
from nano_inference.ops.cuda.softmax import BLOCK, num_blocks
from nano_inference.ops.cuda.thresholds import CUT, distance_of
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.sampling_batch import SamplingBatch

_TILE = 16  # samples ranked at once: bounds the memory of a large vocabulary, 8 bytes a token
_LAST_ID = tl.constexpr(0x7FFFFFFF)


def best_tokens(
    draw: Draw,
    shown: Tensor,
    maxima: Tensor,
    logits: Tensor,
    own: Tensor,
    batch: SamplingBatch,
    filtered: Filtered | None,
    changed: bool,
) -> None:
    """Fill in the best tokens of a draw.

    Each token of a row becomes one number, its rank value above its id, so no two are equal and
    `topk` has one answer.

    Args:
        draw: its `top_ids` and `top_logprobs` are written.
        shown: float32 [2, R], maximum and log of the sum of odds of what each sample shows: a
            greedy one the model's own logits, another what it was drawn from.
        maxima: float32 [R, blocks] of `logits`.
        logits: float32 [L, V], or [R, V] where `changed`.
        own: float32 [L, V], the model's.
        batch: R samples.
        filtered: what the filters did, if there are any.
        changed: whether sample i has row i of the logits.
    """
    num, k = draw.top_ids.shape
    vocab, blocks = logits.shape[1], maxima.shape[1]
    ranks = torch.empty((min(_TILE, num), vocab), dtype=torch.int64, device=logits.device)
    bounds = draw.top_ids if filtered is None else filtered.bounds
    for first in range(0, num, _TILE):
        count = min(_TILE, num - first)
        _rank_kernel[count, num_blocks(vocab)](
            logits, own, maxima, batch.rows, batch.temperature, batch.top_k, batch.top_p,
            batch.min_p, bounds, ranks,
            num, first, V=vocab, BLOCKS=blocks, WIDTH=triton.next_power_of_2(blocks),
            CHANGED=changed,
            FILTERED=filtered is not None, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        best = ranks[:count].topk(k, dim=-1).values
        _show_kernel[count,](
            best, batch.temperature, shown, draw.top_ids, draw.top_logprobs, num, first,
            K=k, WIDTH=triton.next_power_of_2(k), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["num", "first"],
    do_not_specialize_on_alignment=["rows", "temperatures", "top_k", "top_p", "min_p", "bounds"],
)
def _rank_kernel(
    logits,
    own,
    maxima,
    rows,
    temperatures,
    top_k,
    top_p,
    min_p,
    bounds,  # int32 [3, R]: of `filters.Filtered`
    ranks,  # int64 [samples of this tile, V], written
    num,  # R
    first,  # sample of the tile
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANGED: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (samples of the tile, BLOCKS): the rank values of a block of tokens."""
    place = tl.program_id(0).to(tl.int64)
    sample = place + first
    divisor, _, _, least, filters = asks(sample, temperatures, top_k, top_p, min_p)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = sample if CHANGED else tl.load(rows + sample)
    if tl.load(temperatures + sample) == 0:  # bits of the logit, in an order of integers
        x = tl.load(own + tl.load(rows + sample) * V + ids, mask=ids < V, other=-float("inf"))
        x = tl.where(x == x, x, -float("inf")) + 0.0  # a sum is never -0
        bits = x.to(tl.int32, bitcast=True)
        value = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    else:
        x = tl.load(logits + row * V + ids, mask=ids < V, other=-float("inf"))
        distance = distance_of(x, row_maximum(maxima, sample, BLOCKS, WIDTH), divisor)
        stays = distance < CUT
        if FILTERED:
            stays = tl.where(filters, keeps(distance, ids, bounds, sample, num, least), stays)
        value = -tl.where(stays, distance, CUT)
    rank = (value.to(tl.int64) << 32) | (ids ^ _LAST_ID).to(tl.int64)
    tl.store(ranks + place * V + ids, rank, mask=ids < V)


@triton.jit(
    do_not_specialize=["num", "first"],
    do_not_specialize_on_alignment=["temperatures", "best", "shown", "top_ids", "top_logprobs"],
)
def _show_kernel(
    best,  # int64 [samples of this tile, K]: rank values, falling
    temperatures,
    shown,  # float32 [2, R]
    top_ids,  # int64 [R, K], written
    top_logprobs,  # float32 [R, K], written
    num,
    first,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Grid (samples of the tile,): ids and logprobs of rank values."""
    place = tl.program_id(0).to(tl.int64)
    sample = place + first
    columns = tl.arange(0, WIDTH)
    inside = columns < K
    rank = tl.load(best + place * K + columns, mask=inside, other=0)
    value = (rank >> 32).to(tl.int32)
    x = tl.where(value >= 0, value, value ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)
    highest, log_sum = tl.load(shown + sample), tl.load(shown + num + sample)
    greedy = tl.load(temperatures + sample) == 0
    distance = tl.where(greedy, x - highest, -((-value).to(tl.float32, bitcast=True)))
    tl.store(top_ids + sample * K + columns, (rank & 0xFFFFFFFF) ^ _LAST_ID, mask=inside)
    tl.store(top_logprobs + sample * K + columns, distance - log_sum, mask=inside)
