"""The decoder: one forward pass over the rows of a batch, by a `ModelSpec` and the operations it is given."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nano_inference.batch import ForwardBatch
from nano_inference.models.rope import rope_table
from nano_inference.models.spec import ModelSpec
from nano_inference.ops.backend import KvcacheView, Norm, Ops

SCORE_TILE = 256  # rows whose logits are in memory at once where only one logprob of each is wanted


class KvCache(Protocol):
    """What the decoder needs of the KV storage: a view for the block tables of one batch."""

    def bind(self, page_table: Tensor, total_len: Tensor) -> KvcacheView:
        """The storage seen through block tables [S, blocks] and context lengths [S]."""
        ...


class ForwardResult(NamedTuple):
    """What a forward pass gives."""

    logits: Tensor  # float32 [L, V], rows `batch.logits_indices`
    scores: Tensor  # float32 [P], logprobs of `batch.score_targets` at rows `batch.score_rows`


class Decoder:
    """Weights, rotary tables and operations of one model. It never asks which device it is on."""

    def __init__(self, spec: ModelSpec, params: dict[str, Tensor], ops: Ops, num_positions: int) -> None:
        self.spec = spec
        self.params = params
        self.ops = ops
        self.device = params["embed"].device
        self.dtype = params["embed"].dtype
        # Layers with a window may turn at other frequencies. One table where they do not.
        self.ropes = {False: rope_table(spec.rope, spec.head_dim, num_positions, self.device)}
        same = spec.sliding_rope == spec.rope or not any(spec.windows)
        self.ropes[True] = (
            self.ropes[False] if same else rope_table(spec.sliding_rope, spec.head_dim, num_positions, self.device)
        )
        self.embed_scale = float(torch.tensor(spec.embed_scale, dtype=self.dtype))  # rounded as the model was trained

    def forward(self, batch: ForwardBatch, cache: KvCache) -> ForwardResult:
        """Compute the rows of a batch and store their keys and values."""
        spec, ops, params = self.spec, self.ops, self.params
        view = cache.bind(batch.block_tables, batch.seq_lens)
        plans = {window: ops.plan_attention(batch, view.block_size, window) for window in set(spec.windows)}
        residual = ops.embed(batch.input_ids, params["embed"])  # [N, H]
        if spec.embed_scale != 1:
            residual = residual * self.embed_scale
        x: Tensor | None = None
        for layer, window in enumerate(spec.windows):
            name = f"layers.{layer}."
            normed, residual = self._before(x, residual, name + "attn_norm")
            x = self._after(self._attention(normed, name, layer, batch, view, plans[window]), name + "attn_out_norm")
            normed, residual = self._before(x, residual, name + "mlp_norm")
            gated = ops.gate(ops.linear(normed, params[name + "gate_up"], None), spec.activation)
            x = self._after(ops.linear(gated, params[name + "down"], None), name + "mlp_out_norm")
        scores = [
            ops.gather_logprobs(self._logits(x, residual, rows), targets)
            for rows, targets in zip(
                batch.score_rows.split(SCORE_TILE), batch.score_targets.split(SCORE_TILE), strict=True
            )
        ]
        return ForwardResult(self._logits(x, residual, batch.logits_indices), torch.cat(scores))

    def _attention(
        self, normed: Tensor, name: str, layer: int, batch: ForwardBatch, view: KvcacheView, plan: object
    ) -> Tensor:
        spec, ops, params = self.spec, self.ops, self.params
        cos, sin = self.ropes[spec.windows[layer] > 0]
        q = ops.rope_and_store(
            ops.linear(normed, params[name + "qkv"], params.get(name + "qkv_bias")),
            cos,
            sin,
            batch.positions,
            view,
            layer,
            batch.slot_mapping,
            spec.num_heads,
            spec.num_kv_heads,
            (self._norm(name + "q_norm"), self._norm(name + "k_norm")) if spec.qk_norm else None,
        )
        attended = ops.attention(q, view, layer, plan, spec.attention_scale)
        return ops.linear(attended, params[name + "o"], params.get(name + "o_bias"))

    def _before(self, x: Tensor | None, residual: Tensor, norm: str) -> tuple[Tensor, Tensor]:
        """Add what the last block made to the residual stream; what the next block reads, and the stream."""
        if norm in self.params:
            return self.ops.rms_norm(x, residual, self._norm(norm))
        residual = residual if x is None else residual + x.float()
        return residual.to(self.dtype), residual

    def _after(self, x: Tensor, norm: str) -> Tensor:
        """What a block adds to the residual stream."""
        if norm in self.params:
            x, _ = self.ops.rms_norm(None, x.float(), self._norm(norm))
        return x if self.spec.residual_scale == 1 else x * self.spec.residual_scale

    def _norm(self, name: str) -> Norm:
        return Norm(self.params[name], self.spec.rms_norm_eps, self.spec.norm_offset, self.dtype)

    def _logits(self, x: Tensor | None, residual: Tensor, rows: Tensor) -> Tensor:
        """The last norm and the head, for some rows: float32 [rows, V]."""
        added = None if x is None else x[rows]
        normed, _ = self.ops.rms_norm(added, residual[rows], self._norm("norm"))
        logits = self.ops.logits(normed, self.params["embed" if self.spec.tie_word_embeddings else "head"])
        return logits if self.spec.logits_divisor == 1 else logits / self.spec.logits_divisor


@torch.inference_mode()
def model_forward(model: Decoder, inputs: ForwardBatch, cache: KvCache) -> Tensor:
    """One forward pass: rows of `inputs` through `model`, keys and values into `cache`; logits float32 [L, V]."""
    return model.forward(inputs, cache).logits
