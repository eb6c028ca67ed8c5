"""Noise for every token id, hashed from the keys of `sampling.noise`.

Each token gets one standard exponential. The token with the largest `probability / noise` is a draw
from the distribution. This is the exponential race, which equals Gumbel-max: argmax(logit -
log(noise)).
"""

from nano_inference.arrays import Tensor, namespace


def exponential_noise(keys: Tensor, vocab_size: int, first: int = 0) -> Tensor:
    """Return standard exponential noise for every token id, float32 [R, V].

    Values are between 2**-32 and about 16.6. Small values, which win, have a fine resolution.

    Args:
        keys: int64 [R, 2] from `noise_keys`.
        vocab_size: Number of token ids V.
        first: Token id of the first column.
    """
    xp, halves = namespace(keys), _signed32(keys)
    bits = _mix32(xp.arange(first, first + vocab_size, dtype=xp.int32, device=keys.device))
    bits = _mix32(bits[None, :] ^ halves[:, :1])
    bits = _mix32(bits ^ halves[:, 1:])
    # v in (0, 1) with 31 bits. The clamp keeps the largest value from rounding up to 1.
    bits &= 0x7FFFFFFF
    v = bits.clamp(max=2**31 - 128).to(xp.float32)
    v += 0.5
    v *= 2.0**-31
    # -log(1 - v), as a series for small v, because 1 - v would lose digits
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4))))
    return xp.where(v < 2.0**-6, series, -xp.log(1 - v))


def _mix32(x: Tensor) -> Tensor:
    """Apply a 32-bit avalanche mixer with two multiplications (from hash-prospector, bias 0.1)."""
    x = x ^ _shift(x, 16)
    x *= 0x21F0AAAD
    x ^= _shift(x, 15)
    x *= 0xD35A2D97 - 2**32  # as a signed 32-bit value
    x ^= _shift(x, 15)
    return x


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right logically. The operator >> keeps the sign."""
    x = x >> bits
    x &= (1 << (32 - bits)) - 1
    return x


def _signed32(keys: Tensor) -> Tensor:
    xp = namespace(keys)
    return xp.where(keys >= 2**31, keys - 2**32, keys).to(xp.int32)
