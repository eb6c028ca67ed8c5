"""top_k, top_p, min_p: which tokens of a row stay in the race. Every row for itself, ties by lower id."""

import torch
from torch import Tensor


def kept_tokens(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Tokens that survive the filters, applied in this order, each on what the one before left.

    Tokens are ranked by (probability descending, id ascending). top_k keeps exactly k; top_p the shortest prefix whose
    mass reaches top_p of what is left; min_p those at least min_p times as probable as the first. The first always
    stays, masked tokens (-inf) never do.

    Args:
        logits: float32 [R, V], after temperature.
        top_k: int64 [R], 0 for off.
        top_p: float32 [R], 1 for off.
        min_p: float32 [R], 0 for off.

    Returns:
        bool [R, V].
    """
    ranked, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    odds = torch.exp(ranked - ranked[:, :1])  # relative to the first
    keep = ranked > -torch.inf
    keep &= (ranks < top_k[:, None]) | (top_k[:, None] == 0)
    mass = torch.cumsum(odds * keep, dim=-1)
    before = mass.roll(1, dims=-1)
    before[:, 0] = 0
    keep &= (before < top_p[:, None] * mass[:, -1:]) | (top_p[:, None] >= 1)
    keep &= odds >= min_p[:, None]
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter_(1, ids, keep)
