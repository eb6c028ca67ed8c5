"""Sampling from logits whose vocabulary is split across ranks.

This is the reference implementation. Its results equal those of a single rank bit for bit.

Ranks exchange maxima, block sums and each rank's best token. `sample_part` and `score_part` are
generators. They yield a tensor to send, of the same shape on all ranks, and receive the tensors of
all ranks in the order of the vocabulary.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from nano_inference.arrays import Tensor, namespace, with_columns
from nano_inference.sampling.columns import Entries
from nano_inference.sampling.exponential_noise import exponential_noise
from nano_inference.sampling.logprobs import VOCAB_BLOCK, block_sums
from nano_inference.sampling.pipeline import Bias, Distribution, Masks, Penalties, distance, divide
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.tensors import SamplingBatch, select
from nano_inference.structured.mask_bits import WORD

ROW_TILE = 64  # rows per exchange, to limit memory with a large vocabulary


class VocabPart(NamedTuple):
    """The tokens of each rank: rank r holds those from bounds[r] to bounds[r + 1]."""

    bounds: tuple[int, ...]
    rank: int

    @property
    def first(self) -> int:
        """First token of this rank."""
        return self.bounds[self.rank]

    @property
    def size(self) -> int:
        """Number of tokens that this rank holds."""
        return self.sizes[self.rank]

    @property
    def vocab_size(self) -> int:
        """Number of tokens of all ranks."""
        return self.bounds[-1]

    @property
    def sizes(self) -> list[int]:
        """Number of tokens that each rank holds."""
        return [end - first for first, end in pairwise(self.bounds)]

    def is_of_blocks(self, block: int) -> bool:
        """Return True if every rank has tokens, and its first one begins a block."""
        return all(self.sizes) and all(first % block == 0 for first in self.bounds[:-1])

    def num_blocks(self, block: int) -> list[int]:
        """Return how many blocks each rank has."""
        return [-(-size // block) for size in self.sizes]

    def own(self, entries: Entries[Tensor]) -> Entries[Tensor]:
        """Return the entries of this rank's tokens, with ids counted from its first token."""
        rows, ids, values = entries
        inside = (ids >= self.first) & (ids < self.first + self.size)
        return Entries(rows[inside], ids[inside] - self.first, values[inside])


def sample_part(
    logits: Tensor, batch: SamplingBatch, part: VocabPart
) -> Generator[Tensor, list[Tensor], Draw]:
    """Draw one token for each sample, exactly as `sample` does from the logits of all ranks.

    Args:
        logits: float32 [L, this rank's tokens].
        batch: R samples, without filters, best tokens and named tokens.
        part: Partition of the vocabulary, in which every rank begins with a block of `VOCAB_BLOCK`.
    """
    xp, num = namespace(logits), len(batch)
    zeros = xp.zeros(num, device=logits.device)
    drawn: list[tuple[Tensor, ...]] = []
    for start in range(0, num, ROW_TILE):
        tile = xp.arange(start, min(start + ROW_TILE, num), device=logits.device)
        drawn.append((yield from _sample_tile(logits[batch.rows[tile]], select(batch, tile), part)))
    if drawn:
        token_ids, logprobs, raw, mass = (xp.cat(column) for column in zip(*drawn, strict=True))
    else:
        token_ids, logprobs, raw, mass = batch.rows, zeros, zeros, zeros
    no_ids = xp.empty((num, 0), dtype=xp.int64, device=logits.device)
    nothing = no_ids.float()
    return Draw(token_ids, logprobs, raw, mass, None, no_ids, nothing, nothing.new_empty((0, 2)))


