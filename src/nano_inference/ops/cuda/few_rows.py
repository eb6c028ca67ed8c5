"""`FewRows`: the operations of a trunk for a few rows, of which several become one kernel.

A decode step of a small model is a chain of kernels that each take a few microseconds, and wait for
each other about as long. What a norm or a product gives is therefore not computed when it is asked
for, but when it is known who reads it:

    norm, product                     one kernel (q, k and v)
    product, addition to the residual one kernel (o, down)
    norm, product, gate               one kernel (gate and up)

So a layer is six kernels instead of nine. What does not fit is computed by the kernels of every
step: norms behind a block, norms in float32, and whatever has more rows than `FEW_ROWS`. As with
`ops/cpu/recorder.py` the decoder knows nothing of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nano_inference.batch import ForwardBatch
from nano_inference.ops.backend import FEW_ROWS, KvcacheView, Norm, Operations
from nano_inference.ops.cuda import few_rows_kernels as kernels
from nano_inference.ops.moe import Exchange, Experts


@dataclass(frozen=True, slots=True, eq=False)
class Normed:
    """A norm of the residual stream that nobody has computed yet."""

    residual: Tensor  # float32 [N, H], which nobody writes to
    norm: Norm


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A product that nobody has computed yet."""

    x: Tensor
    norm: Norm | None  # of x, where it is the residual stream
    weight: Tensor
    bias: Tensor | None


Value = Tensor | Normed | Product


class FewRows:
    """The calls of `Ops` that a trunk makes, on tensors and on values that are computed later.

    Args:
        ops: the plain operations.
    """

    def __init__(self, ops: Operations) -> None:
        self._ops = ops
        self.embed: Callable[..., Tensor] = ops.embed
        self.plan_attention: Callable[..., Any] = ops.plan_attention

    def made(self, value: Value) -> Tensor:
        """The value as a tensor."""
        if isinstance(value, Normed):
            return self._ops.rms_norm(None, value.residual, value.norm, 1.0)[0]
        if isinstance(value, Product):
            return kernels.product(value.x, value.norm, value.weight, value.bias)
        return value

    def rms_norm(
        self, x: Value | None, residual: Value, norm: Norm, scale: float = 1.0
    ) -> tuple[Value, Tensor]:
        """See `Ops.rms_norm`. The norm is computed by who reads it; a product is added as it is
        computed.
        """
        stream = self.made(residual)
        if len(stream) > FEW_ROWS:
            return self._ops.rms_norm(None if x is None else self.made(x), stream, norm, scale)
        if isinstance(x, Product):
            stream = kernels.product_added(x.x, x.norm, x.weight, x.bias, stream, scale)
        elif x is not None:
            return self._ops.rms_norm(self.made(x), stream, norm, scale)
        return Normed(stream, norm), stream

    def linear(
        self,
        x: Value,
        weight: Tensor,
        bias: Tensor | None = None,
        segments: tuple[int, ...] | None = None,
    ) -> Value:
        """See `Ops.linear`."""
        if segments is not None:  # a part of a sum over ranks is not rounded
            return self._ops.linear(self.made(x), weight, bias, segments)
        if isinstance(x, Normed) and x.norm.dtype == weight.dtype and len(x.residual) <= FEW_ROWS:
            return Product(x.residual, x.norm, weight, bias)
        rows = self.made(x)
        if len(rows) > FEW_ROWS:
            return self._ops.linear(rows, weight, bias)
        return Product(rows.to(weight.dtype), None, weight, bias)

    def gate(self, x: Value, activation: str = "silu") -> Tensor:
        """See `Ops.gate`."""
        if isinstance(x, Product):
            return kernels.product_gated(x.x, x.norm, x.weight, x.bias, activation)
        return self._ops.gate(self.made(x), activation)

    def moe(self, x: Value, experts: Experts, exchange: Exchange | None = None) -> Tensor:
        """See `Ops.moe`."""
        return self._ops.moe(self.made(x), experts, exchange)

    def rope_and_store(self, qkv: Value, *where: Any) -> Tensor:
        """See `Ops.rope_and_store`."""
        return self._ops.rope_and_store(self.made(qkv), *where)

    def call(
        self, batch: ForwardBatch, function: Any, inputs: Sequence[Value], *out: Any
    ) -> Tensor:
        """See `Ops.call`."""
        return self._ops.call(batch, function, [self.made(value) for value in inputs], *out)

    def columns(self, x: Value, start: int, stop: int) -> Tensor:
        """See `Ops.columns`."""
        return self._ops.columns(self.made(x), start, stop)

    def attention(self, q: Value, view: KvcacheView, layer: int, plan: Any, scale: float) -> Tensor:
        """See `Ops.attention`."""
        return self._ops.attention(self.made(q), view, layer, plan, scale)


def few_rows(
    ops: Operations, trunk: Callable[..., Any], batch: ForwardBatch, view: KvcacheView
) -> Tensor:
    """See `Ops.few_rows`: what `trunk(ops, batch, view)` gives, but for roundings."""
    fused = FewRows(ops)
    return fused.made(trunk(fused, batch, view))
