"""Counter-based noise: a pure function of (seed, sample index, position, token id), so no draw
depends on another.

The host hashes (seed, sample index, position) to a 64-bit key a sample; the device hashes the key
with every token id. The noise is one standard exponential a token: the token with the largest
`probability / noise` is a draw from the distribution (the exponential race, equal to Gumbel-max:
argmax(logit - log(noise))).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def noise_keys(draws: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """Keys of (seed, sample index, position) triples: int64 [R, 2], each entry a value of 32
    bits.
    """
    seeds, indices, positions = np.array(draws, dtype=np.uint64).reshape(-1, 3).T
    return stream_keys(noise_streams(seeds, indices), positions)


def noise_streams(seeds: np.ndarray, sample_indices: np.ndarray) -> np.ndarray:
    """What all keys of a sample have in common: uint64 [R], [R] -> [R]."""
    return _splitmix64(_splitmix64(seeds) ^ sample_indices)


def stream_keys(streams: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The keys of streams at positions: uint64 [R], [R] -> int64 [R, 2], each entry a value of 32
    bits.
    """
    state = _splitmix64(streams ^ positions)
    halves = np.stack([state & np.uint64(0xFFFFFFFF), state >> np.uint64(32)], axis=1)
    return halves.astype(np.int64)


def exponential_noise(keys: Tensor, vocab_size: int, first: int = 0) -> Tensor:
    """Standard exponential noise for every token id.

    Args:
        keys: [R, 2] from `noise_keys`.
        vocab_size: V.
        first: the token id that the first column stands for.

    Returns:
        float32 [R, V], between 2**-32 and about 16.6. Small values, which win, are resolved finely.
    """
    halves = _signed32(keys)
    bits = _mix32(torch.arange(first, first + vocab_size, dtype=torch.int32, device=keys.device))
    bits = _mix32(bits[None, :] ^ halves[:, :1])
    bits = _mix32(bits ^ halves[:, 1:])
    # v in (0, 1) with 31 bits; the clamp keeps the largest from rounding up to 1.
    v = (
        bits.bitwise_and_(0x7FFFFFFF)
        .clamp_(max=2**31 - 128)
        .to(torch.float32)
        .add_(0.5)
        .mul_(2.0**-31)
    )
    # -log(1 - v); where v is small 1 - v would lose its digits, so there the series.
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4))))
    return torch.where(v < 2.0**-6, series, -torch.log(1 - v))


def _splitmix64(state: np.ndarray) -> np.ndarray:
    """SplitMix64's step (Steele, Lea, Flood 2014), vectorised; arithmetic is modulo 2**64."""
    state = state + _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _mix32(x: Tensor) -> Tensor:
    """A 32-bit avalanche mixer of two multiplications (found by the hash-prospector search, bias
    0.1).
    """
    x = x ^ _shift(x, 16)
    x.mul_(0x21F0AAAD)
    x.bitwise_xor_(_shift(x, 15))
    x.mul_(0xD35A2D97 - 2**32)  # as a signed 32-bit value
    return x.bitwise_xor_(_shift(x, 15))


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift right; torch's own keeps the sign."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _signed32(keys: Tensor) -> Tensor:
    return torch.where(keys >= 2**31, keys - 2**32, keys).to(torch.int32)
