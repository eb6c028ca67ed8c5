"""A layer of experts and its gradient by the kernels.

The engine chose the experts of each row. A row's output is the sum of weight times product over its
experts by rising id, then the shared expert's. An expert's gradients add up its rows in order.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from nano_inference.models.blocks.experts import EXPERT_BIASES
from nano_inference.models.spec.experts import MoeSpec
from nano_inference.ops.gradients import ExpertOps, RouteShape
from nano_inference.rl.backward.products import product, product_gradient
from nano_inference.rl.backward.weights import Totals, Weights


class ExpertRows(NamedTuple):
    """Rows of one expert, and the values that their gradient needs."""

    expert: int
    rows: Tensor  # int64 [n], rising
    places: Tensor  # int64 [n]: index of the expert among those of the row
    inputs: Tensor
    gate_up: Tensor
    gated: Tensor
    out: Tensor


class SharedState(NamedTuple):
    """Values of the shared expert that its gradient needs."""

    gate_up: Tensor
    gated: Tensor
    out: Tensor


class ExpertsState(NamedTuple):
    """Values of a layer of experts that its gradient needs."""

    normed: Tensor
    ids: Tensor
    logits: Tensor
    weights: Tensor
    experts: list[ExpertRows]
    shared: SharedState | None


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one layer.

    Attributes:
        moe: Description of the model's experts.
        name: Beginning of the names of the layer's parameters.
        activation: Name of the experts' gate.
    """

    moe: MoeSpec
    name: str
    activation: str

    @property
    def shape(self) -> RouteShape:
        """Routing of the layer."""
        lone = self.moe.shared
        kind = "none" if lone is None else "gated" if lone.gate is not None else "plain"
        return RouteShape(self.moe.num_experts, self.moe.routing, kind)

    def forward(self, weights: Weights, normed: Tensor, ids: Tensor) -> tuple[Tensor, ExpertsState]:
        """Pass rows through their experts, `ids` int64 [N, K], rising: float32 [N, H]."""
        kernels, ids = _expert_ops(weights), ids.contiguous()
        logits = self._logits(weights, normed)
        factors = kernels.route_weights(logits, ids, self.shape)
        out, experts = torch.zeros(normed.shape), list[ExpertRows]()
        gate_ups = weights.forward_parts(self.name + "experts_gate_up", self.moe.num_experts)
        downs = weights.forward_parts(self.name + "experts_down", self.moe.num_experts)
        biases = [self._biases(weights, part) for part in EXPERT_BIASES[1:]]
        for expert, rows, places in _by_expert(ids, self.moe.num_experts):
            inputs = normed[rows]
            gate_up = kernels.product(inputs, gate_ups[expert], biases[0][expert])
            gated = kernels.gate(gate_up, self.activation)
            y = kernels.product(gated, downs[expert], biases[1][expert])
            kernels.add_rows(y * factors[rows, places, None], rows, out)
            experts.append(ExpertRows(expert, rows, places, inputs, gate_up, gated, y))
        shared = None
        if self.moe.shared is not None:
            gate_up = product(weights, self.name + "shared_gate_up", normed)
            gated = kernels.gate(gate_up, self.activation)
            shared = SharedState(gate_up, gated, product(weights, self.name + "shared_down", gated))
            out += shared.out * factors[:, -1:]
        return out, ExpertsState(normed, ids, logits, factors, experts, shared)

    def gradient(
        self, weights: Weights, state: ExpertsState, d_out: Tensor, totals: Totals
    ) -> Tensor:
        """Return the gradient of the rows, and add those of the layer's parameters."""
        d_normed, d_factors = torch.zeros(d_out.shape), torch.zeros(state.weights.shape)
        for chosen in state.experts:
            self._expert_gradient(
                weights, chosen, state.weights, d_out, d_normed, d_factors, totals
            )
        if state.shared is not None:
            self._shared_gradient(weights, state, state.shared, d_out, d_normed, d_factors, totals)
        self._router_gradient(weights, state, d_factors, d_normed, totals)
        return d_normed

    def _expert_gradient(
        self,
        weights: Weights,
        chosen: ExpertRows,
        factors: Tensor,
        d_out: Tensor,
        d_normed: Tensor,
        d_factors: Tensor,
        totals: Totals,
    ) -> None:
        kernels = _expert_ops(weights)
        d_rows = d_out[chosen.rows]
        d_factors[chosen.rows, chosen.places] = kernels.row_products(d_rows, chosen.out)
        d_y = d_rows * factors[chosen.rows, chosen.places, None]
        d_gated = torch.zeros(chosen.gated.shape)
        self._product_gradient(weights, "experts_down", chosen, chosen.gated, d_y, d_gated, totals)
        d_gate_up = kernels.gate_gradient(chosen.gate_up, self.activation, d_gated)
        d_inputs = torch.zeros(chosen.inputs.shape)
        self._product_gradient(
            weights, "experts_gate_up", chosen, chosen.inputs, d_gate_up, d_inputs, totals
        )
        kernels.add_rows(d_inputs, chosen.rows, d_normed)

    def _product_gradient(
        self,
        weights: Weights,
        part: str,
        chosen: ExpertRows,
        x: Tensor,
        d_out: Tensor,
        d_x: Tensor,
        totals: Totals,
    ) -> None:
        """Add the gradient of the input of one of an expert's products to `d_x`."""
        kernels, count, name = weights.kernels, self.moe.num_experts, self.name + part
        if (total := totals.total(name)) is not None:
            kernels.add_outer(d_out, x, total.chunk(count)[chosen.expert])
        if (total := totals.total(f"{name}_bias")) is not None:
            kernels.add_columns(d_out, total.chunk(count)[chosen.expert])
        turned = weights.backward_parts(name, count)[chosen.expert]
        kernels.add_product(kernels.rounded(d_out), turned, d_x)

    def _shared_gradient(
        self,
        weights: Weights,
        state: ExpertsState,
        shared: SharedState,
        d_out: Tensor,
        d_normed: Tensor,
        d_factors: Tensor,
        totals: Totals,
    ) -> None:
        kernels = _expert_ops(weights)
        d_factors[:, -1] = kernels.row_products(d_out, shared.out)
        d_y = d_out * state.weights[:, -1:]
        d_gated = product_gradient(weights, self.name + "shared_down", shared.gated, d_y, totals)
        d_gate_up = kernels.gate_gradient(shared.gate_up, self.activation, d_gated)
        d_normed += product_gradient(
            weights, self.name + "shared_gate_up", state.normed, d_gate_up, totals
        )

    def _logits(self, weights: Weights, normed: Tensor) -> Tensor:
        """Return the router's logits, from float32 products."""
        exact, scale = weights.exact, self.moe.routing.logit_scale
        router = exact.packed(weights.plain(self.name + "router").float())
        logits = exact.product(normed.float(), router)
        if scale != 1:
            logits *= scale
        bias = weights.vector(self.name + EXPERT_BIASES[0])
        return logits if bias is None else logits + bias.float()

    def _router_gradient(
        self,
        weights: Weights,
        state: ExpertsState,
        d_factors: Tensor,
        d_normed: Tensor,
        totals: Totals,
    ) -> None:
        exact, scale, name = weights.exact, self.moe.routing.logit_scale, self.name + "router"
        d_logits = _expert_ops(weights).route_gradient(
            state.logits, state.ids, self.shape, d_factors
        )
        if (total := totals.total(self.name + EXPERT_BIASES[0])) is not None:
            exact.add_columns(d_logits, total)
        if (total := totals.total(name)) is not None:
            exact.add_outer(d_logits, state.normed.float(), total, scale)
        router = exact.packed_turned(weights.plain(name).float())
        exact.add_product(d_logits, router, d_normed, scale)

    def _biases(self, weights: Weights, part: str) -> tuple[Tensor | None, ...]:
        """Return a bias of every expert."""
        whole = weights.vector(self.name + part)
        return (
            (None,) * self.moe.num_experts if whole is None else whole.chunk(self.moe.num_experts)
        )


def _by_expert(ids: Tensor, num_experts: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each expert that has rows, its rows in rising order, and its place in each of them."""
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=num_experts).tolist()
    for expert, pairs in enumerate(order.split(counts)):
        if len(pairs):
            yield expert, pairs // ids.shape[1], pairs % ids.shape[1]


def _expert_ops(weights: Weights) -> ExpertOps:
    """Return operations that experts need, which `coverage.py` has checked."""
    return cast(ExpertOps, weights.kernels)
