"""Products of matrices: the vendor's, or our own where a row's bits must not depend on how many rows there are."""

import torch
from torch import Tensor
from torch.nn import functional

from nano_inference.ops import reference


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X [N, K] @ weight [M, K].T (+ bias) -> [N, M] in the weight's dtype, by the vendor's library."""
    return functional.linear(x.to(weight.dtype), weight, bias)


def product_float32(x: Tensor, weight: Tensor) -> Tensor:
    """The same, not rounded: float32 [N, M]."""
    if x.is_cuda and weight.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return functional.linear(x.float(), weight.float())


def invariant_product(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The same in another dtype, by a kernel whose order of additions depends on the shape of `weight` alone."""
    return reference.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(dtype)
