"""Logsumexp with one order of additions for every row: blocks of the vocabulary, then the
blocks.
"""

import torch
from torch import Tensor
from torch.nn import functional

VOCAB_BLOCK = 512


def logsumexp(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum and log of the sum of exp(logit - maximum): logsumexp is their sum. float32 [R, V] ->
    two of [R].
    """
    highest = logits.amax(dim=-1)
    weights = torch.exp(logits - highest[:, None])
    return highest, torch.log(block_sum(weights))


def block_sum(weights: Tensor) -> Tensor:
    """Sum over the last axis in fixed blocks. [R, V] -> [R]."""
    return block_sums(weights).sum(dim=-1)


def block_sums(weights: Tensor) -> Tensor:
    """Sums of blocks of the last axis, the last one filled up with zeros. [R, V] -> [R, blocks]."""
    weights = functional.pad(weights, (0, -weights.shape[-1] % VOCAB_BLOCK))
    return weights.view(len(weights), weights.shape[-1] // VOCAB_BLOCK, VOCAB_BLOCK).sum(dim=-1)


def gather_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Log-probability of one token a row under softmax(logits). float32 [R, V], int64 [R] ->
    float32 [R].
    """
    highest, log_sum = logsumexp(logits)
    chosen = logits.gather(1, token_ids[:, None])[:, 0]
    return (chosen - highest) - log_sum


def best_tokens(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most probable tokens of each row, best first, ties by lower id.

    float32 [R, V] -> ids int64 [R, k], logprobs under softmax(logits) float32 [R, k]; k is at most
    V.
    """
    k = min(k, logits.shape[-1])
    if k == 0:
        return logits.new_empty((len(logits), 0), dtype=torch.int64), logits.new_empty(
            (len(logits), 0)
        )
    # a broken row has k too
    logits = torch.nan_to_num(logits, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    last = logits.topk(k, dim=-1).values[:, -1:]
    above, level = logits > last, logits == last
    # topk breaks ties as it likes: of the tokens on a level with the last one, the lowest ids fill
    # what is missing.
    missing = k - above.sum(dim=-1, keepdim=True)
    ids = (above | (level & (level.cumsum(dim=-1) <= missing))).nonzero()[:, 1].view(len(logits), k)
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    highest, log_sum = logsumexp(logits)
    return ids.gather(1, order), (values - highest[:, None]) - log_sum[:, None]
