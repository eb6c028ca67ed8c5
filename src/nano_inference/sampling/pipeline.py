"""`SamplingPipeline`: the table of what happens to logits before a token is drawn. Every row for
itself.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from nano_inference.sampling.filters import FILTERS, Ranking, rank
from nano_inference.sampling.tensors import SamplingBatch
from nano_inference.structured.mask_bits import WORD


class Distribution:
    """Rows on their way through the pipeline: logits, and which tokens the filters kept.

    Attributes:
        logits: float32 [R, V], -inf where masks cut, not cut by filters.
        uncut: the same without masks, float32 [R, V]; None: nothing is masked.
        below: once temperature is applied, how far the highest of `logits` lies below that of
            `uncut`, float32 [R].
    """

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.uncut: Tensor | None = None
        self.below: Tensor | None = None
        self._ranking: Ranking | None = None

    @property
    def ranking(self) -> Ranking:
        """The tokens by falling logit, sorted when a filter first asks."""
        if self._ranking is None:
            self._ranking = rank(self.logits)
        return self._ranking

    def kept(self, exempt: Tensor) -> Tensor | None:
        """What the filters kept, bool [R, V]; all of rows that are `exempt`, bool [R]. None:
        nothing filtered.
        """
        if self._ranking is None:
            return None
        kept = torch.zeros_like(self._ranking.keep).scatter_(
            1, self._ranking.ids, self._ranking.keep
        )
        return kept | exempt[:, None]


class Stage(NamedTuple):
    """One entry of the table.

    Attributes:
        name: as in `SamplingParams`.
        used: whether some row of a batch asks for it.
        apply: changes the rows.
    """

    name: str
    used: Callable[[SamplingBatch], bool]
    apply: Callable[[Distribution, SamplingBatch], None]


class SamplingPipeline:
    """Stages, applied in the order of the list.

    The engine draws with `STANDARD`, always. A pipeline of your own shapes rows of your own: a
    trainer's logits, say.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = tuple(stages)

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """Logits of the distribution that is drawn from: float32 [R, V] -> [R, V], -inf for what
        was cut.
        """
        distribution = self.run(logits, batch)
        kept = distribution.kept(exempt=batch.temperature == 0)
        return (
            distribution.logits
            if kept is None
            else distribution.logits.masked_fill(~kept, -torch.inf)
        )

    def run(self, logits: Tensor, batch: SamplingBatch) -> Distribution:
        """The rows after all stages. `logits` is not written to."""
        distribution = Distribution(logits)
        for stage in self.stages:
            if stage.used(batch):
                stage.apply(distribution, batch)
        return distribution


def divide(logits: Tensor, temperatures: Tensor, highest: Tensor | None = None) -> Tensor:
    """Logits over temperature, [R, V] over [R] (none 0), the highest of each row set to 0 before: a
    low temperature would else cost digits or overflow, and so would one that float32 cannot hold.
    `highest` [R] is known where these are only a part of a row.
    """
    highest = logits.amax(dim=-1) if highest is None else highest
    bounds = torch.finfo(torch.float32)
    divisor = temperatures.clamp(bounds.tiny, bounds.max).float()
    return (logits - highest[:, None]) / divisor[:, None]


def distance(highest: Tensor, above: Tensor, temperatures: Tensor) -> Tensor:
    """How far one maximum lies below another at a temperature, as a number that float32 can hold:
    three of [R].
    """
    return divide(highest[:, None], temperatures, above)[:, 0].clamp(
        min=torch.finfo(torch.float32).min
    )


def _bias(distribution: Distribution, batch: SamplingBatch) -> None:
    places, values = tuple(batch.bias[:2]), batch.bias.values
    distribution.logits = distribution.logits.index_put(places, values, accumulate=True)


def _penalties(distribution: Distribution, batch: SamplingBatch) -> None:
    rows, ids, counts = batch.counts
    old = distribution.logits[rows, ids]
    repetition = batch.repetition[rows]
    new = torch.where(old > 0, old / repetition, old * repetition)
    new -= batch.frequency[rows] * counts + torch.where(counts > 0, batch.presence[rows], 0.0)
    distribution.logits = distribution.logits.index_put((rows, ids), new)


def drawable(batch: SamplingBatch, vocab_size: int) -> Tensor:
    """Whether each sample may draw each token, bool [R, V]: what its mask allows, without what is
    banned. The CPU kernels (`head_plan.cpp`) and Triton's (`ops/cuda/sampling.py`) do the same.
    """
    may = torch.ones((len(batch), vocab_size), dtype=torch.bool, device=batch.rows.device)
    if len(batch.mask_words):
        may = allowed(batch.mask_rows, batch.mask_words, vocab_size)
    may[tuple(batch.banned[:2])] = False
    return may


def allowed(mask_rows: Tensor, mask_words: Tensor, vocab_size: int) -> Tensor:
    """Whether the mask of each sample allows each token, bool [R, V]; columns as in
    `SamplingBatch`, with at least one mask.
    """
    ids = torch.arange(vocab_size, device=mask_words.device)
    missing = -(-vocab_size // WORD) - mask_words.shape[1]
    words = functional.pad(mask_words, (0, max(missing, 0)))
    bits = (words[mask_rows.clamp(min=0)][:, ids // WORD] >> (ids % WORD)) & 1
    return (bits == 1) | (mask_rows < 0)[:, None]


def _masks(distribution: Distribution, batch: SamplingBatch) -> None:
    distribution.uncut = logits = distribution.logits
    distribution.logits = logits.masked_fill(~drawable(batch, logits.shape[-1]), -torch.inf)


def _temperature(distribution: Distribution, batch: SamplingBatch) -> None:
    temperatures = torch.where(batch.temperature == 0, 1.0, batch.temperature)
    if distribution.uncut is not None:
        distribution.below = distance(
            distribution.logits.amax(dim=-1), distribution.uncut.amax(dim=-1), temperatures
        )
        distribution.uncut = divide(distribution.uncut, temperatures)
    distribution.logits = divide(distribution.logits, temperatures)


Bias = Stage("logit_bias", lambda b: len(b.bias.ids) > 0, _bias)
Penalties = Stage("penalties", lambda b: len(b.counts.ids) > 0, _penalties)
Masks = Stage("allowed_token_ids", lambda b: b.has_masks, _masks)
Temperature = Stage("temperature", lambda _: True, _temperature)


def _filter(name: str) -> Stage:
    keep = FILTERS[name]
    return Stage(name, lambda b: b.any_filter, lambda d, b: keep(d.ranking, getattr(b, name)))


_FILTERS = [_filter(name) for name in FILTERS]
TopK, TopP, MinP, *_ = _FILTERS

STANDARD = SamplingPipeline([Bias, Penalties, Masks, Temperature, *_FILTERS])
