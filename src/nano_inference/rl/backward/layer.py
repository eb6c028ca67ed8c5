"""A layer's forward pass and its gradient by the kernels.

Names of gradients begin with `d_`. Residual streams and gradients are float32 [N, columns].
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_inference.models.rope import Rotation
from nano_inference.models.spec.model import ModelSpec
from nano_inference.ops.gradients import Attended, AttentionRule, HeadShape, Rotary, Rotated
from nano_inference.ops.kv_codes import KvFormat
from nano_inference.ops.rowwise import Norm
from nano_inference.rl.backward.experts import ExpertLayer, ExpertsState
from nano_inference.rl.backward.products import add_product, product, product_gradient
from nano_inference.rl.backward.weights import Totals, Weights


class Rows(NamedTuple):
    """Positions of a micro-batch's rows, int64 [N], and its segments (`GradientOps.paths`)."""

    positions: Tensor
    paths: Any


class AttentionState(NamedTuple):
    """Values of an attention block that its gradient needs."""

    residual: Tensor  # before the block
    normed: Tensor
    qkv: Tensor
    parts: Rotated
    attended: Attended
    out: Tensor | None  # before the norm after the block, if there is one


class MlpState(NamedTuple):
    """Values of an MLP that its gradient needs."""

    residual: Tensor
    normed: Tensor
    gate_up: Tensor
    gated: Tensor
    out: Tensor | None


class MixtureState(NamedTuple):
    """Values of a layer of experts, with its norms, that its gradient needs."""

    residual: Tensor
    experts: ExpertsState
    out: Tensor | None


