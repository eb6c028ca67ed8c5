"""Counter-based noise: a pure function of (seed, sample index, position, token id).

No draw therefore depends on another. The host hashes (seed, sample index, position) to a 64-bit key
per sample. The device hashes the key with every token id (`sampling.exponential_noise`).
"""

from collections.abc import Sequence

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def noise_keys(draws: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """Return the keys of (seed, sample index, position) triples.

    The result is int64 [R, 2], each entry a 32-bit value.
    """
    seeds, indices, positions = np.array(draws, dtype=np.uint64).reshape(-1, 3).T
    return stream_keys(noise_streams(seeds, indices), positions)


def noise_streams(seeds: np.ndarray, sample_indices: np.ndarray) -> np.ndarray:
    """Return the part that all keys of a sample share: uint64 [R], [R] -> [R]."""
    return _splitmix64(_splitmix64(seeds) ^ sample_indices)


def stream_keys(streams: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the keys of streams at positions.

    uint64 [R], [R] -> int64 [R, 2], each entry a 32-bit value.
    """
    state = _splitmix64(streams ^ positions)
    halves = np.stack([state & np.uint64(0xFFFFFFFF), state >> np.uint64(32)], axis=1)
    return halves.astype(np.int64)


def _splitmix64(state: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's step (Steele, Lea, Flood 2014), vectorized, modulo 2**64."""
    state = state + _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
