"""Paged attention for any mix of chunk lengths."""

from typing import Any

from torch import Tensor

from nano_inference.batch import ForwardBatch
from nano_inference.ops import reference_attention
from nano_inference.ops.backend import KvcacheView


class Attention:
    """Attention of one backend; what the law asks for is decided once."""

    def __init__(self, *, batch_invariant: bool) -> None:
        self.batch_invariant = batch_invariant

    def plan(self, batch: ForwardBatch, block_size: int, window: int = 0) -> Any:
        """See `Ops.plan_attention`. It waits for nothing that is on the device, and can be captured in a graph."""
        return reference_attention.plan_attention(batch, block_size, window)

    def attend(self, q: Tensor, view: KvcacheView, layer: int, plan: Any, scale: float) -> Tensor:
        """See `Ops.attention`. Rows beyond `cu_seqlens_q[-1]` are padding: their results mean nothing."""
        return reference_attention.attention(q, view, layer, plan, scale)
