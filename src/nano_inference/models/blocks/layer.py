"""`Layer`: a norm and a block that mixes rows, a norm and a block that works on single rows."""

from typing import Protocol

from nano_inference.models.blocks.step import Block, ModelPart, Step
from nano_inference.ops.interface import X
from nano_inference.ops.rowwise import Norm


class AnyLayer(Protocol):
    """A layer of the decoder.

    The residual stream, float32 [N, H], does not include the previous layer's output yet: the next
    norm adds it.
    """

    def __call__(self, step: Step[X], x: X | None, residual: X) -> tuple[X | None, X]:
        """Compute (previous layer's output, residual) -> (this layer's output, residual)."""
        ...


class Layer:
    """A transformer layer.

    Args:
        part: Part of the model that holds the layer.
        index: Number of the layer.
        mixer: Block that mixes the rows of a sequence, such as attention.
        mlp: Block that processes single rows.
    """

    def __init__(self, part: ModelPart, index: int, mixer: Block, mlp: Block) -> None:
        self.index, self.mixer, self.mlp = index, mixer, mlp
        self.mixer_norm = part.norm(f"layers.{index}.attn_norm")
        self.mlp_norm = part.norm(f"layers.{index}.mlp_norm")
        self.scale, self.hidden_size = part.spec.residual_scale, part.spec.hidden_size
        self.not_rounded = part.not_rounded

    def __call__(self, step: Step[X], x: X | None, residual: X) -> tuple[X, X]:
        normed, residual = step.ops.rms_norm(x, residual, self.mixer_norm, self.scale)
        residual = step.tapped(self.index, residual, self.hidden_size)
        x = self.mixer(step, normed)
        normed, residual = step.ops.rms_norm(x, residual, self.mlp_norm, self.scale)
        return self.mlp(step, normed), residual


class NormedAfter:
    """A block whose output is normalized before it is added to the residual stream."""

    def __init__(self, block: Block, norm: Norm) -> None:
        self.block, self.norm = block, norm

    def __call__(self, step: Step[X], x: X) -> X:
        return step.ops.rms_norm(None, self.block(step, x), self.norm, 1.0)[0]
