"""`SamplingPipeline`: the stages that logits pass before a token is drawn. Rows are independent."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from nano_inference.arrays import Tensor, namespace, with_columns
from nano_inference.sampling.filters import FILTERS, Ranking, rank
from nano_inference.sampling.tensors import SamplingBatch
from nano_inference.structured.mask_bits import WORD


class Distribution:
    """Rows in the pipeline: logits, and the tokens that filters kept.

    Attributes:
        logits: float32 [R, V], -inf for masked tokens. Filters do not change it.
        uncut: The same without masks, float32 [R, V]. None if no token is masked.
        below: Distance from the maximum of `logits` up to that of `uncut`, float32 [R]. Set once
            the temperature is applied.
    """

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.uncut: Tensor | None = None
        self.below: Tensor | None = None
        self._ranking: Ranking | None = None

    @property
    def ranking(self) -> Ranking:
        """Tokens by descending logit, sorted on first use."""
        if self._ranking is None:
            self._ranking = rank(self.logits)
        return self._ranking

    def kept(self, exempt: Tensor) -> Tensor | None:
        """Return the tokens that the filters kept, bool [R, V].

        All tokens are kept in rows that are `exempt`, bool [R]. None if nothing was filtered.
        """
        if self._ranking is None:
            return None
        ids, _, keep = self._ranking
        kept = namespace(keep).zeros_like(keep).scatter_(1, ids, keep)
        return kept | exempt[:, None]


class Stage(NamedTuple):
    """One stage of the pipeline.

    Attributes:
        name: Name of the stage's parameter in `SamplingParams`.
        used: Function that returns True if some row of a batch needs the stage.
        apply: Function that changes the rows.
    """

    name: str
    used: Callable[[SamplingBatch], bool]
    apply: Callable[[Distribution, SamplingBatch], None]


class SamplingPipeline:
    """Stages, applied in the order of the list.

    The engine always draws with `STANDARD`. Build a pipeline of your own to process other rows,
    such as a trainer's logits.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = tuple(stages)

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """Return the logits of the distribution that tokens are drawn from.

        float32 [R, V] -> [R, V], -inf for removed tokens.
        """
        distribution = self.run(logits, batch)
        kept = distribution.kept(exempt=batch.temperature == 0)
        return (
            distribution.logits
            if kept is None
            else distribution.logits.masked_fill(~kept, -math.inf)
        )

    def run(self, logits: Tensor, batch: SamplingBatch) -> Distribution:
        """Return the rows after all stages. `logits` is not modified."""
        distribution = Distribution(logits)
        for stage in self.stages:
            if stage.used(batch):
                stage.apply(distribution, batch)
        return distribution


def divide(logits: Tensor, temperatures: Tensor, highest: Tensor | None = None) -> Tensor:
    """Divide logits [R, V] by temperatures [R], none of them 0.

    The maximum of each row is first shifted to 0. Otherwise a low temperature, or one that float32
    cannot hold, would lose digits or overflow. Pass `highest` [R] if `logits` holds only a part of
    each row.
    """
    highest = logits.amax(dim=-1) if highest is None else highest
    xp = namespace(logits)
    bounds = xp.finfo(xp.float32)
    divisor = temperatures.clamp(bounds.tiny, bounds.max).float()
    return (logits - highest[:, None]) / divisor[:, None]


def distance(highest: Tensor, above: Tensor, temperatures: Tensor) -> Tensor:
    """Return how far the maxima `highest` are below `above` at these temperatures.

    All are [R], and the result is finite in float32.
    """
    xp = namespace(highest)
    divided = divide(highest[:, None], temperatures, above)[:, 0]
    return divided.clamp(min=xp.finfo(xp.float32).min)


def _bias(distribution: Distribution, batch: SamplingBatch) -> None:
    places, values = tuple(batch.bias[:2]), batch.bias.values
    distribution.logits = distribution.logits.index_put(places, values, accumulate=True)


def _penalties(distribution: Distribution, batch: SamplingBatch) -> None:
    xp = namespace(distribution.logits)
    rows, ids, counts = batch.counts
    old = distribution.logits[rows, ids]
    repetition = batch.repetition[rows]
    new = xp.where(old > 0, old / repetition, old * repetition)
    new -= batch.frequency[rows] * counts + xp.where(counts > 0, batch.presence[rows], 0.0)
    distribution.logits = distribution.logits.index_put((rows, ids), new)


def drawable(batch: SamplingBatch, vocab_size: int) -> Tensor:
    """Return whether each sample may draw each token, bool [R, V].

    A token may be drawn if the sample's mask allows it and it is not banned. The CPU kernels
    (`head_plan.cpp`) and Triton's (`ops/cuda/sampling.py`) do the same.
    """
    xp = namespace(batch.rows)
    may = xp.ones((len(batch), vocab_size), dtype=xp.bool, device=batch.rows.device)
    if len(batch.mask_words):
        may = allowed(batch.mask_rows, batch.mask_words, vocab_size)
    may[tuple(batch.banned[:2])] = False
    return may


def allowed(mask_rows: Tensor, mask_words: Tensor, vocab_size: int) -> Tensor:
    """Return whether the mask of each sample allows each token, bool [R, V].

    The arguments are columns of `SamplingBatch` with at least one mask.
    """
    ids = namespace(mask_words).arange(vocab_size, device=mask_words.device)
    words = with_columns(mask_words, -(-vocab_size // WORD))
    bits = (words[mask_rows.clamp(min=0)][:, ids // WORD] >> (ids % WORD)) & 1
    return (bits == 1) | (mask_rows < 0)[:, None]


def _masks(distribution: Distribution, batch: SamplingBatch) -> None:
    distribution.uncut = logits = distribution.logits
    distribution.logits = logits.masked_fill(~drawable(batch, logits.shape[-1]), -math.inf)


def _temperature(distribution: Distribution, batch: SamplingBatch) -> None:
    temperatures = batch.temperature.masked_fill(batch.temperature == 0, 1.0)
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
