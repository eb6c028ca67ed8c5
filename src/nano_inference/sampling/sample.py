"""The draw: the pipeline, then the exponential race, with the logprob of the drawn token.

This is the reference for every backend.
"""

import math
from dataclasses import dataclass

from nano_inference.arrays import Tensor, namespace
from nano_inference.sampling.exponential_noise import exponential_noise
from nano_inference.sampling.logprobs import (
    best_tokens,
    entry_logprobs,
    gather_logprobs,
    logsumexp,
)
from nano_inference.sampling.noise import noise_keys
from nano_inference.sampling.pipeline import STANDARD, Distribution, divide
from nano_inference.sampling.tensors import SamplingBatch, select

ROW_TILE = 16  # rows per tile, to limit memory with a large vocabulary


@dataclass(frozen=True, slots=True)
class Draw:
    """R samples on the device. `TrainingSample` defines the quantities."""

    token_ids: Tensor  # int64 [R]
    logprobs: Tensor  # float32 [R]
    raw_logprobs: Tensor  # float32 [R]; zeros if not requested
    log_kept_mass: Tensor  # float32 [R]
    kept: Tensor | None  # bool [R, V] if a sample requests its mask
    top_ids: Tensor  # int64 [R, K], best first; K is 0 if not requested
    top_logprobs: Tensor  # float32 [R, K]; -inf for removed tokens
    # float32 [E, 2] of `SamplingBatch.named`: as in `logprobs` and `raw_logprobs`; -inf for removed
    named_logprobs: Tensor


def sample(logits: Tensor, batch: SamplingBatch) -> Draw:
    """Draw one token for each sample of a batch.

    Args:
        logits: float32 [L, V] from the model.
        batch: R samples. `batch.rows` holds each sample's row of the logits.
    """
    xp = namespace(logits)
    tiles = xp.arange(len(batch), device=logits.device).split(ROW_TILE)
    draws = [
        _sample(logits[batch.rows[tile]], batch if len(tiles) == 1 else select(batch, tile))
        for tile in tiles
    ]
    columns = (None if each[0] is None else xp.cat(each) for each in zip(*draws, strict=True))
    return Draw(*columns)  # pyright: ignore


def _sample(rows: Tensor, batch: SamplingBatch) -> tuple[Tensor | None, ...]:
    """Return the fields of `Draw` for one tile. `rows` holds each sample's logits."""
    xp, greedy = namespace(rows), batch.temperature == 0
    distribution = STANDARD.run(rows, batch)
    scaled = raced = distribution.logits
    mass = xp.zeros(len(rows), dtype=xp.float32, device=rows.device)
    kept = distribution.kept(exempt=greedy)
    if kept is not None:
        raced = scaled.masked_fill(~kept, -math.inf)
    tokens, logprobs, normaliser = race(raced, batch.noise_keys)
    if kept is not None or distribution.uncut is not None:
        mass = xp.where(greedy, 0.0, log_kept_mass(normaliser, distribution))
        # a logit that is not finite counts even if it is masked
        logprobs = xp.where(mass.isnan(), math.nan, logprobs)
    raw = xp.zeros_like(logprobs)
    if batch.any_greedy:
        tokens = xp.where(greedy, scaled.argmax(dim=-1), tokens)
    if batch.any_raw:
        raw = gather_logprobs(rows, tokens)
        logprobs = xp.where(greedy, raw, logprobs)
    shows = batch.most_top or len(batch.named.ids)
    shown = xp.where(greedy[:, None], rows, raced) if shows and batch.any_greedy else raced
    named = named_logprobs(shown, rows if batch.any_raw else None, batch)
    # as the token's own logprob
    broken = logprobs.isnan()[batch.named.rows]
    return (
        tokens,
        logprobs,
        raw,
        mass,
        kept if batch.any_kept else None,
        *best_tokens(shown, batch.most_top),
        named.masked_fill(broken[:, None], math.nan),
    )


def named_logprobs(shown: Tensor, model_logits: Tensor | None, batch: SamplingBatch) -> Tensor:
    """Return the logprobs of named tokens as drawn and as the model's own, float32 [E, 2].

    Args:
        shown: Logits of the distribution that each sample reports, float32 [R, V].
        model_logits: The model's own logits. None: not requested, and zeros are returned.
        batch: R samples.
    """
    xp, places = namespace(shown), batch.named[:2]
    if not len(batch.named.ids):
        return shown.new_empty((0, 2))
    drawn = entry_logprobs(shown, *places)
    raw = xp.zeros_like(drawn) if model_logits is None else entry_logprobs(model_logits, *places)
    return xp.stack([drawn, raw], dim=1)


def log_kept_mass(normaliser: Tensor, distribution: Distribution) -> Tensor:
    """Return the log of the mass that masks and filters kept, at most 0.

    The mass is relative to the distribution at its temperature. The maxima are subtracted
    separately from the sums, so that a share of e**-300 does not become log(0).

    Args:
        normaliser: logsumexp of the kept tokens, float32 [R].
        distribution: Rows after all stages.
    """
    if distribution.uncut is None or distribution.below is None:
        return (normaliser - sum(logsumexp(distribution.logits))).clamp(max=0.0)
    return ((normaliser - sum(logsumexp(distribution.uncut))) + distribution.below).clamp(max=0.0)


def race(logits: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw from softmax(logits) by exponential race.

    float32 [R, V], int64 [R, 2] -> token ids, logprobs and logsumexp, each [R].
    """
    highest, log_sum = logsumexp(logits)
    odds = namespace(logits).exp(logits - highest[:, None])
    tokens = (odds / exponential_noise(keys, logits.shape[-1])).argmax(dim=-1)
    chosen = logits.gather(1, tokens[:, None])[:, 0]
    return tokens, (chosen - highest) - log_sum, highest + log_sum


def sample_with_logprobs(
    logits: Tensor, temperatures: Tensor, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one token per row, and return it with its logprob.

    Temperature 0 is greedy and returns the model's own logprob.

    Args:
        logits: [batch, vocab_size], any floating dtype.
        temperatures: [batch], none negative.
        noise: Keys [batch, 2] from `sampling.noise.noise_keys`. The same keys draw the same tokens.
            None draws fresh keys from the default generator of torch, or of numpy for host arrays.

    Returns:
        Token ids int64 [batch] and logprobs float32 [batch].
    """
    if logits.dim() != 2 or temperatures.shape != logits.shape[:1]:
        raise ValueError(
            f"logits {tuple(logits.shape)} and temperatures {tuple(temperatures.shape)} must have "
            "shapes [batch, vocab_size] and [batch]."
        )
    if not bool((temperatures >= 0).all()):
        raise ValueError("temperatures must be at least 0.")
    xp, logits = namespace(logits), logits.float()
    if noise is None:
        seeds = xp.randint(0, 2**62, (len(logits),)).tolist()
        keys = xp.from_numpy(noise_keys([(seed, 0, 0) for seed in seeds])).to(logits.device)
    else:
        keys = noise
    greedy = temperatures == 0
    drawn, logprobs, _ = race(divide(logits, xp.where(greedy, 1.0, temperatures)), keys)
    tokens = xp.where(greedy, logits.argmax(dim=-1), drawn)
    return tokens, xp.where(greedy, gather_logprobs(logits, tokens), logprobs)
