"""Layers with a state in plain torch: the specification. A row reads what the rows before it left
in the cache, also where these stand in the same chunk, so its bits do not depend on chunks.
"""

import torch
from torch import Tensor

from nano_inference.batch import ForwardBatch
from nano_inference.ops.state import ShortConvWeights, StateView


def short_conv(
    projected: Tensor, weights: ShortConvWeights, batch: ForwardBatch, view: StateView, layer: int
) -> Tensor:
    """See `Ops.short_conv`."""
    before, after, x = projected.float().chunk(3, dim=-1)
    mixed = causal_conv(before * x, weights.conv, weights.bias, batch, view, layer)
    return (after * mixed).to(projected.dtype)


def causal_conv(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    batch: ForwardBatch,
    view: StateView,
    layer: int,
) -> Tensor:
    """Each channel's last inputs times its taps [channels, 1, taps], oldest first: float32 [N,
    channels].

    Inputs are stored, rounded to what the cache holds, and read back.
    """
    view.write(layer, "inputs", batch.slot_mapping, inputs)
    taps = weight.float()[:, 0, :]
    total = torch.zeros_like(inputs)
    for tap in range(taps.shape[1]):
        places = batch.positions - (taps.shape[1] - 1 - tap)
        seen = view.gather(layer, "inputs", slots_of(batch, places.clamp(min=0), view.block_size))
        total = total + torch.where(places[:, None] >= 0, seen * taps[:, tap], 0.0)
    return total if bias is None else total + bias.float()


def slots_of(batch: ForwardBatch, positions: Tensor, block_size: int) -> Tensor:
    """Where a token of each row's sequence stands: positions [N] -> slots [N]."""
    blocks = batch.block_tables[batch.row_chunks, positions // block_size]
    return blocks * block_size + positions % block_size
