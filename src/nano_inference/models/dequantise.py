"""From the codes of a quantisation to the numbers that they stand for, in float32: one function a
format, of tensors alone.
"""

import torch
from torch import Tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FLOAT4 = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
_FLOAT4_PAIRS = torch.stack((_FLOAT4.repeat(16), _FLOAT4.repeat_interleave(16)), dim=1)  # by byte


def mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """OCP's microscaling format: floats of 4 bits (e2m1), of which 32 share an exponent.

    Args:
        blocks: uint8 [..., groups, 16]; of the two numbers in a byte the first stands in its low
            half.
        scales: uint8 [..., groups]: e8m0.

    Returns float32 [..., groups * 32].
    """
    return (float4(blocks) * float8_exponents(scales).unsqueeze(-1)).flatten(-2)


def float4(packed: Tensor) -> Tensor:
    """e2m1 numbers, two a byte, the first in its low half: uint8 [..., n] -> float32 [..., 2n]."""
    return _FLOAT4_PAIRS.to(packed.device)[packed.int()].flatten(-2)


def float8_exponents(scales: Tensor) -> Tensor:
    """e8m0 numbers: uint8 e is 2^(e - 127), and 255 is NaN; float32 of the same shape."""
    return scales.view(torch.float8_e8m0fnu).float()
