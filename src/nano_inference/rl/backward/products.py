"""Products with a decoder's weights and adapters, and their gradients by the kernels."""

import torch
from torch import Tensor

from nano_inference.rl.backward.weights import AdapterPart, Totals, Weights


def product(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Multiply rows [N, C] by a weight [R, C], with its bias and adapters: float32 [N, R]."""
    kernels, bias = weights.kernels, weights.vector(f"{name}_bias")
    out = kernels.product(x, weights.forward(name), bias)
    for part in weights.adapters.get(name, ()):
        inner = _inner(weights, part, x)
        weights.exact.add_product(
            inner, weights.exact.packed(part.b), part.columns_of(out), part.scale
        )
    return out


def add_product(weights: Weights, name: str, x: Tensor, out: Tensor, scale: float) -> None:
    """Add `scale` times a product to `out`."""
    if name in weights.adapters:
        out += product(weights, name, x) * scale
        return
    weights.kernels.add_product(
        *(x, weights.forward(name), out, scale, weights.vector(f"{name}_bias"))
    )


def product_gradient(
    weights: Weights, name: str, x: Tensor, d_out: Tensor, totals: Totals
) -> Tensor:
    """Return the gradient of a product's input, and add those of its weight, bias and adapters."""
    kernels = weights.kernels
    if (total := totals.total(name)) is not None:
        kernels.add_outer(d_out, x, total)
    if (total := totals.total(f"{name}_bias")) is not None:
        kernels.add_columns(d_out, total)
    parts = weights.backward(name)
    d_x = torch.zeros(len(d_out), parts[0].rows, device=d_out.device)
    columns = kernels.rounded(d_out).split(kernels.most_added, dim=1)
    for part, some in zip(parts, columns, strict=True):
        kernels.add_product(some.contiguous(), part, d_x)
    for part in weights.adapters.get(name, ()):
        _adapter_gradient(weights, part, x, d_out, d_x, totals)
    return d_x


def _adapter_gradient(
    weights: Weights, part: AdapterPart, x: Tensor, d_out: Tensor, d_x: Tensor, totals: Totals
) -> None:
    exact, d_part = weights.exact, part.columns_of(d_out).contiguous()
    if (total := totals.total(part.b_name)) is not None:
        exact.add_outer(d_part, _inner(weights, part, x), total, part.scale)
    d_inner = exact.product(d_part, exact.packed_turned(part.b)) * part.scale
    if (total := totals.total(part.a_name)) is not None:
        exact.add_outer(d_inner, x.float(), total)
    exact.add_product(d_inner, exact.packed_turned(part.a), d_x)


def _inner(weights: Weights, part: AdapterPart, x: Tensor) -> Tensor:
    return weights.exact.product(x.to(torch.float32), weights.exact.packed(part.a))
