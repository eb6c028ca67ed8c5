"""The filters top_k, top_p and min_p, which decide which tokens of a row may be drawn.

Rows are independent, and ties prefer the lower id. Each filter works on the tokens that the
previous one kept. The most probable token is always kept, masked tokens (-inf) never are.

docs/first-change.md adds a filter: a parameter and `cuts` in `SamplingParams`, a column,
`any_is_on` and a line of `FILTERS` here, the same in `ops/cpu/kernels/filters.h` and `ops/cuda`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple

from nano_inference.arrays import Tensor, namespace
from nano_inference.sampling.columns import A, column

_MOST = 2**31  # more tokens than any vocabulary has


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterColumns(Generic[A]):
    """Filter parameters of each sample, [R]."""

    top_k: A = column("int64", "R", padding=0, param=lambda p: min(p.top_k, _MOST))
    top_p: A = column("float32", "R", padding=1.0, param=lambda p: p.top_p)
    min_p: A = column("float32", "R", padding=0.0, param=lambda p: p.min_p)


def any_is_on(columns: FilterColumns[Tensor], vocab_size: int) -> Tensor:
    """Return which samples have a filter that can remove tokens, bool [R]."""
    cuts = (columns.top_k > 0) & (columns.top_k < vocab_size)
    return cuts | (columns.top_p < 1) | (columns.min_p > 0)


class Ranking(NamedTuple):
    """Tokens of each row by (probability descending, id ascending)."""

    ids: Tensor  # int64 [R, V]
    odds: Tensor  # float32 [R, V], probability relative to the first
    keep: Tensor  # bool [R, V], written by the filters


def rank(logits: Tensor) -> Ranking:
    """Sort rows of logits after temperature, float32 [R, V]."""
    ids = logits.argsort(dim=-1, descending=True, stable=True)
    ranked = logits.gather(1, ids)
    keep = ranked > -math.inf
    keep[:, 0] = True
    return Ranking(ids, (ranked - ranked[:, :1]).exp(), keep)


def keep_top_k(ranking: Ranking, top_k: Tensor) -> None:
    """Keep exactly the first k tokens. int64 [R], 0 for off."""
    keep, width = ranking.keep, ranking.ids.shape[-1]
    ranks = namespace(top_k).arange(1, width + 1, device=top_k.device)
    keep &= (ranks <= top_k[:, None]) | (top_k[:, None] == 0)


def keep_top_p(ranking: Ranking, top_p: Tensor) -> None:
    """Keep the shortest prefix with top_p of the remaining mass. float32 [R], 1 for off."""
    keep, xp = ranking.keep, namespace(top_p)
    mass = (ranking.odds * keep).cumsum(dim=-1)
    before = xp.zeros_like(mass)
    before[:, 1:] = mass[:, :-1]
    keep &= (before < top_p[:, None] * mass[:, -1:]) | (top_p[:, None] >= 1)
    keep[:, 0] = True


def keep_min_p(ranking: Ranking, min_p: Tensor) -> None:
    """Keep tokens at least min_p times as probable as the first. float32 [R], 0 for off."""
    keep = ranking.keep
    keep &= ranking.odds >= min_p[:, None]
    keep[:, 0] = True


# Filters by column, in the order of their application.
FILTERS: dict[str, Callable[[Ranking, Tensor], None]] = {
    "top_k": keep_top_k,
    "top_p": keep_top_p,
    "min_p": keep_min_p,
}
