"""Layers of experts: what every backend does the same way.

A row's result is the sum, in float32 and by rising expert id, of weight times product over the
experts that it chose, and over the shared expert behind them where there is one. Each product is a
function of the row and the expert's weights alone, so neither the other rows of an expert nor the
rank that holds it change a bit.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_inference.ops.settings import Routing


class Shared(NamedTuple):
    """The expert that all rows go through, J inside; every rank holds all of it."""

    gate_up: Any  # [2 * J, H]
    down: Any  # [H, J]
    gated: bool  # its weight is the sigmoid of the router's last row; else 1


class Biases(NamedTuple):
    """Of a layer of experts: a number for each row of the weights that they belong to."""

    router: Tensor  # float32 [E]
    gate_up: Tensor  # [held * 2 * I], in the weights' dtype
    down: Tensor  # [held * H], likewise


class Experts(NamedTuple):
    """The experts of a layer, or those of them that a rank holds. E experts in all, H wide, I
    inside of each.
    """

    router: Any  # [E, H]; where the shared expert has a gate, that is one more row
    gate_up: Any  # [held * 2 * I, H]: gate and up rows of one expert, then those of the next
    down: Any  # [held * H, I]
    num_experts: int  # E: of the layer, wherever they are
    routing: Routing
    activation: str
    bias: Tensor | None = None  # float32 [E], the correction
    shared: Shared | None = None  # without biases
    biases: Biases | None = None
    scales: Tensor | None = None  # float32 [E]: what multiplies the experts' weights

    @property
    def num_held(self) -> int:
        """Whose weights are here."""
        return self.down.shape[0] // self.router.shape[1]

    @property
    def num_weights(self) -> int:
        """Of a row: its experts, and the shared one."""
        return self.routing.per_token + (self.shared is not None)


class MoeSteps(NamedTuple):
    """The parts of a backend's `Ops.moe`: what can be done at different ranks.

    Attributes:
        route: (x [N, H], experts) -> ids int64 [N, K], rising in each row, and weights float32 [N,
            K], with the shared expert's behind them where there is one.
        products: (x [M, H], rows int64 [P], held int64 [P], experts) -> [P, H]: row `rows[i]`
            through the expert that is number `held[i]` of those that are here.
        combine: (products [N, W, H], weights [N, W]) -> float32 [N, H], added in the order of W.
    """

    route: Callable[[Tensor, Experts], tuple[Tensor, Tensor]]
    products: Callable[[Tensor, Tensor, Tensor, Experts], Tensor]
    combine: Callable[[Tensor, Tensor], Tensor]


# Is given the ids [n, K] of some rows, in the order of rows, as they are routed.
Note = Callable[[Tensor], None]

# Who brings rows to the ranks of their experts and back: (steps, x [N, H], experts) -> float32 [N,
# H].
Exchange = Callable[[MoeSteps, Tensor, Experts], Tensor]


def mixture(
    steps: MoeSteps,
    x: Tensor,
    experts: Experts,
    exchange: Exchange | None,
    row_block: int,
    note: Note | None = None,
    routed: Tensor | None = None,
) -> Tensor:
    """`Ops.moe`: x [N, H] -> float32 [N, H].

    Args:
        steps: of the backend.
        x: rows, in the weights' dtype.
        experts: of the layer.
        exchange: who asks the other ranks; None: all experts are here.
        row_block: rows that are computed at once, each with K products of its width; no bit depends
            on it.
        note: is told which experts the rows that are routed here go through; no bit depends on it.
        routed: rows that the router reads, where they are not x; then all experts are here.
    """
    if note is not None:
        steps = steps._replace(route=partial(_noted, steps.route, note))
    if experts.scales is not None:
        steps = steps._replace(route=partial(_scaled, steps.route))
    if exchange is not None:
        if routed is not None:
            raise ValueError("experts are spread over ranks, and the router reads rows of its own.")
        return exchange(steps, x, experts)
    read = x if routed is None else routed
    blocks = [
        _all_here(steps, rows, own, experts)
        for rows, own in zip(x.split(row_block), read.split(row_block), strict=True)
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _noted(
    route: Callable[[Tensor, Experts], tuple[Tensor, Tensor]],
    note: Note,
    x: Tensor,
    experts: Experts,
) -> tuple[Tensor, Tensor]:
    ids, weights = route(x, experts)
    note(ids)
    return ids, weights


def _scaled(
    route: Callable[[Tensor, Experts], tuple[Tensor, Tensor]], x: Tensor, experts: Experts
) -> tuple[Tensor, Tensor]:
    """The experts' weights times the scales of these."""
    assert experts.scales is not None
    ids, weights = route(x, experts)
    own = weights[:, : ids.shape[1]] * experts.scales[ids]
    return ids, torch.cat((own, weights[:, ids.shape[1] :]), dim=1)


def _all_here(steps: MoeSteps, x: Tensor, routed: Tensor, experts: Experts) -> Tensor:
    ids, weights = steps.route(routed, experts)
    rows = torch.arange(len(x), device=x.device).repeat_interleave(ids.shape[1])
    products = steps.products(x, rows, ids.flatten(), experts)
    return summed(steps, products.view(*ids.shape, x.shape[1]), weights, x, experts)


def summed(
    steps: MoeSteps, products: Tensor, weights: Tensor, x: Tensor, experts: Experts
) -> Tensor:
    """What rows x [N, H] get of the products [N, K, H] of their experts, and of the shared one's,
    which is computed here: float32 [N, H].
    """
    if experts.shared is not None:
        gate_up, down, _ = experts.shared
        rows = torch.arange(len(x), device=x.device)
        alone = experts._replace(gate_up=gate_up, down=down, biases=None)
        own = steps.products(x, rows, torch.zeros_like(rows), alone)
        products = torch.cat((products, own[:, None]), dim=1)
    return steps.combine(products, weights)