@dataclass(frozen=True)
class Layer:
    """One layer of a model.

    Attributes:
        spec: Description of the model.
        index: Number of the layer.
        rope: Rotation of its heads.
        kept: Storage of keys and values, to which they are rounded.
    """

    spec: ModelSpec
    index: int
    rope: Rotation
    kept: KvFormat

    @property
    def shape(self) -> HeadShape:
        """Sizes of the layer's heads."""
        return HeadShape(self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_dim)

    @property
    def experts(self) -> ExpertLayer | None:
        """Experts of the layer. None: it has an MLP."""
        moe = self.spec.moe
        if moe is None or not moe.layers[self.index]:
            return None
        return ExpertLayer(moe, self.name(""), self.spec.activation)

    def name(self, part: str) -> str:
        """Return the name of one of the layer's parameters."""
        return f"layers.{self.index}.{part}"

    def attention(
        self, weights: Weights, residual: Tensor, rows: Rows
    ) -> tuple[Tensor, AttentionState]:
        """Return the residual stream after attention, and the state for the gradient."""
        kernels = weights.kernels
        normed = normalized(weights, residual, self._norm(weights, "attn_norm"))
        qkv = product(weights, self.name("qkv"), normed)
        rotary = self._rotary(rows)
        parts = kernels.rotate(qkv, self.shape, rotary, self._head_norms(weights))
        if self.kept.coded:
            parts = parts._replace(keys=self._stored(parts.keys), values=self._stored(parts.values))
        attended = kernels.attend(parts, self.shape, rows.paths, self._rule(weights))
        after, out = self._added(weights, residual, attended.out, "o", "attn_out_norm")
        return after, AttentionState(residual, normed, qkv, parts, attended, out)

    def attention_gradient(
        self,
        weights: Weights,
        state: AttentionState,
        d_after: Tensor,
        rows: Rows,
        totals: Totals,
    ) -> None:
        """Turn the gradient of the residual stream after attention into the one before it."""
        kernels, shape, parts = weights.kernels, self.shape, state.parts
        d_out = self._added_gradient(weights, state.out, d_after, "attn_out_norm", totals)
        attended, d_sinks = state.attended, totals.total(self.name("sinks"))
        d_attended = product_gradient(weights, self.name("o"), attended.out, d_out, totals)
        d_attended = kernels.rounded(d_attended)
        d_parts = kernels.attend_gradient(
            parts, shape, rows.paths, self._rule(weights), attended, d_attended, d_sinks
        )
        d_qkv = kernels.rotate_gradient(d_parts, shape, self._rotary(rows))
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        columns = {"q_norm": (0, wide), "k_norm": (wide, wide + narrow)}
        norms = zip(columns.items(), self._head_norms(weights), strict=True)
        for (part, (first, last)), norm in norms:
            if norm is not None:
                x, d_x = state.qkv[:, first:last], d_qkv[:, first:last]
                kernels.norm_gradient(x, norm, d_x, d_x, totals.total(self.name(part)))
        d_normed = product_gradient(weights, self.name("qkv"), state.normed, d_qkv, totals)
        self._norm_gradient(weights, "attn_norm", state.residual, d_normed, d_after, totals)

    def mlp(
        self, weights: Weights, residual: Tensor, ids: Tensor | None
    ) -> tuple[Tensor, MlpState | MixtureState]:
        """Return the residual stream after the MLP or experts, and the state for the gradient.

        `ids` are the experts of each row, int64 [N, K], if the layer has experts.
        """
        kernels = weights.kernels
        normed = normalized(weights, residual, self._norm(weights, "mlp_norm"))
        if self.experts is not None:
            assert ids is not None
            y, state = self.experts.forward(weights, normed, ids)
            after, out = self._summed(weights, residual, y, "mlp_out_norm")
            return after, MixtureState(residual, state, out)
        gate_up = product(weights, self.name("gate_up"), normed)
        gated = kernels.gate(gate_up, self.spec.activation)
        after, out = self._added(weights, residual, gated, "down", "mlp_out_norm")
        return after, MlpState(residual, normed, gate_up, gated, out)

    def mlp_gradient(
        self, weights: Weights, state: MlpState | MixtureState, d_after: Tensor, totals: Totals
    ) -> None:
        """Turn the gradient of the residual stream after the MLP or experts into the one before
        it.
        """
        kernels = weights.kernels
        d_out = self._added_gradient(weights, state.out, d_after, "mlp_out_norm", totals)
        if isinstance(state, MixtureState):
            assert self.experts is not None
            d_normed = self.experts.gradient(weights, state.experts, d_out, totals)
        else:
            d_gated = product_gradient(weights, self.name("down"), state.gated, d_out, totals)
            d_gate_up = kernels.gate_gradient(state.gate_up, self.spec.activation, d_gated)
            d_normed = product_gradient(
                weights, self.name("gate_up"), state.normed, d_gate_up, totals
            )
        self._norm_gradient(weights, "mlp_norm", state.residual, d_normed, d_after, totals)

    def _added(
        self, weights: Weights, residual: Tensor, x: Tensor, part: str, norm_after: str
    ) -> tuple[Tensor, Tensor | None]:
        """Add a block's output product to the residual stream. Also return its output if a norm
        follows.
        """
        if self._norm(weights, norm_after) is None:
            after = residual.clone()
            add_product(weights, self.name(part), x, after, self.spec.residual_scale)
            return after, None
        return self._summed(weights, residual, product(weights, self.name(part), x), norm_after)

    def _summed(
        self, weights: Weights, residual: Tensor, out: Tensor, norm_after: str
    ) -> tuple[Tensor, Tensor | None]:
        """Add a block's output to the residual stream. Also return it if a norm follows."""
        scale, norm = self.spec.residual_scale, self._norm(weights, norm_after)
        if norm is None:
            return residual + out * scale, None
        return residual + weights.kernels.norm(out, norm, out.dtype) * scale, out

    def _added_gradient(
        self, weights: Weights, out: Tensor | None, d_after: Tensor, norm_after: str, totals: Totals
    ) -> Tensor:
        """Return the gradient of a block's output product."""
        scale, norm = self.spec.residual_scale, self._norm(weights, norm_after)
        if out is None or norm is None:
            return d_after if scale == 1 else d_after * scale
        d_out, d_weight = torch.empty_like(out), totals.total(self.name(norm_after))
        weights.kernels.norm_gradient(out, norm, d_after, d_out, d_weight, scale=scale)
        return d_out

    def _norm_gradient(
        self, weights: Weights, part: str, x: Tensor, d_out: Tensor, d_x: Tensor, totals: Totals
    ) -> None:
        """Add the gradient of the residual stream through the norm before a block."""
        norm = self._norm(weights, part)
        if norm is None:
            d_x += d_out
            return
        total = totals.total(self.name(part))
        weights.kernels.norm_gradient(x, norm, d_out, d_x, total, adds=True)

    def _norm(self, weights: Weights, part: str) -> Norm | None:
        return norm_of(weights, self.spec, self.name(part), part)

    def _head_norms(self, weights: Weights) -> tuple[Norm | None, Norm | None]:
        if not self.spec.qk_norm:
            return None, None
        return self._norm(weights, "q_norm"), self._norm(weights, "k_norm")

    def _rotary(self, rows: Rows) -> Rotary:
        return Rotary(*self.rope, rows.positions)

    def _rule(self, weights: Weights) -> AttentionRule:
        sinks, spec = weights.vector(self.name("sinks")), self.spec
        sinks = None if sinks is None else sinks.float()
        window = spec.windows[self.index]
        return AttentionRule(window, spec.attention_scale, spec.attention_cap, sinks)

    def _stored(self, rows: Tensor) -> Tensor:
        """Round keys or values to the codes that the engine stores."""
        by_head = rows.unflatten(1, (self.shape.kv_heads, -1))
        return self.kept.rounded(by_head).flatten(1).contiguous()


# Norms that a layer has without weights if `ModelSpec.bare_norms`.
_BARE = ("attn_norm", "mlp_norm", "q_norm", "k_norm", "norm")


def norm_of(weights: Weights, spec: ModelSpec, name: str, part: str) -> Norm | None:
    """Return a norm by the name of its weight. None: the model has no such norm."""
    weight = weights.vector(name)
    if weight is None and spec.bare_norms and part in _BARE:
        heads = part in ("q_norm", "k_norm")
        size = spec.head_dim if heads else spec.hidden_size
        weight = torch.ones(size, device=weights.kernels.device)
    if weight is None:
        return None
    return Norm(weight, spec.rms_norm_eps, spec.norm_offset, weights.kernels.dtype)


def normalized(weights: Weights, residual: Tensor, norm: Norm | None) -> Tensor:
    """Return rows as the input of a product."""
    kernels = weights.kernels
    return kernels.rounded(residual) if norm is None else kernels.norm(residual, norm)
