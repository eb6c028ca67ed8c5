"""Logsumexp with a fixed order of additions for every row.

Blocks of the vocabulary are summed first, then the blocks' sums.
"""

import math

from nano_inference.arrays import Tensor, namespace, with_columns

VOCAB_BLOCK = 512


def logsumexp(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maximum and the log of the sum of exp(logit - maximum).

    Their sum is the logsumexp. float32 [R, V] -> two of [R].
    """
    highest = logits.amax(dim=-1)
    xp = namespace(logits)
    return highest, xp.log(block_sum(xp.exp(logits - highest[:, None])))


def block_sum(weights: Tensor) -> Tensor:
    """Sum over the last axis in fixed blocks. [R, V] -> [R]."""
    return block_sums(weights).sum(dim=-1)


def block_sums(weights: Tensor) -> Tensor:
    """Sum each block of the last axis, the last one padded with zeros. [R, V] -> [R, blocks]."""
    blocks = -(-weights.shape[-1] // VOCAB_BLOCK)
    weights = with_columns(weights, blocks * VOCAB_BLOCK)
    return weights.reshape(len(weights), blocks, VOCAB_BLOCK).sum(dim=-1)


def gather_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return the log-probability of one token per row under softmax(logits).

    float32 [R, V], int64 [R] -> float32 [R].
    """
    highest, log_sum = logsumexp(logits)
    chosen = logits.gather(1, token_ids[:, None])[:, 0]
    return (chosen - highest) - log_sum


def entry_logprobs(logits: Tensor, rows: Tensor, token_ids: Tensor) -> Tensor:
    """Return the logprobs of single entries under softmax(logits).

    float32 [R, V], int64 [E], int64 [E] -> float32 [E].
    """
    highest, log_sum = logsumexp(logits)
    return (logits[rows, token_ids] - highest[rows]) - log_sum[rows]


def best_tokens(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k most probable tokens of each row, best first, ties by lower id.

    k is limited to V. float32 [R, V] -> ids int64 [R, k], logprobs under softmax(logits) float32
    [R, k].
    """
    k = min(k, logits.shape[-1])
    if k == 0:
        nothing = logits.new_empty((len(logits), 0))
        return nothing.long(), nothing
    # a row that is not finite must have k tokens too
    logits = logits.masked_fill(logits.isnan(), -math.inf)
    last = logits.topk(k, dim=-1)[0][:, -1:]
    above, level = logits > last, logits == last
    # topk breaks ties arbitrarily. Fill up with the lowest ids among tokens that tie with the
    # last one.
    missing = k - above.sum(dim=-1, keepdim=True)
    best = above | (level & (level.cumsum(dim=-1) <= missing))
    ids = best.nonzero()[:, 1].reshape(len(logits), k)
    ids = ids.gather(1, logits.gather(1, ids).argsort(dim=-1, descending=True, stable=True))
    highest, log_sum = logsumexp(logits)
    return ids, (logits.gather(1, ids) - highest[:, None]) - log_sum[:, None]