def _sample_tile(
    logits: Tensor, batch: SamplingBatch, part: VocabPart
) -> Generator[Tensor, list[Tensor], tuple[Tensor, ...]]:
    xp, greedy = namespace(logits), batch.temperature == 0
    edited, uncut = _edited(logits, batch, part)
    maxima = xp.stack([each.amax(dim=-1) for each in (edited, logits, uncut)])
    highest, raw_highest, uncut_highest = xp.stack((yield maxima)).amax(dim=0)
    temperatures = xp.where(greedy, 1.0, batch.temperature)
    scaled, top = divide(edited, temperatures, highest), _scaled_highest(highest, temperatures)
    odds = xp.exp(scaled - top[:, None])
    noise = exponential_noise(batch.noise_keys, part.size, part.first)
    values = xp.where(greedy[:, None], scaled, odds / noise)
    tokens = values.argmax(dim=-1)
    # [3, R]
    best = xp.stack([each.gather(1, tokens[:, None])[:, 0] for each in (values, scaled, logits)])
    sums = [_sums(odds, part)]
    if batch.any_raw:
        sums.append(_sums(xp.exp(logits - raw_highest[:, None]), part))
    uncut_top = _scaled_highest(uncut_highest, temperatures)
    if batch.has_masks:
        sums.append(
            _sums(xp.exp(divide(uncut, temperatures, uncut_highest) - uncut_top[:, None]), part)
        )
    # send the bits of the ids in a float tensor
    ids = (tokens + part.first).to(xp.int32).view(xp.float32)
    gathered = yield xp.cat([best.T, ids[:, None], *sums], dim=1)
    bests = xp.stack([each[:, :4] for each in gathered])  # [ranks, R, 4]
    winner = bests[:, :, 0].argmax(dim=0)  # a tie goes to the first rank, which has the lower ids
    _, chosen, raw_logit, ids = bests.gather(0, winner[None, :, None].expand(1, -1, 4))[0].unbind(
        dim=1
    )
    log_sums = _log_sums([each[:, 4:] for each in gathered], part, len(sums))
    logprobs, raw = (chosen - top) - log_sums[0], xp.zeros_like(chosen)
    mass = xp.zeros_like(chosen)
    if batch.has_masks:
        ratio = (top + log_sums[0]) - (uncut_top + log_sums[-1])
        mass = xp.where(
            greedy, 0.0, (ratio + distance(highest, uncut_highest, temperatures)).clamp(max=0.0)
        )
        logprobs = xp.where(mass.isnan(), math.nan, logprobs)
    if batch.any_raw:
        raw = (raw_logit - raw_highest) - log_sums[1]
        logprobs = xp.where(greedy, raw, logprobs)
    return ids.contiguous().view(xp.int32).long(), logprobs, raw, mass


def score_part(
    logits: Tensor, token_ids: Tensor, temperatures: Tensor, part: VocabPart
) -> Generator[Tensor, list[Tensor], Tensor]:
    """Return the logprobs of tokens [L] under softmax of all ranks' logits over temperatures."""
    xp = namespace(logits)
    highest = xp.stack((yield logits.amax(dim=-1))).amax(dim=0)
    scaled, top = divide(logits, temperatures, highest), _scaled_highest(highest, temperatures)
    # for a token of another rank the value is arbitrary
    places = (token_ids - part.first).clamp(0, part.size - 1)
    chosen = scaled.gather(1, places[:, None])
    gathered = yield xp.cat([chosen, _sums(xp.exp(scaled - top[:, None]), part)], dim=1)
    ends = xp.tensor(part.bounds[1:], device=logits.device)
    owners = xp.searchsorted(ends, token_ids, right=True)
    chosen = xp.stack([each[:, 0] for each in gathered], dim=1).gather(1, owners[:, None])[:, 0]
    return (chosen - top) - _log_sums([each[:, 1:] for each in gathered], part, 1)[0]


def _edited(logits: Tensor, batch: SamplingBatch, part: VocabPart) -> tuple[Tensor, Tensor]:
    """Return this rank's logits after bias, penalties and masks, and the same without masks.

    A stage that any rank needs is applied on all ranks.
    """
    names = ("bias", "banned", "counts")
    local: dict[str, Any] = {name: part.own(getattr(batch, name)) for name in names}
    local["mask_words"] = batch.mask_words[:, part.first // WORD :]  # blocks consist of whole words
    local_batch = replace(batch, **local)
    distribution = Distribution(logits)
    for stage in (Bias, Penalties, Masks):
        if stage.used(batch):
            stage.apply(distribution, local_batch)
    return (
        distribution.logits,
        distribution.logits if distribution.uncut is None else distribution.uncut,
    )


def _scaled_highest(highest: Tensor, temperatures: Tensor) -> Tensor:
    """Return the highest of the divided logits: 0, or NaN if a row is not finite."""
    return divide(highest[:, None], temperatures, highest)[:, 0]


def _sums(weights: Tensor, part: VocabPart) -> Tensor:
    """Return this rank's block sums, padded to the largest number on any rank. [R, v] -> [R, B]."""
    sums = block_sums(weights)
    return with_columns(sums, max(part.num_blocks(VOCAB_BLOCK)))


def _log_sums(gathered: Sequence[Tensor], part: VocabPart, count: int) -> list[Tensor]:
    """Return the logs of the sums over all blocks in the order of the vocabulary, [R].

    Each gathered tensor holds `count` sets of block sums side by side.
    """
    xp, counts = namespace(gathered[0]), part.num_blocks(VOCAB_BLOCK)
    chunks = [each.chunk(count, dim=1) for each in gathered]

    def whole(i: int) -> Tensor:
        return xp.cat([own[i][:, :size] for own, size in zip(chunks, counts, strict=True)], dim=1)

    return [xp.log(whole(i).sum(dim=-1)) for i in range(count)]
