"""Layers of experts: the parts that all backends share.

A row's result is the float32 sum of weight times product over the row's experts, by rising expert
id. The shared expert, if there is one, is added last. Each product depends only on the row and the
expert's weights. Neither the other rows of an expert nor the rank that holds it change a bit.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from nano_inference.arrays import Tensor, namespace
from nano_inference.ops.settings import Routing


class Shared(NamedTuple):
    """The expert that every row is routed to, with inner width J. Every rank holds all of it."""

    gate_up: Any  # [2 * J, H]
    down: Any  # [H, J]
    gated: bool  # True: its weight is the sigmoid of the router's last logit; False: 1


class Biases(NamedTuple):
    """Biases of a layer of experts: one number for each row of the weight of the same name."""

    router: Tensor  # float32 [E]
    gate_up: Tensor  # [held * 2 * I], in the weights' dtype
    down: Tensor  # [held * H], likewise


class Experts(NamedTuple):
    """The experts of a layer, or a rank's share of them. There are E experts in all, each with
    width H and inner width I.
    """

    router: Any  # [E, H], and one more row if the shared expert has a gate
    gate_up: Any  # [held * 2 * I, H]: gate and up rows of one expert, then those of the next
    down: Any  # [held * H, I]
    num_experts: int  # E: number of experts of the layer over all ranks
    routing: Routing
    activation: str
    bias: Tensor | None = None  # float32 [E], the correction bias
    shared: Shared | None = None  # without biases
    biases: Biases | None = None
    scales: Tensor | None = None  # float32 [E]: factors of the experts' weights

    @property
    def num_held(self) -> int:
        """Number of experts whose weights are on this rank."""
        return self.down.shape[0] // self.router.shape[1]

    @property
    def num_weights(self) -> int:
        """Number of weights per row: its experts and the shared one."""
        return self.routing.per_token + (self.shared is not None)


class MoeSteps(NamedTuple):
    """The parts of a backend's `Ops.moe`, which different ranks may run.

    Attributes:
        route: (x [N, H], experts) -> ids int64 [N, K], rising in each row, and weights float32 [N,
            K]. The shared expert's weight follows if there is one.
        products: (x [M, H], rows int64 [P], held int64 [P], experts) -> [P, H]: row `rows[i]`
            through expert `held[i]`, an index among the experts of this rank.
        combine: (products [N, W, H], weights [N, W]) -> float32 [N, H], added in the order of W.
    """

    route: Callable[[Tensor, Experts], tuple[Tensor, Tensor]]
    products: Callable[[Tensor, Tensor, Tensor, Experts], Tensor]
    combine: Callable[[Tensor, Tensor], Tensor]


# Receive the ids [n, K] of some rows as they are routed, in row order.
Note = Callable[[Tensor], None]

# Send rows to the ranks of their experts and return the results: (steps, x [N, H], experts) ->
# float32 [N, H].
Exchange = Callable[[MoeSteps, Tensor, Experts], Tensor]


def record_experts(record: Tensor, slots: Tensor, ids: Tensor) -> None:
    """Implement `Ops.record_experts`. Padding rows are written to the last slot."""
    xp = namespace(ids)
    at = xp.where(slots < 0, len(record) - 1, slots)
    record.index_copy_(0, at, ids.to(xp.int16))


def mixture(
    steps: MoeSteps,
    x: Tensor,
    experts: Experts,
    exchange: Exchange | None,
    row_block: int,
    note: Note | None = None,
    routed: Tensor | None = None,
) -> Tensor:
    """Compute `Ops.moe`: x [N, H] -> float32 [N, H].

    Args:
        steps: Steps of the backend.
        x: Rows, in the weights' dtype.
        experts: Experts of the layer.
        exchange: Exchange with the ranks that hold other experts. None: all experts are on this
            rank.
        row_block: Number of rows computed together, for which K products [H] each are in memory.
            No bit depends on it.
        note: Callback that receives the expert ids of the rows routed on this rank. No bit depends
            on it.
        routed: Rows that the router reads, if not x. Requires all experts on this rank.
    """
    if note is not None:
        steps = steps._replace(route=partial(_noted, steps.route, note))
    if experts.scales is not None:
        steps = steps._replace(route=partial(_scaled, steps.route))
    if exchange is not None:
        if routed is not None:
            raise ValueError("a router that reads separate rows requires all experts on this rank.")
        return exchange(steps, x, experts)
    read = x if routed is None else routed
    blocks = [
        _all_here(steps, rows, own, experts)
        for rows, own in zip(x.split(row_block), read.split(row_block), strict=True)
    ]
    return blocks[0] if len(blocks) == 1 else namespace(x).cat(blocks)


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
    """Multiply the experts' weights by their scales."""
    assert experts.scales is not None
    ids, weights = route(x, experts)
    scaled = weights[:, : ids.shape[1]] * experts.scales[ids]
    return ids, namespace(ids).cat((scaled, weights[:, ids.shape[1] :]), dim=1)


def _all_here(steps: MoeSteps, x: Tensor, routed: Tensor, experts: Experts) -> Tensor:
    ids, weights = steps.route(routed, experts)
    rows = namespace(x).arange(len(x), device=x.device).repeat_interleave(ids.shape[1])
    products = steps.products(x, rows, ids.flatten(), experts)
    return summed(steps, products.reshape(*ids.shape, x.shape[1]), weights, x, experts)


def summed(
    steps: MoeSteps, products: Tensor, weights: Tensor, x: Tensor, experts: Experts
) -> Tensor:
    """Return float32 [N, H]: the weighted sum of the products [N, K, H] of the rows x [N, H] with
    their experts. The shared expert's product is computed here.
    """
    if experts.shared is not None:
        xp, (gate_up, down, _) = namespace(x), experts.shared
        rows = xp.arange(len(x), device=x.device)
        alone = experts._replace(gate_up=gate_up, down=down, biases=None)
        shared = steps.products(x, rows, xp.zeros_like(rows), alone)
        products = xp.cat((products, shared[:, None]), dim=1)
    return steps.combine(products, weights)
