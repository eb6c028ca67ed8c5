"""A layer of experts and its gradient by the kernels.

The engine chose the experts of each row. A row's output is the sum of weight times product over its
experts by rising id, then the shared expert's. An expert's gradients add up its rows in order.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from nano_inference.models.blocks.experts import EXPERT_BIASES
from nano_inference.models.spec.experts import MoeSpec
from nano_inference.ops.gradients import Choices, RouteShape
from nano_inference.rl.backward.products import product, product_gradient
from nano_inference.rl.backward.weights import Totals, Weights


class MlpRows(NamedTuple):
    """Rows of choices or of the shared expert within an expert, which its gradient needs."""

    gate_up: Tensor
    gated: Tensor
    out: Tensor


class ExpertsState(NamedTuple):
    """Values of a layer of experts that its gradient needs."""

    normed: Tensor
    ids: Tensor
    logits: Tensor
    weights: Tensor
    choices: Choices
    chosen: MlpRows
    shared: MlpRows | None


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
        kernels, ids = weights.kernels, ids.contiguous()
        logits = self._logits(weights, normed)
        factors = kernels.route_weights(logits, ids, self.shape)
        choices = kernels.choices(ids, self.moe.num_experts)
        gate_up = self._products(weights, "experts_gate_up", normed[choices.rows], choices)
        gated = kernels.gate(gate_up, self.activation)
        chosen = MlpRows(gate_up, gated, self._products(weights, "experts_down", gated, choices))
        out, shared = kernels.sum_experts(chosen.out, choices, factors), None
        if self.moe.shared is not None:
            gate_up = product(weights, self.name + "shared_gate_up", normed)
            gated = kernels.gate(gate_up, self.activation)
            shared = MlpRows(gate_up, gated, product(weights, self.name + "shared_down", gated))
            out += shared.out * factors[:, -1:]
        return out, ExpertsState(normed, ids, logits, factors, choices, chosen, shared)

    def gradient(
        self, weights: Weights, state: ExpertsState, d_out: Tensor, totals: Totals
    ) -> Tensor:
        """Return the gradient of the rows, and add those of the layer's parameters."""
        d_factors = state.weights.new_empty(state.weights.shape)
        d_normed = self._chosen_gradient(weights, state, d_out, d_factors, totals)
        if state.shared is not None:
            self._shared_gradient(weights, state, state.shared, d_out, d_normed, d_factors, totals)
        self._router_gradient(weights, state, d_factors, d_normed, totals)
        return d_normed

    def _chosen_gradient(
        self,
        weights: Weights,
        state: ExpertsState,
        d_out: Tensor,
        d_factors: Tensor,
        totals: Totals,
    ) -> Tensor:
        kernels, choices, chosen = weights.kernels, state.choices, state.chosen
        rows = choices.rows
        d_y = d_out[rows]
        d_factors[rows, choices.order % choices.per_row] = kernels.row_products(d_y, chosen.out)
        d_y *= choices.weights_of(state.weights)
        d_gated = self._products_gradient(
            weights, "experts_down", chosen.gated, d_y, choices, totals
        )
        d_gate_up = kernels.gate_gradient(chosen.gate_up, self.activation, d_gated)
        d_inputs = self._products_gradient(
            weights, "experts_gate_up", state.normed[rows], d_gate_up, choices, totals
        )
        return kernels.sum_experts(d_inputs, choices, None)

    def _products(self, weights: Weights, part: str, x: Tensor, choices: Choices) -> Tensor:
        """Multiply the row of each choice by a matrix of its expert."""
        matrices = weights.forward_experts(self.name + part, self.moe.num_experts)
        bias = weights.vector(f"{self.name}{part}_bias")
        return weights.kernels.expert_products(x, matrices, choices, bias)

    def _products_gradient(
        self,
        weights: Weights,
        part: str,
        x: Tensor,
        d_out: Tensor,
        choices: Choices,
        totals: Totals,
    ) -> Tensor:
        """Return the gradient of the inputs of one of the experts' products."""
        kernels, name = weights.kernels, self.name + part
        if (total := totals.total(name)) is not None:
            kernels.add_expert_outers(d_out, x, choices, total)
        if (total := totals.total(f"{name}_bias")) is not None:
            kernels.add_expert_columns(d_out, choices, total)
        matrices = weights.backward_experts(name, self.moe.num_experts)
        return kernels.expert_products(kernels.rounded(d_out), matrices, choices)

    def _shared_gradient(
        self,
        weights: Weights,
        state: ExpertsState,
        shared: MlpRows,
        d_out: Tensor,
        d_normed: Tensor,
        d_factors: Tensor,
        totals: Totals,
    ) -> None:
        kernels = weights.kernels
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
        d_logits = weights.kernels.route_gradient(state.logits, state.ids, self.shape, d_factors)
        if (total := totals.total(self.name + EXPERT_BIASES[0])) is not None:
            exact.add_columns(d_logits, total)
        if (total := totals.total(name)) is not None:
            exact.add_outer(d_logits, state.normed.float(), total, scale)
        router = exact.packed_turned(weights.plain(name).float())
        exact.add_product(d_logits, router, d_normed, scale)
