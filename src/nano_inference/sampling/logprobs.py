"""Logsumexp with one order of additions for every row: blocks of the vocabulary, then the blocks."""

import torch
from torch import Tensor
from torch.nn import functional

VOCAB_BLOCK = 512


def logsumexp(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum and log of the sum of exp(logit - maximum): logsumexp is their sum. float32 [R, V] -> two of [R]."""
    highest = logits.amax(dim=-1)
    weights = torch.exp(logits - highest[:, None])
    return highest, torch.log(block_sum(weights))


def block_sum(weights: Tensor) -> Tensor:
    """Sum over the last axis in fixed blocks. [R, V] -> [R]."""
    weights = functional.pad(weights, (0, -weights.shape[-1] % VOCAB_BLOCK))
    return weights.view(len(weights), -1, VOCAB_BLOCK).sum(dim=-1).sum(dim=-1)


def gather_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Log-probability of one token a row under softmax(logits). float32 [R, V], int64 [R] -> float32 [R]."""
    highest, log_sum = logsumexp(logits)
    chosen = logits.gather(1, token_ids[:, None])[:, 0]
    return (chosen - highest) - log_sum
