"""The gated delta rule (arXiv:2412.06464; Qwen3-Next, Qwen3.5)."""

from nano_inference.models.blocks.linear import Linear
from nano_inference.models.blocks.step import ModelPart, Step
from nano_inference.models.spec.states import DeltaNet as DeltaNetSpec
from nano_inference.ops.interface import X
from nano_inference.ops.state import DeltaWeights


class DeltaNet:
    """A block whose heads each carry a matrix along a sequence instead of attending to keys."""

    def __init__(self, part: ModelPart, layer: int) -> None:
        name, params, net = f"layers.{layer}.", part.params, part.spec.state
        assert isinstance(net, DeltaNetSpec)
        self.layer = layer
        self.mix_in, self.mix_out = Linear(part, name + "mix_in"), Linear(part, name + "mix_out")
        self.weights = DeltaWeights(
            params[name + "conv"],
            params[name + "log_decay"],
            params[name + "decay_bias"],
            params[name + "mix_norm"],
            part.spec.rms_norm_eps,
            net.key_heads,
            net.value_heads,
            net.key_dim,
            net.value_dim,
            net.in_tiles,
        )

    def __call__(self, step: Step[X], x: X) -> X:
        projected, states = self.mix_in(step, x), step.view.states
        assert states is not None
        mixed = step.ops.delta_net(projected, self.weights, step.batch, states, self.layer)
        return self.mix_out(step, mixed)
