"""`Taps`: residual streams at some layers, for draft heads that predict tokens from them."""

from collections.abc import Sequence

from nano_inference.arrays import Tensor, namespace
from nano_inference.ops.batches import ForwardBatch


class Taps:
    """Residual stream before some layers, from the latest forward pass.

    Args:
        layers: Numbers of the tapped layers. The number of layers means after the last one.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._rows: dict[int, Tensor] = {}

    def note(self, layer: int, _batch: ForwardBatch, out: Tensor, x: Tensor) -> None:
        """Record the residual stream x [N, H] within a trunk (`Ops.call`) and pass it on."""
        out.copy_(x)
        self._rows[layer] = x.clone()

    def rows(self, count: int) -> Tensor:
        """Return the latest streams of a pass of `count` rows, concatenated layer by layer: float32
        [count, layers * H].
        """
        rows = [self._rows[layer][:count] for layer in self.layers]
        return namespace(rows[0]).cat(rows, dim=1)
