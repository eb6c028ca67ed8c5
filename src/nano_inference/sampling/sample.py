"""The draw: the pipeline, then the race; with the logprob of what won. The reference for every
backend.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nano_inference.sampling.exponential_noise import exponential_noise
from nano_inference.sampling.logprobs import best_tokens, gather_logprobs, logsumexp
from nano_inference.sampling.noise import noise_keys
from nano_inference.sampling.pipeline import STANDARD, Distribution, divide
from nano_inference.sampling.tensors import SamplingBatch, select

ROW_TILE = 16  # rows handled at once: bounds the memory of a large vocabulary


@dataclass(frozen=True, slots=True)
class Draw:
    """Samples on the device. R samples; definitions as in `TrainingSample`."""

    token_ids: Tensor  # int64 [R]
    logprobs: Tensor  # float32 [R]
    raw_logprobs: Tensor  # float32 [R]; zeros where it was not asked for
    log_kept_mass: Tensor  # float32 [R]
    kept: Tensor | None  # bool [R, V] where some sample asked for its mask
    top_ids: Tensor  # int64 [R, K], best first; K is 0 where it was not asked for
    top_logprobs: Tensor  # float32 [R, K]; -inf for what was cut


def sample(logits: Tensor, batch: SamplingBatch) -> Draw:
    """Draw one token for each sample of a batch.

    Args:
        logits: float32 [L, V] as the model made them.
        batch: R samples; `batch.rows` says which row of the logits each one draws from.
    """
    tiles = torch.arange(len(batch), device=logits.device).split(ROW_TILE)
    draws = [
        _sample(logits[batch.rows[tile]], batch if len(tiles) == 1 else select(batch, tile))
        for tile in tiles
    ]
    columns = (None if each[0] is None else torch.cat(each) for each in zip(*draws, strict=True))
    return Draw(*columns)  # pyright: ignore


def _sample(own: Tensor, batch: SamplingBatch) -> tuple[Tensor | None, ...]:
    """The fields of `Draw` for one tile; `own` holds each sample's row."""
    greedy = batch.temperature == 0
    distribution = STANDARD.run(own, batch)
    scaled = raced = distribution.logits
    mass = torch.zeros(len(own), dtype=torch.float32, device=own.device)
    kept = distribution.kept(exempt=greedy)
    if kept is not None:
        raced = scaled.masked_fill(~kept, -torch.inf)
    tokens, logprobs, normaliser = race(raced, batch.noise_keys)
    if kept is not None or distribution.uncut is not None:
        mass = torch.where(greedy, 0.0, log_kept_mass(normaliser, distribution))
        # a row that is not finite where masks cut it
        logprobs = torch.where(mass.isnan(), torch.nan, logprobs)
    raw = torch.zeros_like(logprobs)
    if batch.any_greedy:
        tokens = torch.where(greedy, scaled.argmax(dim=-1), tokens)
    if batch.any_raw:
        raw = gather_logprobs(own, tokens)
        logprobs = torch.where(greedy, raw, logprobs)
    shown = (
        torch.where(greedy[:, None], own, raced) if batch.most_top and batch.any_greedy else raced
    )
    return (
        tokens,
        logprobs,
        raw,
        mass,
        kept if batch.any_kept else None,
        *best_tokens(shown, batch.most_top),
    )


def log_kept_mass(normaliser: Tensor, distribution: Distribution) -> Tensor:
    """Log of the mass that masks and filters left of the distribution at its temperature, at most
    0.

    The maxima are subtracted apart from the sums, so that a part of e**-300 is no log of 0.

    Args:
        normaliser: logsumexp of what is left, float32 [R].
        distribution: after all stages.
    """
    if distribution.uncut is None or distribution.below is None:
        return (normaliser - sum(logsumexp(distribution.logits))).clamp(max=0.0)
    return ((normaliser - sum(logsumexp(distribution.uncut))) + distribution.below).clamp(max=0.0)


def race(logits: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw from softmax(logits) by exponential race.

    float32 [R, V], int64 [R, 2] -> token ids, logprobs and logsumexp, each [R].
    """
    highest, log_sum = logsumexp(logits)
    odds = torch.exp(logits - highest[:, None])
    tokens = (odds / exponential_noise(keys, logits.shape[-1])).argmax(dim=-1)
    chosen = logits.gather(1, tokens[:, None])[:, 0]
    return tokens, (chosen - highest) - log_sum, highest + log_sum


def sample_with_logprobs(
    logits: Tensor, temperatures: Tensor, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one token a row, with its logprob. Temperature 0 is greedy, its logprob the model's own.

    Args:
        logits: [batch, vocab_size], any floating dtype.
        temperatures: [batch], none negative.
        noise: [batch, 2] keys as `sampling.noise.noise_keys` makes them: the same keys draw the
            same tokens. None draws fresh ones from torch's default generator.

    Returns:
        token ids int64 [batch] and logprobs float32 [batch].
    """
    if logits.dim() != 2 or temperatures.shape != logits.shape[:1]:
        raise ValueError(
            f"logits {tuple(logits.shape)} need temperatures of shape [{len(logits)}]."
        )
    if not bool((temperatures >= 0).all()):
        raise ValueError("temperatures must be at least 0.")
    logits = logits.float()
    if noise is None:
        seeds = torch.randint(0, 2**62, (len(logits),)).tolist()
        noise = torch.from_numpy(noise_keys([(seed, 0, 0) for seed in seeds])).to(logits.device)
    greedy = temperatures == 0
    drawn, logprobs, _ = race(divide(logits, torch.where(greedy, 1.0, temperatures)), noise)
    tokens = torch.where(greedy, logits.argmax(dim=-1), drawn)
    return tokens, torch.where(greedy, gather_logprobs(logits, tokens), logprobs)
