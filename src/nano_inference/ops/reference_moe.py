"""The reference's layers of experts, in plain torch; see `ops/moe.py` for what is computed."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from nano_inference.ops.moe import Experts, MoeSteps

Linear = Callable[[Tensor, Tensor], Tensor]
Gate = Callable[[Tensor, str], Tensor]


def route(linear: Linear, x: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """See `MoeSteps`."""
    logits = linear(x.float(), experts.router.float())
    order = logits.sort(dim=-1, descending=True, stable=True).indices  # of equal ones the lower id
    ids = order[:, : experts.per_token].sort(dim=-1).values
    sizes = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
    chosen = sizes.gather(1, ids)
    return ids, chosen / (chosen if experts.renormalized else sizes).sum(dim=-1, keepdim=True)


def products(
    linear: Linear, gate: Gate, x: Tensor, rows: Tensor, held: Tensor, experts: Experts
) -> Tensor:
    """See `MoeSteps`. The rows of each expert are a product of their own, where a row's bits depend
    on it alone.
    """
    out = torch.empty((len(rows), x.shape[1]), dtype=x.dtype, device=x.device)
    gate_ups, downs = experts.gate_up.chunk(experts.num_held), experts.down.chunk(experts.num_held)
    for expert in held.unique().tolist():
        own = (held == expert).nonzero()[:, 0]
        inner = gate(linear(x[rows[own]], gate_ups[expert]), experts.activation)
        out[own] = linear(inner, downs[expert])
    return out


def combine(products: Tensor, weights: Tensor) -> Tensor:
    """See `MoeSteps`."""
    total = torch.zeros((len(products), products.shape[2]), device=products.device)
    for k in range(products.shape[1]):
        total += weights[:, k, None] * products[:, k].float()
    return total


def steps_of(linear: Linear, gate: Gate) -> MoeSteps:
    """The parts, by these products."""
    return MoeSteps(partial(route, linear), partial(products, linear, gate), combine)
