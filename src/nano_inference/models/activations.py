"""Activations of MLPs without a gate, in plain arithmetic. Every backend calls them in a trunk."""

from collections.abc import Callable, Mapping

from nano_inference.arrays import Tensor, namespace


def xielu(x: Tensor, numbers: Tensor) -> Tensor:
    """Compute xIELU (arXiv:2411.13010) of float32 x.

    `numbers`, float32 [4], are the layer's alpha_p and alpha_n before softplus, beta and eps.
    """
    xp = namespace(x)
    alpha_p, alpha_n = xp.nn.functional.softplus(numbers[:2])
    beta, eps = numbers[2:]
    # not expm1: the library rounds differently at the ends of an array
    below = (xp.exp(xp.minimum(x, eps)) - 1 - x) * (beta + alpha_n)
    return xp.where(x > 0, alpha_p * x * x, below) + beta * x


def relu2(x: Tensor, _: Tensor | None) -> Tensor:
    """Square the positive part of float32 x (arXiv:2109.08668)."""
    return x.clamp(min=0).square()


# (float32 x, numbers of the layer)
UNGATED: Mapping[str, Callable[..., Tensor]] = {"xielu": xielu, "relu2": relu2}
