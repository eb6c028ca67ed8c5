"""The decoder: one forward pass over the rows of a batch, by a `ModelSpec` and the operations it is
given.
"""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_inference.core.batch import ForwardBatch
from nano_inference.models.activations import UNGATED
from nano_inference.models.rope import rotation
from nano_inference.models.routes import RouteRecord
from nano_inference.models.sharding.context import SharedContext
from nano_inference.models.sharding.rank_exchange import RankExchange
from nano_inference.models.sharding.shard import shard_of
from nano_inference.models.spec.experts import MoeSpec
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.spec.states import DeltaNet
from nano_inference.models.taps import Taps
from nano_inference.ops import reference
from nano_inference.ops.backend import KvcacheView, Norm, Operations, Ops
from nano_inference.ops.lora import HEAD, Adapter
from nano_inference.ops.moe import Biases, Experts, Shared
from nano_inference.ops.reference import lora, scaled
from nano_inference.ops.state import DeltaWeights, ShortConvWeights
from nano_inference.parallel.head import ShardedHead
from nano_inference.sampling.columns import to_device
from nano_inference.sampling.logit_scale import UNSCALED
from nano_inference.sampling.pipeline import allowed
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.sampling_batch import SamplingBatch, greedy_batch

# as `Biases` has them
EXPERT_BIASES = ("router_logits_bias", "experts_gate_up_bias", "experts_down_bias")
BEST_TILE = 256  # rows whose logits are in memory at once where only their best tokens are wanted
MASKED_TILE = 64  # rows whose logits are in memory at once where they are scored under masks


_NOT_ROUNDED = Norm(None, 0.0, 0.0, torch.float32)


class BestTokens(NamedTuple):
    """The most probable tokens after some rows, best first, and their logprobs under the model's
    own distribution.
    """

    token_ids: Tensor  # int64 [T, K]
    logprobs: Tensor  # float32 [T, K]


class HeadRows(NamedTuple):
    """Rows that logits are made of, and whose they are (`Adapted`)."""

    adapters: Sequence[Adapter]
    row_adapters: Tensor

    def of(self, rows: Tensor) -> "HeadRows":
        """Some of the rows: int64 [L]."""
        return HeadRows(self.adapters, self.row_adapters[rows]) if self.adapters else self


NO_ADAPTERS = HeadRows((), torch.empty(0, dtype=torch.int64))


class ForwardResult(NamedTuple):
    """What a forward pass gives."""

    # [L, H], rows `batch.logits_indices` after the last norm; good until the next forward
    hidden: Tensor
    # float32 [P], logprobs of `batch.score_targets` at rows `batch.score_rows`, at their
    # temperatures
    scores: Tensor
    best: BestTokens | None = None  # after rows `batch.best_rows`; None where there are none
    rows: HeadRows = NO_ADAPTERS  # whose the rows of `hidden` are, where adapters change the head


