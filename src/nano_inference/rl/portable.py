"""Functions for losses whose bits are the same on every processor. Those of torch differ between
instruction sets.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from nano_inference.errors import InvalidRequest

_SERIES = [1 / math.factorial(k) for k in range(15)]  # exp(r) to float64's last digit, r < 0.35


def portable_exp(values: Tensor) -> Tensor:
    """Return exponentials with the same bits on every processor, differentiable.

    `torch.exp` has other last bits on other instruction sets. These are within 0.501 units in the
    last place of float32: products and sums of float64, which every processor rounds alike.

    Args:
        values: Exponents, float32 of any shape.

    Returns:
        exp(values), float32 of this shape. It overflows to infinity above 88.7.

    Raises `InvalidRequest` for another dtype.
    """
    _require_float32(values)
    return _Exp.apply(values)


def exact_sum(values: Tensor) -> Tensor:
    """Return the sum of all values, rounded once, differentiable.

    The order of additions of `torch.sum` depends on the processor. An exact sum has no order.

    Args:
        values: Numbers, float32 of any shape.

    Returns:
        Sum, float32 scalar; 0 for no values, nan for infinities of both signs.

    Raises `InvalidRequest` for another dtype.
    """
    _require_float32(values)
    return _Sum.apply(values)


def _require_float32(values: Tensor) -> None:
    if values.dtype != torch.float32:
        raise InvalidRequest(f"the values are {values.dtype}; convert them to torch.float32.")


class _Exp(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        x = values.double().clamp(-200, 200)
        powers = (x * (1 / math.log(2))).round()
        rest = x - powers * math.log(2)
        out = torch.full_like(rest, _SERIES[-1])
        for factor in reversed(_SERIES[:-1]):
            out = out * rest + factor
        scale = (powers.nan_to_num(0).long() + 1023) << 52  # bits of 2 ** powers
        out = (out * scale.view(torch.float64)).float()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore
        (out,) = ctx.saved_tensors
        return gradient * out


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.shape = values.shape
        try:
            total = math.fsum(values.flatten().tolist())
        except ValueError:  # infinities of both signs
            total = math.nan
        return values.new_tensor(total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore
        return gradient.expand(ctx.shape)
