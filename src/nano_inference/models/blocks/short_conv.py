"""The gated short convolution (LFM2)."""

from nano_inference.models.blocks.linear import Linear
from nano_inference.models.blocks.step import ModelPart, Step
from nano_inference.ops.interface import X
from nano_inference.ops.state import ShortConvWeights


class ShortConv:
    """A block whose rows read a few previous rows through a convolution."""

    def __init__(self, part: ModelPart, layer: int) -> None:
        name = f"layers.{layer}."
        self.layer = layer
        self.mix_in, self.mix_out = Linear(part, name + "mix_in"), Linear(part, name + "mix_out")
        self.weights = ShortConvWeights(
            part.params[name + "conv"], part.params.get(name + "conv_bias")
        )

    def __call__(self, step: Step[X], x: X) -> X:
        projected, states = self.mix_in(step, x), step.view.states
        assert states is not None
        mixed = step.ops.short_conv(projected, self.weights, step.batch, states, self.layer)
        return self.mix_out(step, mixed)
