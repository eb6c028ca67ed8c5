"""Codes of 8 bits in registers: rounding of rows to codes and a scale, and back.

`ops/kv_codes.py` and `ops/quantised.py` define the codes. Both directions have the bits of these
definitions on every card.

Cards from compute capability 9.0 on convert e4m3 with one instruction for two codes. Earlier ones
have none, so codes are turned into float16 by shifting their bits: sign, four bits of exponent and
three of mantissa have the same order, and float16's exponent counts from 8 lower. The result is
code / 256, which is exact, also for subnormal numbers. `scale_of` multiplies the scale by 256.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportUnreachable=false

import torch
import triton
import triton.language as tl

from nano_inference.ops.kv_codes import MOST_OF, KvCodes
from nano_inference.ops.quantised import TINY

# kinds of codes for kernels: none, whole numbers, e4m3, and e4m3 on cards without its instructions
PLAIN, INT8, FP8, FP8_SHIFTED = (tl.constexpr(kind) for kind in range(4))
_MOST_INT8, _MOST_FP8 = tl.constexpr(float(MOST_OF["int8"])), tl.constexpr(float(MOST_OF["fp8"]))
WITHOUT_CARD = 90  # capability for the interpreter and for compilation elsewhere
_TINY = tl.constexpr(TINY)
# added and subtracted: the nearest whole number, ties to even
_ROUNDING = tl.constexpr(1.5 * 2**23)
_SUBNORMAL = tl.constexpr(2.0**-6)  # least e4m3 number with four significant bits
_STEPS = tl.constexpr(2.0**9)  # steps of smaller numbers, in 1
_INFINITE = tl.constexpr(float("inf"))


def kind_of(codes: KvCodes | None, capability: int = 90) -> int:
    """Return the kind of codes for the kernels.

    Args:
        codes: `KvFormat.codes`.
        capability: Compute capability of the card, 80 for 8.x and 90 for 9.0. Only `decoded`
            depends on it.
    """
    if codes is None:
        return PLAIN.value
    if codes == "int8":
        return INT8.value
    return FP8.value if capability >= 90 else FP8_SHIFTED.value


def capability_of(device: torch.device) -> int:
    """Return ten times the major number of a card's compute capability."""
    if device.type != "cuda":
        return WITHOUT_CARD
    return 10 * torch.cuda.get_device_capability(device)[0]


@triton.jit
def scale_and_inverse(largest, finite, CODES: tl.constexpr):
    """Return the scales of rows whose largest magnitudes are `largest`, NaN if a row is not finite,
    and their inverses.
    """
    most = _MOST_INT8
    if CODES != INT8:
        most = _MOST_FP8
    tiny = (largest <= _TINY) | (finite == 0)
    scale = tl.where(tiny, 0.0, tl.div_rn(largest, tl.full(largest.shape, most, tl.float32)))
    inverse = tl.where(tiny, 0.0, tl.div_rn(tl.full(largest.shape, most, tl.float32), largest))
    return tl.where(finite != 0, scale, float("nan")), inverse


@triton.jit
def is_finite(x):
    """Return 1 for finite numbers and 0 for others, int32."""
    return (tl.abs(x) < _INFINITE).to(tl.int32)


@triton.jit
def encoded(x, inverse, finite, CODES: tl.constexpr):
    """Return the codes of float32 numbers as int8. Rows that are not finite get codes of 0."""
    y = tl.where(finite != 0, x * inverse, 0.0)
    if CODES == INT8:
        return ((y + _ROUNDING) - _ROUNDING).to(tl.int32).to(tl.int8)
    bits = y.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    # exponents count from 127 in float32, from 7 in e4m3
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = ((tl.abs(y) * _STEPS + _ROUNDING) - _ROUNDING).to(tl.int32)
    return (tl.where(tl.abs(y) < _SUBNORMAL, small, normal) | sign).to(tl.int8)


@triton.jit
def decoded(codes, DTYPE: tl.constexpr, CODES: tl.constexpr):
    """Return int8 codes as exact numbers of DTYPE: the numbers that `scale_of` belongs to. Plain
    numbers are converted.
    """
    if CODES == FP8:
        return codes.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    if CODES != FP8_SHIFTED:
        return codes.to(DTYPE)
    bits = codes.to(tl.int16)
    return ((bits & 0x7F) << 7 | (bits & 0x80) << 8).to(tl.float16, bitcast=True).to(DTYPE)


@triton.jit
def scale_of(scale, CODES: tl.constexpr):
    """Return the factor of the numbers that `decoded` returns for codes with this scale."""
    if CODES == FP8_SHIFTED:
        return scale * 256.0
    return scale
