"""Launch the kernels of a backward pass on tensors with shapes but no memory, as `kernel_sets.py`
does for steps.
"""

# pyright: reportMissingImports=false

from collections.abc import Sequence

import torch

from nano_inference.models.decoder import Decoder
from nano_inference.models.spec.experts import MoeSpec
from nano_inference.ops.cuda.gradients import CudaGradients
from nano_inference.ops.kv_codes import KvFormat
from nano_inference.rl.backward.decoder import KernelDecoder
from nano_inference.rl.backward.weights import LazyParams, Totals, Weights
from nano_inference.rl.micro_batch import ScoredSequence, micro_batches

# lengths of sequences, which count as rows, tiles and readers of tiles
LENGTHS = ((1,), (2,), (16,), (17, 16), (300, 5, 70), (512,), (1100,))


def train(model: Decoder, kept: KvFormat, lengths: Sequence[Sequence[int]] = LENGTHS) -> None:
    """Differentiate micro-batches of sequences with a common prefix, with respect to all weights."""
    device = torch.device("meta")
    params = model.params
    weights = Weights(
        CudaGradients(model.dtype, device), LazyParams(params, lambda name: params[name])
    )
    moe = model.spec.moe
    decoder = KernelDecoder(model.spec, model.ropes, model.embed_scale, kept)
    totals = Totals({name: tuple(param.shape) for name, param in params.items()}, device)
    for group in lengths:
        sequences = [
            ScoredSequence(
                [1] * 20 + [2 + turn] * length,
                1,
                [1.0] * (19 + length),
                None if moe is None else _routes(moe, 20 + length),
            )
            for turn, length in enumerate(group)
        ]
        for batch in micro_batches(sequences, 4096):
            decoder.add_gradients(weights, batch, 1.0, totals)


def _routes(moe: MoeSpec, rows: int) -> torch.Tensor:
    """Return the first experts for each row and layer, as an engine records them."""
    experts = torch.arange(moe.experts_per_token, dtype=torch.int16)
    return experts.expand(rows, sum(moe.layers), -1).contiguous()
