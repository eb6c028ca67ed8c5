"""The decoder: one forward pass over the rows of a batch, by a `ModelSpec` and the operations it is given."""

from typing import Protocol

import torch
from torch import Tensor

from nano_inference.batch import ForwardBatch
from nano_inference.models.rope import rope_table
from nano_inference.models.spec import ModelSpec
from nano_inference.ops.backend import KvcacheView, Ops


class KvCache(Protocol):
    """What the decoder needs of the KV storage: a view for the block tables of one batch."""

    def bind(self, page_table: Tensor, total_len: Tensor) -> KvcacheView:
        """The storage seen through block tables [S, blocks] and context lengths [S]."""
        ...


class Decoder:
    """Weights, rotary tables and operations of one model. It never asks which device it is on."""

    def __init__(self, spec: ModelSpec, params: dict[str, Tensor], ops: Ops, num_positions: int) -> None:
        self.spec = spec
        self.params = params
        self.ops = ops
        self.device = params["embed"].device
        self.cos, self.sin = rope_table(spec.rope, spec.head_dim, num_positions, self.device)

    def forward(self, batch: ForwardBatch, cache: KvCache) -> Tensor:
        """Compute the rows of a batch, store their keys and values; returns logits float32 [L, V]."""
        spec, ops, params = self.spec, self.ops, self.params
        view = cache.bind(batch.block_tables, batch.seq_lens)
        plan = ops.plan_attention(batch, view.block_size, spec.num_kv_heads)
        residual = ops.embed(batch.input_ids, params["embed"])  # [N, H]
        x: Tensor | None = None
        for layer in range(spec.num_layers):
            weights = f"layers.{layer}."
            normed, residual = ops.rms_norm(x, residual, params[weights + "input_norm"], spec.rms_norm_eps)
            x = self._attention(normed, weights, layer, batch, view, plan)
            normed, residual = ops.rms_norm(x, residual, params[weights + "post_norm"], spec.rms_norm_eps)
            x = ops.linear(ops.gate(ops.linear(normed, params[weights + "gate_up"])), params[weights + "down"])
        last = batch.logits_indices
        rows = None if x is None else x[last]
        normed, _ = ops.rms_norm(rows, residual[last], params["norm"], spec.rms_norm_eps)
        return ops.logits(normed, params["embed" if spec.tie_word_embeddings else "head"])

    def _attention(
        self, normed: Tensor, weights: str, layer: int, batch: ForwardBatch, view: KvcacheView, plan: object
    ) -> Tensor:
        spec, ops = self.spec, self.ops
        qkv = ops.linear(normed, self.params[weights + "qkv"])
        q = ops.rope_and_store(
            qkv,
            self.cos,
            self.sin,
            batch.positions,
            view,
            layer,
            batch.slot_mapping,
            spec.num_heads,
            spec.num_kv_heads,
        )
        return ops.linear(ops.attention(q, view, layer, plan, spec.head_dim**-0.5), self.params[weights + "o"])


@torch.inference_mode()
def model_forward(model: Decoder, inputs: ForwardBatch, cache: KvCache) -> Tensor:
    """One forward pass: rows of `inputs` through `model`, keys and values into `cache`; logits float32 [L, V]."""
    return model.forward(inputs, cache)
