"""`CapturedTaps`: residual streams for draft heads at fixed addresses, which graphs write."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nano_inference.config import EngineConfig
from nano_inference.device.trunk_graphs import largest_graph
from nano_inference.models.decoder import Decoder
from nano_inference.models.taps import Taps
from nano_inference.ops.batches import ForwardBatch


class CapturedTaps(Taps):
    """Residual stream before some layers, from the latest forward pass, eager or replayed.

    Steps with more rows than any graph are recorded as in `Taps`.

    Args:
        layers: As in `Taps`.
        largest: Rows of the largest graph.
        model: Model whose streams are recorded.
    """

    def __init__(self, layers: Sequence[int], largest: int, model: Decoder) -> None:
        super().__init__(layers)
        self.largest = largest
        shape = (largest, model.spec.hidden_size)
        self._places = {
            layer: torch.empty(shape, dtype=torch.float32, device=model.device) for layer in layers
        }

    def note(self, layer: int, batch: ForwardBatch, out: Tensor, x: Tensor) -> None:
        """Record the residual stream x [N, H], as `Taps.note`. Runs on the device and can be
        captured.
        """
        if len(x) > self.largest:
            super().note(layer, batch, out, x)
            return
        out.copy_(x)
        self._places[layer][: len(x)].copy_(x)

    def rows(self, count: int) -> Tensor:
        """Return the latest streams of `count` rows, as `Taps.rows`."""
        if count > self.largest:
            return super().rows(count)
        return torch.cat([self._places[layer][:count] for layer in self.layers], dim=1)


def taps_of(config: EngineConfig, layers: Sequence[int], model: Decoder) -> CapturedTaps:
    """Return the taps of an engine whose steps are captured."""
    largest = largest_graph(config.scheduler.max_draws, config.max_tokens_per_batch)
    return CapturedTaps(layers, largest, model)
