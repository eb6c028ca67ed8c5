"""top_k, top_p, min_p: which tokens of a row stay in the race. Every row for itself, ties by lower
id.

Each works on what the one before left. The first token always stays, masked tokens (-inf) never do.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Ranking(NamedTuple):
    """Tokens of each row by (probability descending, id ascending)."""

    ids: Tensor  # int64 [R, V]
    odds: Tensor  # float32 [R, V], probability relative to the first
    keep: Tensor  # bool [R, V], written by the filters


def rank(logits: Tensor) -> Ranking:
    """Sort rows of logits, float32 [R, V], after temperature."""
    ranked, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    keep = ranked > -torch.inf
    keep[:, 0] = True
    return Ranking(ids, torch.exp(ranked - ranked[:, :1]), keep)


def keep_top_k(ranking: Ranking, top_k: Tensor) -> None:
    """Keep exactly the first k. int64 [R], 0 for off."""
    ranks = torch.arange(ranking.odds.shape[-1], device=ranking.odds.device)
    ranking.keep.logical_and_((ranks < top_k[:, None]) | (top_k[:, None] == 0))


def keep_top_p(ranking: Ranking, top_p: Tensor) -> None:
    """Keep the shortest prefix whose mass reaches top_p of what is left. float32 [R], 1 for off."""
    mass = torch.cumsum(ranking.odds * ranking.keep, dim=-1)
    before = mass.roll(1, dims=-1)
    before[:, 0] = 0
    ranking.keep.logical_and_((before < top_p[:, None] * mass[:, -1:]) | (top_p[:, None] >= 1))
    ranking.keep[:, 0] = True


def keep_min_p(ranking: Ranking, min_p: Tensor) -> None:
    """Keep tokens at least min_p times as probable as the first. float32 [R], 0 for off."""
    ranking.keep.logical_and_(ranking.odds >= min_p[:, None])
    ranking.keep[:, 0] = True
