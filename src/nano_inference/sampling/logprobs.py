"""Logsumexp with a fixed order of additions for every row.

Blocks of the vocabulary are summed first, then the blocks' sums.
"""

import torch
from torch import Tensor
from torch.nn import functional

VOCAB_BLOCK = 512


def logsumexp(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maximum and the log of the sum of exp(logit - maximum).

    Their sum is the logsumexp. float32 [R, V] -> two of [R].
    """
    highest = logits.amax(dim=-1)
    weights = torch.exp(logits - highest[:, None])
    return highest, torch.log(block_sum(weights))


def block_sum(weights: Tensor) -> Tensor:
    """Sum over the last axis in fixed blocks. [R, V] -> [R]."""
    return block_sums(weights).sum(dim=-1)


def block_sums(weights: Tensor) -> Tensor:
    """Sum each block of the last axis, the last one padded with zeros. [R, V] -> [R, blocks]."""
    weights = functional.pad(weights, (0, -weights.shape[-1] % VOCAB_BLOCK))
    return weights.view(len(weights), weights.shape[-1] // VOCAB_BLOCK, VOCAB_BLOCK).sum(dim=-1)


def gather_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return the log-probability of one token per row under softmax(logits).

    float32 [R, V], int64 [R] -> float32 [R].
    """
    highest, log_sum = logsumexp(logits)
    chosen = logits.gather(1, token_ids[:, None])[:, 0]
    return (chosen - highest) - log_sum


def best_tokens(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k most probable tokens of each row, best first, ties by lower id.

    k is limited to V. float32 [R, V] -> ids int64 [R, k], logprobs under softmax(logits) float32
    [R, k].
    """
    k = min(k, logits.shape[-1])
    if k == 0:
        return logits.new_empty((len(logits), 0), dtype=torch.int64), logits.new_empty(
            (len(logits), 0)
        )
    # a row that is not finite must have k tokens too
    logits = torch.nan_to_num(logits, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    last = logits.topk(k, dim=-1).values[:, -1:]
    above, level = logits > last, logits == last
    # topk breaks ties arbitrarily. Fill up with the lowest ids among tokens that tie with the
    # last one.
    missing = k - above.sum(dim=-1, keepdim=True)
    ids = (above | (level & (level.cumsum(dim=-1) <= missing))).nonzero()[:, 1].view(len(logits), k)
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    highest, log_sum = logsumexp(logits)
    return ids.gather(1, order), (values - highest[:, None]) - log_sum[:, None]
