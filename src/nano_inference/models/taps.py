"""`Taps`: what a forward passes by at some layers, for heads that guess from it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nano_inference.ops.batches import ForwardBatch


class Taps:
    """The residual stream before some layers, of the newest forward.

    Args:
        layers: these.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._rows: dict[int, Tensor] = {}

    def note(self, layer: int, _batch: ForwardBatch, out: Tensor, x: Tensor) -> None:
        """The residual stream x [N, H] in the middle of a trunk (`Ops.call`), and on it goes."""
        out.copy_(x)
        self._rows[layer] = x.clone()

    def rows(self) -> Tensor:
        """Of the newest forward, layer by layer side by side: float32 [N, layers * H]."""
        return torch.cat([self._rows[layer] for layer in self.layers], dim=1)
