"""MLPs with and without a gate."""

from functools import partial

from nano_inference.arrays import Tensor
from nano_inference.models.activations import UNGATED
from nano_inference.models.blocks.linear import Linear, row_parallel
from nano_inference.models.blocks.step import Block, ModelPart, Step
from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.interface import X


class GatedMlp:
    """down(activation(gate(x)) * up(x)), with one product for gate and up."""

    def __init__(self, part: ModelPart, layer: int) -> None:
        self.activation = part.spec.activation
        self.gate_up = Linear(part, f"layers.{layer}.gate_up")
        self.down = _down(part, layer)

    def __call__(self, step: Step[X], x: X) -> X:
        return self.down(step, step.ops.gate(self.gate_up(step, x), self.activation))


class Mlp:
    """down(activation(up(x))) (Apertus, Arcee, NanoChat)."""

    def __init__(self, part: ModelPart, layer: int) -> None:
        name, spec = f"layers.{layer}.", part.spec
        self.up = Linear(part, name + "up")
        self.activate = partial(_activate, spec.activation, part.params.get(name + "act"))
        self.down = _down(part, layer)
        self.width, self.dtype = spec.intermediate_size, part.dtype

    def __call__(self, step: Step[X], x: X) -> X:
        up = self.up(step, x)
        inner = step.ops.call(step.batch, self.activate, (up,), self.width, self.dtype)
        return self.down(step, inner)


def _down(part: ModelPart, layer: int) -> Block:
    """Return the output product of a layer's MLP."""
    shard = part.exchange.part
    columns, segments = shard.inner_columns, shard.inner_segments_of(layer)
    return row_parallel(part, f"layers.{layer}.down", columns, segments)


def _activate(
    activation: str, numbers: Tensor | None, _batch: ForwardBatch, out: Tensor, x: Tensor
) -> None:
    """Fill `out` with the activation of x, with its parameters `numbers` if it has any."""
    out.copy_(UNGATED[activation](x.float(), numbers))
