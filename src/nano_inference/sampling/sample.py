"""The draw: masks, temperature, filters, race; with the logprob of what won. The reference for every backend."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nano_inference.sampling.filters import kept_tokens
from nano_inference.sampling.logprobs import gather_logprobs, logsumexp
from nano_inference.sampling.noise import exponential_noise, noise_keys

ROW_TILE = 16  # rows handled at once: bounds the memory of a large vocabulary


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """What the draw needs, one entry a sample. R samples, integers int64, reals float32 but for the temperature."""

    rows: Tensor  # [R] row of the logits; a group's samples share one
    temperature: Tensor  # [R] float64
    top_k: Tensor  # [R]; 0: off
    top_p: Tensor  # [R]
    min_p: Tensor  # [R]
    noise_keys: Tensor  # [R, 2] values of 32 bits, from sampling.noise
    masked_rows: Tensor  # [M] sample whose token ...
    masked_ids: Tensor  # [M] ... of this id may not be drawn
    any_filter: bool  # some sample has top_k, top_p or min_p
    any_greedy: bool
    any_raw: bool  # some sample wants raw logprobs (greedy ones always do)
    any_mask: bool  # some sample wants to know what the filters kept


@dataclass(frozen=True, slots=True)
class Draw:
    """Samples on the device. R samples; definitions as in `TrainingSample`."""

    token_ids: Tensor  # int64 [R]
    logprobs: Tensor  # float32 [R]
    raw_logprobs: Tensor  # float32 [R]; zeros where nobody asked
    log_kept_mass: Tensor  # float32 [R]
    kept: Tensor | None  # bool [R, V] where some sample asked for its mask


def sample(logits: Tensor, batch: SamplingBatch) -> Draw:
    """Draw one token for each sample of a batch.

    Args:
        logits: float32 [L, V] as the model made them.
        batch: R samples; `batch.rows` says which row of the logits each one draws from.
    """
    device = logits.device
    num = len(batch.rows)
    tokens = torch.empty(num, dtype=torch.int64, device=device)
    logprobs, raw, mass = (torch.zeros(num, dtype=torch.float32, device=device) for _ in range(3))
    kept = torch.empty((num, logits.shape[-1]), dtype=torch.bool, device=device) if batch.any_mask else None
    for start in range(0, num, ROW_TILE):
        tile = slice(start, min(start + ROW_TILE, num))
        own = logits[batch.rows[tile]]
        allowed = _masked(own, batch, tile)
        greedy = batch.temperature[tile] == 0
        scaled = divide(allowed, torch.where(greedy, 1.0, batch.temperature[tile]))
        raced = scaled
        if batch.any_filter:
            keep = kept_tokens(scaled, batch.top_k[tile], batch.top_p[tile], batch.min_p[tile])
            keep |= greedy[:, None]
            raced = scaled.masked_fill(~keep, -torch.inf)
            if kept is not None:
                kept[tile] = keep
        tokens[tile], logprobs[tile] = race(raced, batch.noise_keys[tile])
        if batch.any_filter:
            mass[tile] = sum(logsumexp(raced)) - sum(logsumexp(scaled))
        if batch.any_greedy:
            tokens[tile] = torch.where(greedy, allowed.argmax(dim=-1), tokens[tile])
        if batch.any_raw:
            raw[tile] = gather_logprobs(own, tokens[tile])
            logprobs[tile] = torch.where(greedy, raw[tile], logprobs[tile])
    return Draw(tokens, logprobs, raw, mass, kept)


def race(logits: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from softmax(logits) by exponential race. float32 [R, V], int64 [R, 2] -> token ids and logprobs, [R]."""
    highest, log_sum = logsumexp(logits)
    odds = torch.exp(logits - highest[:, None])
    tokens = (odds / exponential_noise(keys, logits.shape[-1])).argmax(dim=-1)
    chosen = logits.gather(1, tokens[:, None])[:, 0]
    return tokens, (chosen - highest) - log_sum


def divide(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Logits over temperature, [R, V] over [R] (none 0), the highest of each row set to 0 before: a low temperature
    would else cost digits or overflow, and so would one that float32 cannot hold.
    """
    bounds = torch.finfo(torch.float32)
    divisor = temperatures.clamp(bounds.tiny, bounds.max).float()
    return (logits - logits.amax(dim=-1, keepdim=True)) / divisor[:, None]


def sample_with_logprobs(logits: Tensor, temperatures: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Draw one token a row, with its logprob. Temperature 0 is greedy, its logprob the model's own.

    Args:
        logits: [batch, vocab_size], any floating dtype.
        temperatures: [batch], none negative.
        noise: [batch, 2] keys as `sampling.noise.noise_keys` makes them: the same keys draw the same tokens. None
            draws fresh ones from torch's default generator.

    Returns:
        token ids int64 [batch] and logprobs float32 [batch].
    """
    if logits.dim() != 2 or temperatures.shape != logits.shape[:1]:
        raise ValueError(f"logits {tuple(logits.shape)} need temperatures of shape [{len(logits)}].")
    if not bool((temperatures >= 0).all()):
        raise ValueError("temperatures must be at least 0.")
    logits = logits.float()
    if noise is None:
        seeds = torch.randint(0, 2**62, (len(logits),)).tolist()
        noise = torch.from_numpy(noise_keys([(seed, 0, 0) for seed in seeds])).to(logits.device)
    greedy = temperatures == 0
    drawn, logprobs = race(divide(logits, torch.where(greedy, 1.0, temperatures)), noise)
    tokens = torch.where(greedy, logits.argmax(dim=-1), drawn)
    return tokens, torch.where(greedy, gather_logprobs(logits, tokens), logprobs)


def _masked(own: Tensor, batch: SamplingBatch, tile: slice) -> Tensor:
    """The rows of a tile without the tokens that may not be drawn."""
    inside = (batch.masked_rows >= tile.start) & (batch.masked_rows < tile.stop)
    rows, ids = batch.masked_rows[inside] - tile.start, batch.masked_ids[inside]
    if not len(rows):
        return own
    allowed = own.clone()
    allowed[rows, ids] = -torch.inf
    return allowed
