"""The gradient of a micro-batch by the kernels: a forward pass, then each block's gradient."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor
from torch.nn import functional

from nano_inference.models.rope import Rotation
from nano_inference.models.spec.model import ModelSpec
from nano_inference.ops.gradients import PathRows
from nano_inference.ops.kv_codes import KvFormat
from nano_inference.rl.activations import recomputes
from nano_inference.rl.backward.head import head_gradient
from nano_inference.rl.backward.layer import (
    AttentionState,
    Layer,
    MixtureState,
    MlpState,
    Rows,
    norm_of,
    normalized,
)
from nano_inference.rl.backward.weights import Totals, Weights
from nano_inference.rl.micro_batch import MicroBatch

LayerState = tuple[AttentionState, MlpState | MixtureState]


class KernelDecoder:
    """Forward and backward pass of one micro-batch, with the decoder's (fused) parameters.

    Args:
        spec: Description of a model that the kernels cover (`coverage.py`).
        ropes: Rotation of each layer, with tensors.
        embed_scale: Factor of embeddings.
        kept: Storage of keys and values. Gradients pass the rounding to it unchanged.
        recompute_activations: As in `PolicyModel`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        ropes: Sequence[Rotation],
        embed_scale: float,
        kept: KvFormat,
        recompute_activations: bool | None = None,
    ) -> None:
        self.spec, self.embed_scale = spec, embed_scale
        self.recompute_activations = recompute_activations
        self.head = "embed" if spec.tie_word_embeddings else "head"
        self.layers = [Layer(spec, index, rope, kept) for index, rope in enumerate(ropes)]

    def add_gradients(
        self, weights: Weights, batch: MicroBatch, temperature: float, totals: Totals
    ) -> None:
        """Add the gradients of a micro-batch's logprobs to those of the wanted parameters.

        The batch is on the host.
        """
        kernels = weights.kernels
        segments = [PathRows(each.path, each.end - each.start) for each in batch.segments]
        paths = kernels.paths(segments)
        # checked on the host, which therefore waits for no kernel
        routes = batch.experts_by_layer(self.spec.moe, kernels.device)
        batch = replace(batch, segments=(), routes=None).to(kernels.device)
        rows = Rows(batch.positions, paths)
        residual = functional.embedding(batch.token_ids, weights.plain("embed")).float()
        residual = residual * self.embed_scale
        lowest = self._lowest(weights, totals)
        keeps = not recomputes(self.recompute_activations, len(residual))
        states: list[Tensor | LayerState] = []
        for layer in self.layers:
            before = residual
            residual, state = self._forward(layer, weights, before, rows, routes)
            if layer.index >= lowest:
                states.append(state if keeps else before)
        norm = norm_of(weights, self.spec, "norm", "norm")
        hidden = normalized(weights, residual, norm)
        d_hidden = head_gradient(weights, self.spec, self.head, hidden, batch, temperature, totals)
        assert norm is not None
        d_residual = d_hidden
        kernels.norm_gradient(residual, norm, d_hidden, d_residual, totals.total("norm"))
        for layer in reversed(self.layers[lowest:]):
            state = states.pop()
            if isinstance(state, Tensor):
                _, state = self._forward(layer, weights, state, rows, routes)
            layer.mlp_gradient(weights, state[1], d_residual, totals)
            layer.attention_gradient(weights, state[0], d_residual, rows, totals)
        if (total := totals.total("embed")) is not None:
            kernels.add_rows(d_residual, batch.token_ids, total, self.embed_scale)

    def _forward(
        self,
        layer: Layer,
        weights: Weights,
        residual: Tensor,
        rows: Rows,
        routes: Mapping[int, Tensor],
    ) -> tuple[Tensor, LayerState]:
        residual, attention = layer.attention(weights, residual, rows)
        residual, mlp = layer.mlp(weights, residual, routes.get(layer.index))
        return residual, (attention, mlp)

    def _lowest(self, weights: Weights, totals: Totals) -> int:
        """Return the lowest layer that the gradient of a wanted parameter passes."""
        if totals.total("embed") is not None:
            return 0
        names = (*totals.shapes, *weights.adapters)
        wanted = [
            layer.index
            for layer in self.layers
            if any(name.startswith(layer.name("")) for name in names)
        ]
        return min(wanted, default=len(self.layers))
