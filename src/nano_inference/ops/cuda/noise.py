"""The noise of `sampling.noise` in Triton: the same hash bits and the same formula.

Noise is a pure function of a sample's key and a token id.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl


@triton.jit
def mix32(x):
    """Apply the mixer of `sampling.noise` to uint32."""
    x ^= x >> 16
    x *= 0x21F0AAAD
    x ^= x >> 15
    x *= 0xD35A2D97
    return x ^ (x >> 15)


@triton.jit
def exponential(ids, low, high):
    """Return standard exponential noise, float32, for token ids int32 and the halves of a key,
    uint32.
    """
    bits = mix32(ids.to(tl.uint32))
    bits = mix32(bits ^ low)
    bits = mix32(bits ^ high)
    # 2**31 - 128, as in `exponential_noise`
    whole = tl.minimum((bits & 0x7FFFFFFF).to(tl.int32), 2147483520)
    v = (whole.to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2**-31
    series = v * (1.0 + v * (0.5 + v * (0.3333333333333333 + v * 0.25)))
    return tl.where(v < 0.015625, series, -tl.log(1.0 - v))


@triton.jit
def key_halves(keys, sample):
    """Load the halves of a sample's key: keys int64 [R, 2] -> two of uint32."""
    return tl.load(keys + sample * 2).to(tl.uint32), tl.load(keys + sample * 2 + 1).to(tl.uint32)
