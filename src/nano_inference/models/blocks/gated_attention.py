"""Attention with a gate on its output (Qwen3-Next, Qwen3.5)."""

from nano_inference.models.blocks.attention import Attend, output
from nano_inference.models.blocks.linear import Linear
from nano_inference.models.blocks.step import ModelPart, Step
from nano_inference.ops.interface import X


class GatedAttention:
    """Attention whose output is multiplied by the sigmoid of a projection.

    The product of queries, keys and values also makes that projection, in its first columns.
    """

    def __init__(self, part: ModelPart, layer: int) -> None:
        spec = part.spec
        self.qkv = Linear(part, f"layers.{layer}.qkv")
        self.attend = Attend(part, layer)
        self.o = output(part, layer)
        self.width = spec.num_heads * spec.head_dim
        self.end = 2 * self.width + 2 * spec.num_kv_heads * spec.head_dim

    def __call__(self, step: Step[X], x: X) -> X:
        ops, made = step.ops, self.qkv(step, x)
        gate = ops.columns(made, 0, self.width)
        attended = self.attend(step, ops.columns(made, self.width, self.end))
        return self.o(step, ops.sigmoid_gate(attended, gate))

    def store(self, step: Step[X], x: X) -> X:
        """Store the keys and values of rows. Return their queries."""
        qkv = step.ops.columns(self.qkv(step, x), self.width, self.end)
        return self.attend.store(step, qkv)
