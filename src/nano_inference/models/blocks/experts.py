"""Layers of experts, computed by `ops/moe.py`."""

from functools import partial

from nano_inference.arrays import Tensor
from nano_inference.models.blocks.step import ModelPart, Step
from nano_inference.models.spec.experts import MoeSpec
from nano_inference.ops.interface import Ops, X
from nano_inference.ops.moe import Biases, Experts, Note, Shared

# in the order of `Biases`
EXPERT_BIASES = ("router_logits_bias", "experts_gate_up_bias", "experts_down_bias")


class Mixture:
    """A router and its experts."""

    def __init__(self, part: ModelPart, layer: int, moe: MoeSpec) -> None:
        self.layer, self.ops = layer, part.ops
        self.experts = experts_of(part, layer, moe)
        self.exchange = part.exchange.exchange
        self.hidden_size, self.float32 = part.spec.hidden_size, part.float32

    def __call__(self, step: Step[X], x: X, routed: X | None = None) -> X:
        """Pass rows x through experts. The router reads `routed`, or x if that is None."""
        if step.routes is None:
            return step.ops.moe(x, self.experts, self.exchange, None, routed)
        noted = partial(step.routes.compute, self.layer, self._noting)
        rows = (x,) if routed is None else (x, routed)
        return step.ops.call(step.batch, noted, rows, self.hidden_size, self.float32)

    def _noting(self, x: Tensor, note: Note, routed: Tensor | None) -> Tensor:
        return self.ops.moe(x, self.experts, self.exchange, note, routed)

    def serve(self, ops: Ops, nothing: Tensor) -> None:
        """Compute rows of other engines. `nothing` [0, H] takes the place of this engine's rows."""
        ops.moe(nothing, self.experts, self.exchange)


def experts_of(part: ModelPart, layer: int, moe: MoeSpec) -> Experts:
    """Return the weights of a layer's experts in the form that operations read."""
    name, params = f"layers.{layer}.", part.params
    shared = None
    if moe.shared:
        shared = Shared(
            params[name + "shared_gate_up"],
            params[name + "shared_down"],
            gated=moe.shared.gate is not None,
        )
    return Experts(
        router=params[name + "router"],
        gate_up=params[name + "experts_gate_up"],
        down=params[name + "experts_down"],
        num_experts=moe.num_experts,
        routing=moe.routing,
        activation=part.spec.activation,
        bias=params[name + "router_bias"].flatten() if moe.bias else None,
        shared=shared,
        biases=Biases(*(params[name + own] for own in EXPERT_BIASES)) if moe.biases else None,
        scales=params[name + "router_scales"] if moe.scales is not None else None,
    )