class Decoder:
    """Weights, rotary tables and operations of one model. It never asks which device it is on.

    Args:
        spec: of the part of the model that is here (`ModelShard.spec`).
        params: of that part.
        ops: of the backend.
        num_positions: rows of the rotary tables.
        rank_exchange: the other ranks that share the model; None: all of it is here.
    """

    def __init__(
        self,
        spec: ModelSpec,
        params: dict[str, Any],
        ops: Ops,
        num_positions: int,
        rank_exchange: RankExchange | None = None,
    ) -> None:
        self.spec = spec
        self.params = params
        self.ops = ops
        self.rank_exchange = (
            rank_exchange if rank_exchange is not None else RankExchange(shard_of(spec))
        )
        self.part = self.rank_exchange.part
        self.is_last_stage = self.part.place.is_last_stage
        self.context = self._shared_context()
        matrix = next(
            param
            for name, param in params.items()
            if name.startswith("layers.0.") and len(param.shape) == 2
        )
        self.device = matrix.device
        self.dtype = matrix.dtype
        self.logit_scale = spec.logit_scale
        kinds = [(rope, spec.layer(layer).head_dim) for layer, rope in enumerate(spec.ropes)]
        tables = {kind: rotation(*kind, num_positions, self.device) for kind in set(kinds)}
        # one entry a layer; layers that turn alike share tables
        self.ropes = tuple(tables[kind] for kind in kinds)
        self.layers: Sequence[int] = range(spec.num_layers)  # that a forward goes through
        # weights of norms that have none
        self._ones = (
            torch.ones(max(spec.hidden_size, spec.head_dim), dtype=self.dtype, device=self.device)
            if spec.bare_norms
            else None
        )
        self._value_norm = (
            Norm(torch.ones(spec.widest_head, device=self.device), spec.rms_norm_eps, 0, self.dtype)
            if spec.value_norm
            else None
        )
        # rounded as the model was trained
        self.embed_scale = float(torch.tensor(spec.embed_scale, dtype=self.dtype))
        self._inputs_scale = float(torch.tensor(spec.layer_inputs**0.5, dtype=self.dtype))
        # where the experts of every row are noted, if they are wanted
        self.routes: RouteRecord | None = None
        # heads that guess read what some layers are given
        self.taps: Taps | None = None
        # by whom it serves: a KV storage (`Ops.compile`), or captured graphs
        self.recorded: dict[object, Any] = {}

    @property
    def head(self) -> Any:
        """The weight that logits are made with."""
        return self.params["embed" if self.spec.tie_word_embeddings else "head"]

    @property
    def _end(self) -> Ops | ShardedHead:
        """What turns hidden rows into logits, draws and scores."""
        group = self.rank_exchange.tensor
        return self.ops if group is None else ShardedHead(self.ops, group, self.part.vocab_bounds)

    def forward(self, batch: ForwardBatch, view: KvcacheView) -> ForwardResult:
        """Compute the rows of a batch and store their keys and values."""
        if self.context is not None:
            return self._forward_own(batch, view, self.context)
        return self._forward(batch, view)

    def _forward_own(
        self, batch: ForwardBatch, view: KvcacheView, context: SharedContext
    ) -> ForwardResult:
        """Compute this rank's rows of a batch; what is wanted of any row comes from the
        rank that computed it.
        """
        own = context.own_rows(batch, view.block_size)
        hidden, scores, best, _ = self._forward(own, view)
        if not self.is_last_stage:
            return ForwardResult(hidden, scores)
        step = own.context
        return ForwardResult(
            context.rejoin(step.logits, hidden) if len(batch.logits_indices) else hidden,
            context.rejoin(step.scores, scores) if len(batch.score_rows) else scores,
            None
            if best is None
            else BestTokens(*(context.rejoin(step.best, each) for each in best)),
        )

    def _forward(self, batch: ForwardBatch, view: KvcacheView) -> ForwardResult:
        hidden = self._hidden(batch, view)
        if not self.is_last_stage:
            return ForwardResult(hidden[:0], torch.empty(0, device=self.device))
        whose = self._head_rows(batch)
        scores = (
            self._score(hidden, batch, whose)
            if len(batch.score_rows)
            else torch.empty(0, device=self.device)
        )
        best = (
            self.best_tokens(hidden[batch.best_rows], batch.num_best, whose.of(batch.best_rows))
            if batch.num_best
            else None
        )
        drawn = len(batch.logits_indices)
        return ForwardResult(
            hidden if drawn == len(hidden) else hidden[batch.logits_indices],
            scores,
            best,
            whose.of(batch.logits_indices),
        )

    def _head_rows(self, batch: ForwardBatch) -> HeadRows:
        """Whose the rows of a batch are, where an adapter changes the head."""
        if not any(HEAD in adapter.parts for adapter in batch.adapters):
            return NO_ADAPTERS
        return HeadRows(batch.adapters, batch.row_adapters)

    def _score(self, hidden: Tensor, batch: ForwardBatch, whose: HeadRows) -> Tensor:
        """The logprobs [P] of the tokens that are scored, after rows [N, H]."""
        rows, scale = hidden[batch.score_rows], self.logit_scale
        targets, temperatures = batch.score_targets, batch.score_temperatures
        if not len(batch.score_mask_words) and not whose.adapters:
            return self._end.gather_logprobs(rows, self.head, scale, targets, temperatures)
        whose, masked = whose.of(batch.score_rows), batch.score_mask_rows >= 0
        scores = torch.empty(len(rows), device=self.device)
        plain = (~masked).nonzero()[:, 0]
        if whose.adapters:
            for tile in plain.split(MASKED_TILE):
                logits = self.logits(rows[tile], whose.of(tile))
                scores[tile] = self.ops.score_logits(logits, targets[tile], temperatures[tile])
        elif len(plain):
            scores[plain] = self._end.gather_logprobs(
                rows[plain], self.head, scale, targets[plain], temperatures[plain]
            )
        for tile in masked.nonzero()[:, 0].split(MASKED_TILE):
            logits = self.logits(rows[tile], whose.of(tile))
            finite = logits.amax(dim=-1, keepdim=True).isfinite()
            may = allowed(batch.score_mask_rows[tile], batch.score_mask_words, logits.shape[1])
            # as in a draw, a row that is not finite where the mask cuts it has no logprob
            cut = logits.masked_fill(~may, -torch.inf).masked_fill(~finite, torch.nan)
            scores[tile] = self.ops.score_logits(cut, targets[tile], temperatures[tile])
        return scores

    def draw(self, hidden: Tensor, batch: SamplingBatch, whose: HeadRows = NO_ADAPTERS) -> Draw:
        """Draw samples from the logits of rows [L, H] that a forward pass gave."""
        if whose.adapters:
            return self.ops.sample_logits(self.logits(hidden, whose), batch)
        return self._end.sample(hidden, self.head, self.logit_scale, batch)

    def logits(self, hidden: Tensor, whose: HeadRows = NO_ADAPTERS) -> Tensor:
        """The logits of rows [L, H] that a forward pass gave: float32 [L, V]."""
        logits = self._end.logits(hidden, self.head, self.logit_scale)
        if not whose.adapters:
            return logits
        # A row whose head no adapter changes is scaled by the backend, as in every other step.
        changes = [HEAD in adapter.parts for adapter in whose.adapters]
        changes = torch.tensor([*changes, False], device=self.device)  # the last is that of -1
        own = changes[whose.row_adapters].nonzero()[:, 0]
        rows, products = hidden[own], logits[own]
        if self.logit_scale != UNSCALED:
            products = self._end.logits(rows, self.head, UNSCALED)
        logits[own] = scaled(lora(products, rows, HEAD, whose.of(own)), self.logit_scale)
        return logits

    def best_tokens(
        self, hidden: Tensor, num_best: int, whose: HeadRows = NO_ADAPTERS
    ) -> BestTokens:
        """The most probable tokens after rows [T, H] that a forward pass gave: what greedy draws
        report there.
        """
        if not len(hidden):
            nothing = torch.empty((0, num_best), device=self.device)
            return BestTokens(nothing.long(), nothing)
        draws = [
            self.draw(
                hidden[tile],
                to_device(greedy_batch(len(tile), num_best), self.device),
                whose.of(tile),
            )
            for tile in torch.arange(len(hidden), device=self.device).split(BEST_TILE)
        ]
        return BestTokens(
            torch.cat([draw.top_ids for draw in draws]), torch.cat([d.top_logprobs for d in draws])
        )

    @torch.inference_mode()
    def serve_others(self) -> None:
        """A forward of no rows: what the ranks that share this one's experts need of it while they
        make one.
        """
        moe = self.spec.moe
        if moe is None or self.rank_exchange.exchange is None:
            return
        nothing = torch.empty((0, self.spec.hidden_size), dtype=self.dtype, device=self.device)
        for layer in range(self.spec.num_layers):
            if moe.layers[layer]:
                self.ops.moe(
                    nothing, self._experts(f"layers.{layer}.", moe), self.rank_exchange.exchange
                )

    def forget_recorded(self) -> None:
        """Record anew what the backend records: weights or KV tensors have moved."""
        self.recorded.clear()

    def twin(
        self,
        params: dict[str, Any] | None = None,
        ops: Ops | None = None,
        layers: Sequence[int] | None = None,
    ) -> "Decoder":
        """The same model with other weights, other operations, some of its layers alone, or for KV
        tensors of its own; tables are shared.
        """
        other = copy.copy(self)
        other.params = self.params if params is None else params
        other.ops = self.ops if ops is None else ops
        other.routes, other.taps, other.recorded = None, None, {}
        other.layers = self.layers if layers is None else layers
        other.context = other._shared_context()
        return other

    def close(self) -> None:
        """Let go of the weights. Nothing may be called afterwards."""
        self.params.clear()
        self.recorded.clear()

    def _shared_context(self) -> SharedContext | None:
        group = self.rank_exchange.context
        return None if group is None else SharedContext(group, self.ops, self.spec)

    def _hidden(self, batch: ForwardBatch, view: KvcacheView) -> Tensor:
        """All rows after the last norm, [N, H]; good until the next call."""
        if self.ops.compile is None:
            return self.trunk(self.ops, batch, view)
        key = (view, bool(batch.adapters))
        if key not in self.recorded:
            self.recorded[key] = self.ops.compile(self.trunk, batch, view, self.dtype)
        return self.recorded[key](batch)

    def trunk(self, ops: Operations, batch: ForwardBatch, view: KvcacheView) -> Tensor:
        """Everything but the head, by calls of `ops` alone: a backend may record them once and
        replay them.
        """
        spec = self.spec
        whole = self.context is None  # the keys of a sequence are all here
        plans = (
            {w: ops.plan_attention(batch, view.block_size, w) for w in set(spec.windows)}
            if whole
            else {}
        )
        residual = self._enter(ops, batch)  # [N, H]
        inputs = self._layer_inputs(ops, batch, residual) if spec.layer_inputs else None
        x: Tensor | None = None
        for layer in self.layers:
            window = spec.windows[layer]
            name = f"layers.{layer}."
            normed, residual = ops.rms_norm(
                x, residual, self._norm(name + "attn_norm"), spec.residual_scale
            )
            if self.taps is not None and layer in self.taps.layers:
                note = partial(self.taps.note, layer)
                residual = ops.call(batch, note, (residual,), spec.hidden_size, torch.float32)
            if spec.state is not None and spec.state.layers[layer]:
                x = self._with_state(ops, normed, name, layer, batch, view)
            else:
                x = self._attention(ops, normed, name, layer, batch, view, plans.get(window))
            x = self._after(ops, x, name + "attn_out_norm")
            normed, residual = ops.rms_norm(
                x, residual, self._norm(name + "mlp_norm"), spec.residual_scale
            )
            if spec.moe is not None and spec.moe.beside:
                x = self._mlp_and_experts(ops, batch, normed, residual, name, layer)
            else:
                x = self._mlp(ops, batch, normed, name, layer)
                x = self._after(ops, x, name + "mlp_out_norm")
            if inputs is not None:
                x, residual = self._with_input(ops, batch, x, residual, inputs, layer)
            if spec.layer_scales:
                _, residual = ops.rms_norm(x, residual, _NOT_ROUNDED, spec.residual_scale)
                scale = partial(_times, self.params[name + "scale"])
                residual = ops.call(batch, scale, (residual,), spec.hidden_size, torch.float32)
                x = None
        if not self.is_last_stage:
            _, residual = ops.rms_norm(x, residual, _NOT_ROUNDED, spec.residual_scale)
            return ops.call(
                batch, self.rank_exchange.send, (residual,), spec.hidden_size, torch.float32
            )
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
        rope, kind = self.ropes[layer], self.spec.layer(layer)
        qkv, gate = self._qkv(ops, batch, normed, name), None
        if spec.gated_attention:
            width = spec.num_heads * spec.head_dim
            gate = ops.columns(qkv, 0, width)
            qkv = ops.columns(qkv, width, 2 * width + 2 * spec.num_kv_heads * spec.head_dim)
        q = ops.rope_and_store(
            qkv,
            rope.cos,
            rope.sin,
            batch.positions,
            view,
            layer,
            batch.slot_mapping,
            spec.num_heads,
            kind.num_kv_heads if kind.keys_of == layer else 0,
            self._head_norms(name, layer),
            rope.interleaved,
            rope.query_scales,
            *((kind.joint,) if kind.joint else ()),  # which not every backend has
        )
        scores: tuple[Any, ...] = (spec.attention_scale,)
        if spec.attention_sinks or spec.attention_cap:  # which not every backend has
            scores += params.get(name + "sinks"), spec.attention_cap
        if self.context is None:
            attended = ops.attention(q, view, layer, plan, *scores)
        else:
            attend = self.context.attention(view, layer, spec.windows[layer], *scores)
            attended = ops.call(batch, attend, (q,), spec.num_heads * kind.head_dim, self.dtype)
        if spec.latent is not None:
            attended = ops.latent.values(attended, params[name + "kv_b"], spec.latent.sizes)
        if gate is not None:
            attended = ops.sigmoid_gate(attended, gate)
        start, stop = self.part.own_columns
        if stop - start < spec.num_heads * spec.value_dim:
            attended = ops.columns(attended, start, stop)
        segments = self.part.head_segments_of(layer)
        return self._row_parallel(ops, batch, attended, name + "o", segments)

    def _head_norms(self, name: str, layer: int) -> tuple[Norm | None, ...] | None:
        """Of queries, keys and values, as `Ops.rope_and_store` has them."""
        spec, kind = self.spec, self.spec.layer(layer)
        own: tuple[Norm | None, ...] = (None, None)
        if spec.qk_norm:
            own = (self._norm(name + "q_norm", kind.head_dim),)
            if kind.keys_of == layer:
                own += (self._norm(name + "k_norm", kind.head_dim),)
        if self._value_norm is None or kind.keys_of != layer:
            return own if spec.qk_norm else None
        weight = self._value_norm.weight
        assert weight is not None
        return (*own, self._value_norm._replace(weight=weight[: kind.head_dim]))

    def _with_state(
        self,
        ops: Operations,
        normed: Tensor,
        name: str,
        layer: int,
        batch: ForwardBatch,
        view: KvcacheView,
    ) -> Tensor:
        params, state = self.params, self.spec.state
        projected = self._linear(ops, batch, normed, name + "mix_in")
        conv = params[name + "conv"]
        if isinstance(state, DeltaNet):
            decay = params[name + "log_decay"], params[name + "decay_bias"]
            heads = state.key_heads, state.value_heads, state.key_dim, state.value_dim
            norm, eps = params[name + "mix_norm"], self.spec.rms_norm_eps
            weights = DeltaWeights(conv, *decay, norm, eps, *heads)
            mixed = ops.delta_net(projected, weights, batch, view.states, layer)
        else:
            weights = ShortConvWeights(conv, params.get(name + "conv_bias"))
            mixed = ops.short_conv(projected, weights, batch, view.states, layer)
        return self._linear(ops, batch, mixed, name + "mix_out")

    def _linear(
        self,
        ops: Operations,
        batch: ForwardBatch,
        x: Tensor,
        name: str,
        segments: tuple[int, ...] | None = None,
    ) -> Tensor:
        """The product of rows and a weight with its bias, and what their adapters add."""
        y = ops.linear(x, self.params[name], self.params.get(name + "_bias"), segments)
        return ops.lora(y, x, name, batch) if batch.adapters else y

    def _qkv(self, ops: Operations, batch: ForwardBatch, normed: Tensor, name: str) -> Tensor:
        """Queries, keys and values side by side, as attention has them: of latents, one KV head."""
        params, latent = self.params, self.spec.latent
        if latent is None:
            return self._linear(ops, batch, normed, name + "qkv")
        q = normed
        if latent.query_rank is not None:
            norm = self._norm(name + "q_a_norm")._replace(eps=latent.eps)
            q = ops.rms_norm(None, self._linear(ops, batch, q, name + "q_a"), norm)[0]
        return ops.latent.meet(
            self._linear(ops, batch, q, name + "q_b"),
            self._linear(ops, batch, normed, name + "kv_a"),
            params[name + "kv_b"],
            self._norm(name + "kv_a_norm")._replace(eps=latent.eps),
            latent.sizes,
        )

    def _enter(self, ops: Operations, batch: ForwardBatch) -> Tensor:
        """The residual stream before the first layer that is here."""
        rank_exchange, hidden = self.rank_exchange, self.spec.hidden_size
        if not self.part.place.is_first_stage:
            return ops.call(batch, rank_exchange.receive, (), hidden, torch.float32)
        weight = self.params["embed"]
        if rank_exchange.tensor is None:
            return self._embedded(ops, ops.embed(batch.input_ids, weight, self.embed_scale))
        part = (self.part.vocab.start, self.part.whole.vocab_size)
        rows = ops.embed(batch.input_ids, weight, self.embed_scale, part)
        rows = ops.call(batch, rank_exchange.add_up, (rows,), hidden, torch.float32)
        return self._embedded(ops, rows)

    def _embedded(self, ops: Operations, rows: Tensor) -> Tensor:
        """Embeddings, normalised where the model does that."""
        if not self.spec.embed_norm:
            return rows
        return ops.rms_norm(None, rows, self._norm("norm")._replace(dtype=torch.float32), 1.0)[0]

    def _layer_inputs(self, ops: Operations, batch: ForwardBatch, rows: Tensor) -> Tensor:
        """What all layers get of their own, side by side: float32 [N, layers * layer_inputs], from
        embeddings [N, H].
        """
        spec, params = self.spec, self.params
        norm = Norm(params["inputs_norm"], spec.rms_norm_eps, spec.norm_offset, torch.float32)
        projected = ops.linear(self._rounded(ops, None, rows)[0], params["inputs_project"], None)
        known = ops.embed(batch.input_ids, params["inputs_embed"], self._inputs_scale)
        join = partial(_joined, norm, spec.hidden_size**-0.5)
        width = spec.num_layers * spec.layer_inputs
        return ops.call(batch, join, (projected, known), width, torch.float32)

    def _with_input(
        self,
        ops: Operations,
        batch: ForwardBatch,
        x: Tensor,
        residual: Tensor,
        inputs: Tensor,
        layer: int,
    ) -> tuple[Tensor, Tensor]:
        """What a layer's own input adds to the residual stream, to which x is added first."""
        spec, params, name = self.spec, self.params, f"layers.{layer}."
        width = spec.layer_inputs
        rows, residual = self._rounded(ops, x, residual)
        gates = ops.linear(rows, params[name + "input_gate"], None)
        own = ops.columns(inputs, layer * width, (layer + 1) * width)
        gate = partial(_gated, spec.activation)
        gated = ops.call(batch, gate, (gates, own), width, self.dtype)
        x = ops.linear(gated, params[name + "input_out"], None)
        return self._after(ops, x, name + "input_norm"), residual

    def _rounded(
        self, ops: Operations, x: Tensor | None, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The residual stream as products read it, and itself, after x was added."""
        norm = Norm(None, 0.0, 0.0, self.dtype)
        return ops.rms_norm(x, residual, norm, self.spec.residual_scale)

    def _row_parallel(
        self,
        ops: Operations,
        batch: ForwardBatch,
        x: Tensor,
        name: str,
        segments: tuple[int, ...] | None,
    ) -> Tensor:
        """A product whose input columns are spread over ranks: each adds up its own, then all of
        them.
        """
        weight, bias, rank_exchange = (
            self.params[name],
            self.params.get(name + "_bias"),
            self.rank_exchange,
        )
        if rank_exchange.tensor is None:
            return self._linear(ops, batch, x, name, segments if self.ops.in_segments else None)
        segments = segments if segments is not None else (0, weight.shape[1])
        add_up = partial(rank_exchange.add_up, bias=None if bias is None else bias.float())
        return ops.call(
            batch,
            add_up,
            (ops.linear(x, weight, None, segments),),
            self.spec.hidden_size,
            torch.float32,
        )

    def _mlp(
        self, ops: Operations, batch: ForwardBatch, normed: Tensor, name: str, layer: int
    ) -> Tensor:
        if self.spec.moe is not None and self.spec.moe.layers[layer]:
            return self._mixed(ops, batch, normed, None, name, layer)
        return self._dense(ops, batch, normed, name, layer)

    def _mlp_and_experts(
        self,
        ops: Operations,
        batch: ForwardBatch,
        normed: Tensor,
        residual: Tensor,
        name: str,
        layer: int,
    ) -> Tensor:
        """What an MLP of normed rows and experts beside it add to the residual stream, of which
        experts and router have norms of their own.
        """
        dense = self._dense(ops, batch, normed, name, layer)
        dense = self._after(ops, dense, name + "dense_out_norm")
        rows = ops.rms_norm(None, residual, self._norm(name + "experts_norm"), 1.0)[0]
        routed = None
        if name + "router_norm" in self.params:
            routed = ops.rms_norm(None, residual, self._norm(name + "router_norm"), 1.0)[0]
        mixed = self._mixed(ops, batch, rows, routed, name, layer)
        mixed = self._after(ops, mixed, name + "experts_out_norm")
        norm = self._norm(name + "mlp_out_norm")._replace(dtype=torch.float32)
        return ops.rms_norm(mixed, dense, norm, 1.0)[0]

    def _mixed(
        self,
        ops: Operations,
        batch: ForwardBatch,
        rows: Tensor,
        routed: Tensor | None,
        name: str,
        layer: int,
    ) -> Tensor:
        """Rows through their experts, which the router chooses by rows of its own where there are
        such.
        """
        assert self.spec.moe is not None
        experts, exchange = self._experts(name, self.spec.moe), self.rank_exchange.exchange
        beside = () if routed is None else (routed,)
        if self.routes is None:
            return ops.moe(rows, experts, exchange, *((None, routed) if beside else ()))
        moe = partial(self.ops.moe, experts=experts, exchange=exchange)
        noted = partial(self.routes.compute, layer, moe)
        return ops.call(batch, noted, (rows, *beside), self.spec.hidden_size, torch.float32)

    def _dense(
        self, ops: Operations, batch: ForwardBatch, normed: Tensor, name: str, layer: int
    ) -> Tensor:
        if self.spec.gated:
            inner = ops.gate(
                self._linear(ops, batch, normed, name + "gate_up"), self.spec.activation
            )
        else:
            activate = partial(_activated, self.spec.activation, self.params.get(name + "act"))
            up = self._linear(ops, batch, normed, name + "up")
            inner = ops.call(batch, activate, (up,), self.spec.intermediate_size, self.dtype)
        segments = self.part.inner_segments_of(layer)
        return self._row_parallel(ops, batch, inner, name + "down", segments)

    def _experts(self, name: str, moe: MoeSpec) -> Experts:
        router, gate_up, down = (
            self.params[name + part] for part in ("router", "experts_gate_up", "experts_down")
        )
        shared = moe.shared and Shared(
            self.params[name + "shared_gate_up"],
            self.params[name + "shared_down"],
            moe.shared.gate is not None,
        )
        bias = self.params[name + "router_bias"].flatten() if moe.bias else None
        return Experts(
            router,
            gate_up,
            down,
            moe.num_experts,
            moe.routing,
            self.spec.activation,
            bias,
            shared,
            Biases(*(self.params[name + part] for part in EXPERT_BIASES)) if moe.biases else None,
            self.params[name + "router_scales"] if moe.scales is not None else None,
        )

    def _after(self, ops: Operations, x: Tensor, name: str) -> Tensor:
        """What a block adds to the residual stream: normalised where the model has a norm there,
        and not rounded.
        """
        if name not in self.params:
            return x
        norm = self._norm(name)._replace(dtype=torch.float32)
        return ops.rms_norm(None, x, norm, 1.0)[0]

    def _norm(self, name: str, width: int | None = None) -> Norm:
        """A norm of the model, as wide as the hidden state unless told; where it has none, what
        rounds the residual stream for the next product.
        """
        weight = (
            self.params.get(name)
            if self._ones is None
            else self._ones[: width or self.spec.hidden_size]
        )
        return Norm(weight, self.spec.rms_norm_eps, self.spec.norm_offset, self.dtype)


def _activated(
    activation: str, numbers: Tensor | None, _batch: ForwardBatch, out: Tensor, x: Tensor
) -> None:
    out.copy_(UNGATED[activation](x.float(), numbers))


def _times(number: Tensor, _batch: ForwardBatch, out: Tensor, x: Tensor) -> None:
    torch.mul(x, number, out=out)


def _joined(
    norm: Norm, scale: float, _batch: ForwardBatch, out: Tensor, projected: Tensor, known: Tensor
) -> None:
    """What layers get of their own: of a row's embedding, normalised layer by layer, and of its
    token.
    """
    assert norm.weight is not None
    of_layers = (projected.float() * scale).unflatten(1, (-1, len(norm.weight)))
    torch.mul(reference.normed_rows(of_layers, norm).flatten(1) + known, 2**-0.5, out=out)


def _gated(activation: str, _batch: ForwardBatch, out: Tensor, gates: Tensor, x: Tensor) -> None:
    out.copy_(reference.gate(torch.cat((gates.float(), x), dim=1), activation))


@torch.inference_mode()
def model_forward(model: Decoder, inputs: ForwardBatch, cache: KvcacheView) -> Tensor:
    """One forward pass: rows of `inputs` through `model`, keys and values into `cache`; logits
    float32 [L, V].
    """
    return model.logits(model.forward(inputs, cache).hidden)
