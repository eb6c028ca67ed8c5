"""Drafts by an EAGLE-3 head: one layer over the newest tokens and the policy's activations at three
layers.
"""

from collections.abc import Sequence as Listed

from nano_inference.arrays import Tensor, namespace
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.drafts.heads import EagleSpec, HeadWeights
from nano_inference.drafts.layer_drafts import LayerDrafts, side_by_side
from nano_inference.drafts.medusa import draw_known
from nano_inference.models.decoder import Decoder
from nano_inference.models.rope import rope_table
from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.interface import (
    AttentionArgs,
    HeadNorms,
    KvcacheView,
    Operations,
    RopeArgs,
    X,
)
from nano_inference.ops.rowwise import Norm
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.tensors import SamplingBatch


class EagleDrafts(LayerDrafts):
    """Drafts by an EAGLE-3 head.

    Args:
        policy, storage, scratch: As in `LayerDrafts`.
        weights: Weights of the head.
    """

    name = "eagle"

    def __init__(
        self, policy: Decoder, weights: HeadWeights, storage: KVStorage, scratch: Listed[int]
    ) -> None:
        assert isinstance(weights.spec, EagleSpec)
        super().__init__(policy, storage, scratch)
        self.weights, self.spec = weights, weights.spec
        layer = self.spec.layer
        self._rope = rope_table(layer.ropes[0], layer.head_dim, self._num_positions, policy.device)

    @property
    def hidden_size(self) -> int:
        return self.spec.layer.hidden_size

    def combined(self, taps: Tensor) -> Tensor:
        """Combine the policy's activations at three layers: [N, 3 target] -> float32 [N, H]."""
        spec, ops, params = self.spec, self.policy.ops, self.weights.params
        if spec.norm_before_fc:
            x = ops.rms_norm(None, taps, self._norm("input_norm"), 1.0)[0]
        elif spec.fc_norm:
            parts = taps.split(spec.target_hidden_size, dim=1)
            normed = [
                ops.rms_norm(None, part.contiguous(), self._norm(f"fc_norm.{i}"), 1.0)[0]
                for i, part in enumerate(parts)
            ]
            x = namespace(taps).cat(normed, dim=1)
        else:
            x = taps.to(self.policy.dtype)
        return ops.linear(x, params["fc"], None).float()

    def store(self, ops: Operations[X], batch: ForwardBatch, view: KvcacheView) -> X:
        return self._attending(ops, batch, view)[0]

    def _attending(self, ops: Operations[X], batch: ForwardBatch, view: KvcacheView) -> tuple[X, X]:
        """Return the queries and the residual, and store keys and values."""
        layer, params, dtype = self.spec.layer, self.weights.params, self.policy.dtype
        hidden, float32 = layer.hidden_size, namespace(dtype).float32
        source = params if self.spec.has_embedding else self.policy.params
        embedded = ops.embed(batch.input_ids, source["embed"], 1.0)
        embedded = ops.rms_norm(None, embedded, self._norm("embed_norm"), 1.0)[0]
        residual = ops.call(batch, self.give, (), hidden, float32)
        norm = self._norm("hidden_norm")
        if self.spec.norm_before_residual:
            residual = ops.rms_norm(None, residual, norm._replace(dtype=float32), 1.0)[0]
            norm = Norm(None, 0.0, 0.0, dtype)
        normed = ops.rms_norm(None, residual, norm, 1.0)[0]
        x = ops.call(batch, side_by_side, (embedded, normed), 2 * hidden, dtype)
        norms = HeadNorms()
        if layer.qk_norm:
            norms = HeadNorms(self._norm("q_norm"), self._norm("k_norm"))
        rope = RopeArgs(*self._rope, layer.num_heads, layer.num_kv_heads, norms)
        qkv = ops.linear(x, params["qkv"], params.get("qkv_bias"))
        where = batch.positions, batch.slot_mapping, view, 0
        return ops.rope_and_store(qkv, rope, *where), residual

    def layer(self, ops: Operations[X], batch: ForwardBatch, view: KvcacheView) -> X:
        layer, params = self.spec.layer, self.weights.params
        q, residual = self._attending(ops, batch, view)
        plan = ops.plan_attention(batch, view.block_size, 0)
        attended = ops.attention(q, view, 0, plan, AttentionArgs(layer.attention_scale))
        x = ops.linear(attended, params["o"], params.get("o_bias"))
        normed, residual = ops.rms_norm(x, residual, self._norm("mlp_norm"), 1.0)
        x = ops.gate(ops.linear(normed, params["gate_up"], None), layer.activation)
        x = ops.linear(x, params["down"], None)
        float32 = namespace(self.policy.dtype).float32
        return ops.rms_norm(x, residual, Norm(None, 0.0, 0.0, float32), 1.0)[0]

    def after(self, computed: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.policy.ops.rms_norm(None, computed, self._norm("norm"), 1.0)[0]
        return normed, normed.float() if self.spec.norm_output else computed

    def draw(self, rows: Tensor, batch: SamplingBatch) -> Draw:
        head, targets = self.weights.params["head"], self.weights.targets
        return draw_known(self.policy.ops, rows, head, targets, self.policy.spec.vocab_size, batch)

    def _norm(self, name: str) -> Norm:
        eps = self.spec.layer.rms_norm_eps
        return Norm(self.weights.params[name], eps, 0.0, self.policy.dtype)
