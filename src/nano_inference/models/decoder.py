"""The decoder: one forward pass over the rows of a batch, by a `ModelSpec` and the operations it is given."""

import copy
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nano_inference.batch import ForwardBatch
from nano_inference.models.rope import rope_table
from nano_inference.models.spec import ModelSpec
from nano_inference.ops.backend import KvcacheView, Norm, Operations, Ops
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.sampling_batch import SamplingBatch, greedy_batch

BEST_TILE = 256  # rows whose logits are in memory at once where only their best tokens are wanted


class KvCache(Protocol):
    """What the decoder needs of the KV storage: a view for the block tables of one batch."""

    def bind(self, page_table: Tensor, total_len: Tensor) -> KvcacheView:
        """The storage seen through block tables [S, blocks] and context lengths [S]."""
        ...


class BestTokens(NamedTuple):
    """The most probable tokens after some rows, best first, and their logprobs under the model's own distribution."""

    token_ids: Tensor  # int64 [T, K]
    logprobs: Tensor  # float32 [T, K]


class ForwardResult(NamedTuple):
    """What a forward pass gives."""

    hidden: Tensor  # [L, H], rows `batch.logits_indices` after the last norm; good until the next forward
    scores: Tensor  # float32 [P], logprobs of `batch.score_targets` at rows `batch.score_rows`, at their temperatures
    best: BestTokens | None = None  # after rows `batch.best_rows`; None where there are none


class Decoder:
    """Weights, rotary tables and operations of one model. It never asks which device it is on."""

    def __init__(self, spec: ModelSpec, params: dict[str, Any], ops: Ops, num_positions: int) -> None:
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
        self.recorded: dict[object, Any] = {}  # by whom it serves: a KV storage (`Ops.compile`), or captured graphs

    @property
    def head(self) -> Any:
        """The weight that logits are made with."""
        return self.params["embed" if self.spec.tie_word_embeddings else "head"]

    def forward(self, batch: ForwardBatch, cache: KvCache) -> ForwardResult:
        """Compute the rows of a batch and store their keys and values."""
        hidden = self._hidden(batch, cache.bind(batch.block_tables, batch.seq_lens))
        divisor = self.spec.logits_divisor
        if len(batch.score_rows):
            rows = hidden[batch.score_rows]
            targets, temperatures = batch.score_targets, batch.score_temperatures
            scores = self.ops.gather_logprobs(rows, self.head, divisor, targets, temperatures)
        else:
            scores = torch.empty(0, device=self.device)
        best = self.best_tokens(hidden[batch.best_rows], batch.num_best) if batch.num_best else None
        drawn = len(batch.logits_indices)
        return ForwardResult(hidden if drawn == len(hidden) else hidden[batch.logits_indices], scores, best)

    def draw(self, hidden: Tensor, batch: SamplingBatch) -> Draw:
        """Draw samples from the logits of rows [L, H] that a forward pass gave."""
        return self.ops.sample(hidden, self.head, self.spec.logits_divisor, batch)

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits of rows [L, H] that a forward pass gave: float32 [L, V]."""
        return self.ops.logits(hidden, self.head, self.spec.logits_divisor)

    def best_tokens(self, hidden: Tensor, num_best: int) -> BestTokens:
        """The most probable tokens after rows [T, H] that a forward pass gave: what greedy draws report there."""
        draws = [self.draw(rows, greedy_batch(len(rows), num_best).to(self.device)) for rows in hidden.split(BEST_TILE)]
        return BestTokens(torch.cat([draw.top_ids for draw in draws]), torch.cat([d.top_logprobs for d in draws]))

    def forget_recorded(self) -> None:
        """Record anew what the backend records: weights or KV tensors have moved."""
        self.recorded.clear()

    def twin(self, params: dict[str, Any] | None = None, ops: Ops | None = None) -> "Decoder":
        """The same model with other weights, or other operations, or for KV tensors of its own; tables are shared."""
        other = copy.copy(self)
        other.params = self.params if params is None else params
        other.ops = self.ops if ops is None else ops
        other.recorded = {}
        return other

    def close(self) -> None:
        """Let go of the weights. Nothing may be called afterwards."""
        self.params.clear()
        self.recorded.clear()

    def _hidden(self, batch: ForwardBatch, view: KvcacheView) -> Tensor:
        """All rows after the last norm, [N, H]; good until the next call."""
        if self.ops.compile is None:
            return self.trunk(self.ops, batch, view)
        if view.storage not in self.recorded:
            self.recorded[view.storage] = self.ops.compile(self.trunk, batch, view, self.dtype)
        return self.recorded[view.storage](batch)

    def trunk(self, ops: Operations, batch: ForwardBatch, view: KvcacheView) -> Tensor:
        """Everything but the head, by calls of `ops` alone: a backend may record them once and replay them."""
        spec, params = self.spec, self.params
        plans = {window: ops.plan_attention(batch, view.block_size, window) for window in set(spec.windows)}
        residual = ops.embed(batch.input_ids, params["embed"], self.embed_scale)  # [N, H]
        x: Tensor | None = None
        for layer, window in enumerate(spec.windows):
            name = f"layers.{layer}."
            normed, residual = ops.rms_norm(x, residual, self._norm(name + "attn_norm"), spec.residual_scale)
            x = self._attention(ops, normed, name, layer, batch, view, plans[window])
            x = self._after(ops, x, name + "attn_out_norm")
            normed, residual = ops.rms_norm(x, residual, self._norm(name + "mlp_norm"), spec.residual_scale)
            gated = ops.gate(ops.linear(normed, params[name + "gate_up"], None), spec.activation)
            x = self._after(ops, ops.linear(gated, params[name + "down"], None), name + "mlp_out_norm")
        return ops.rms_norm(x, residual, self._norm("norm"), spec.residual_scale)[0]

    def _attention(
        self,
        ops: Operations,
        normed: Tensor,
        name: str,
        layer: int,
        batch: ForwardBatch,
        view: KvcacheView,
        plan: object,
    ) -> Tensor:
        spec, params = self.spec, self.params
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

    def _after(self, ops: Operations, x: Tensor, name: str) -> Tensor:
        """What a block adds to the residual stream: normalised where the model has a norm there, and not rounded."""
        if name not in self.params:
            return x
        norm = self._norm(name)._replace(dtype=torch.float32)
        return ops.rms_norm(None, x, norm, 1.0)[0]

    def _norm(self, name: str) -> Norm:
        """A norm of the model; where it has none, what rounds the residual stream for the next product."""
        return Norm(self.params.get(name), self.spec.rms_norm_eps, self.spec.norm_offset, self.dtype)


@torch.inference_mode()
def model_forward(model: Decoder, inputs: ForwardBatch, cache: KvCache) -> Tensor:
    """One forward pass: rows of `inputs` through `model`, keys and values into `cache`; logits float32 [L, V]."""
    return model.logits(model.forward(inputs, cache).hidden)
