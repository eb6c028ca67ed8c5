"""Row operations in plain arithmetic, for host arrays and tensors.

The reference backend implements its operations with them. Every backend may call them within a
trunk.
"""

import math
from typing import NamedTuple

from nano_inference.arrays import Dtype, Tensor, namespace
from nano_inference.ops.settings import CLAMP, SLOPE

LONG_SUM = 2**15  # sums of at least this many numbers are split between threads by torch


class Norm(NamedTuple):
    """One RMS norm: x / rms(x) * (offset + weight), rounded to dtype once, at the end. Without a
    weight, rows are only rounded.
    """

    weight: Tensor | None  # [width]
    eps: float
    offset: float
    dtype: Dtype


def normed_rows(x: Tensor, norm: Norm) -> Tensor:
    """Normalize x [..., width] along its last axis."""
    if norm.weight is None:
        return x.to(norm.dtype)
    x = x.float()
    alone = x.numel() == x.shape[-1] >= LONG_SUM
    squares = x.expand(2, *x.shape).square() if alone else x.square()
    mean = squares.mean(dim=-1, keepdim=True)
    scale = namespace(x).rsqrt((mean[0] if alone else mean) + norm.eps)
    return (x * scale * (norm.offset + norm.weight.float())).to(norm.dtype)


def gate(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """Compute activation(gate) * up in float32. All activations have the form x * sigmoid(y).

    The sigmoid is written out, since a library's sigmoid rounds differently at the ends of an
    array.
    """
    half = gate_up.shape[-1] // 2
    first, second = gate_up.float().split(half, dim=-1)
    y = first
    if activation == "gelu_tanh":
        # arXiv:1606.08415: x / 2 * (1 + tanh(z)) = x * sigmoid(2 z)
        y = 2 * math.sqrt(2 / math.pi) * (first + 0.044715 * first * first * first)
    elif activation == "clamped_swiglu":
        first = first.clamp(max=CLAMP)
        y, second = SLOPE * first, second.clamp(-CLAMP, CLAMP) + 1
    return (first / (1 + namespace(y).exp(-y)) * second).to(gate_up.dtype)
