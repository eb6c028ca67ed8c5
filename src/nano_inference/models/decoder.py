"""The decoder: one forward pass over the rows of a batch, from a `ModelSpec` and a backend's
operations.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from nano_inference.arrays import Tensor, host, namespace, without_gradients
from nano_inference.models.blocks.build import build_layer, build_mixtures
from nano_inference.models.blocks.gemma4 import LayerInputs
from nano_inference.models.blocks.step import ModelPart, Step, rounded
from nano_inference.models.rope import rotation
from nano_inference.models.routes import RouteRecord
from nano_inference.models.sharding.context import SharedContext
from nano_inference.models.sharding.rank_exchange import RankExchange
from nano_inference.models.sharding.shard import shard_of
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.taps import Taps
from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.interface import KvcacheView, Operations, Ops, X
from nano_inference.ops.lora import HEAD, Adapter
from nano_inference.parallel.head import ShardedHead
from nano_inference.sampling.logit_scale import UNSCALED
from nano_inference.sampling.pipeline import allowed
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.scaling import scaled
from nano_inference.sampling.tensors import SamplingBatch, greedy_batch

BEST_TILE = 256  # rows whose logits are in memory simultaneously to find their best tokens
MASKED_TILE = 64  # rows whose logits are in memory simultaneously to score them under masks


class BestTokens(NamedTuple):
    """Most probable tokens after some rows, best first, with logprobs of the unmodified model."""

    token_ids: Tensor  # int64 [T, K]
    logprobs: Tensor  # float32 [T, K]


class HeadRows(NamedTuple):
    """Adapters of the rows whose logits are computed, as in `Adapted`."""

    adapters: Sequence[Adapter]
    row_adapters: Tensor

    def of(self, rows: Tensor) -> "HeadRows":
        """Return some of the rows: int64 [L]."""
        return HeadRows(self.adapters, self.row_adapters[rows]) if self.adapters else self


NO_ADAPTERS = HeadRows((), host.empty(0, dtype=host.int64))


class ForwardResult(NamedTuple):
    """Results of a forward pass."""

    # [L, H], rows `batch.logits_indices` after the last norm, valid until the next forward
    hidden: Tensor
    # float32 [P], logprobs of `batch.score_targets` at rows `batch.score_rows`, with the
    # temperature of each
    scores: Tensor
    best: BestTokens | None = None  # after rows `batch.best_rows`, if requested
    # adapters of the rows of `hidden`, if any adapter changes the head
    rows: HeadRows = NO_ADAPTERS


class Decoder:
    """Weights, rotary tables and operations of one model, on any device.

    Args:
        spec: Description of the model part held here (`ModelShard.spec`).
        params: Parameters of that part.
        ops: Operations of the backend.
        num_positions: Number of rows of the rotary tables.
        rank_exchange: The other ranks of the model. None: the whole model is here.
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
        self.is_first_stage = self.part.position.is_first_stage
        self.is_last_stage = self.part.position.is_last_stage
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
        # by layer, with shared tables if layers rotate alike
        self.ropes = tuple(tables[kind] for kind in kinds)
        self.layers: Sequence[int] = range(spec.num_layers)  # layers of a forward pass
        self._build()
        # rounded as in training
        self.embed_scale = rounded(spec.embed_scale, self.dtype)
        # record of the experts of every row (None: not requested)
        self.routes: RouteRecord | None = None
        # residual streams for draft heads
        self.taps: Taps | None = None
        # recordings of `Ops.compile` by KV storage, and captured graphs
        self.recorded: dict[object, Any] = {}

    def _build(self) -> None:
        """Build the blocks, which hold references to their weights."""
        spec, width = self.spec, max(self.spec.hidden_size, self.spec.head_dim)
        part = ModelPart(
            spec=spec,
            params=self.params,
            ops=self.ops,
            exchange=self.rank_exchange,
            context=self.context,
            ropes=self.ropes,
            dtype=self.dtype,
            ones=self.xp.ones(width, dtype=self.dtype, device=self.device)
            if spec.bare_norms
            else None,
        )
        self.mixtures = build_mixtures(part)
        self.blocks = [build_layer(part, layer, self.mixtures) for layer in self.layers]
        self.inputs = LayerInputs(part) if spec.layer_inputs else None
        self.norm = part.norm("norm")
        self.not_rounded = part.not_rounded

    @property
    def xp(self) -> Any:
        """Functions that create arrays on the device: `arrays.host` or `torch`."""
        return namespace(self.dtype)

    @property
    def head(self) -> Any:
        """Weight that computes logits."""
        return self.params["embed" if self.spec.tie_word_embeddings else "head"]

    @property
    def _end(self) -> Ops | ShardedHead:
        """Operations that turn hidden rows into logits, draws and scores."""
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
        """Compute this rank's rows of a batch and gather the results of the other rows."""
        mine = context.own_rows(batch, view.block_size)
        hidden, scores, best, _ = self._forward(mine, view)
        if not self.is_last_stage:
            return ForwardResult(hidden, scores)
        step = mine.context
        return ForwardResult(
            context.rejoin(step.logits, hidden) if len(batch.logits_indices) else hidden,
            context.rejoin(step.scores, scores) if len(batch.score_rows) else scores,
            None
            if best is None
            else BestTokens(*(context.rejoin(step.best, each) for each in best)),
            self._head_rows(batch).of(batch.logits_indices),
        )

    def _forward(self, batch: ForwardBatch, view: KvcacheView) -> ForwardResult:
        return self.results(self._hidden(batch, view), batch)

    def results(self, hidden: Tensor, batch: ForwardBatch) -> ForwardResult:
        """Return the results of a batch whose rows after the last norm are known, [N, H]."""
        if not self.is_last_stage:
            return ForwardResult(hidden[:0], self.xp.empty(0, device=self.device))
        whose = self._head_rows(batch)
        scores = (
            self._score(hidden, batch, whose)
            if len(batch.score_rows)
            else self.xp.empty(0, device=self.device)
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
        """Return the adapters of a batch's rows, or none if no adapter changes the head."""
        if not any(HEAD in adapter.parts for adapter in batch.adapters):
            return NO_ADAPTERS
        return HeadRows(batch.adapters, batch.row_adapters)

    def _score(self, hidden: Tensor, batch: ForwardBatch, whose: HeadRows) -> Tensor:
        """Return the logprobs [P] of the scored tokens, after rows [N, H]."""
        rows, scale = hidden[batch.score_rows], self.logit_scale
        targets, temperatures = batch.score_targets, batch.score_temperatures
        if not len(batch.score_mask_words) and not whose.adapters:
            return self._end.gather_logprobs(rows, self.head, scale, targets, temperatures)
        whose, masked = whose.of(batch.score_rows), batch.score_mask_rows >= 0
        scores = self.xp.empty(len(rows), device=self.device)
        plain, under_masks = self.xp.arange(len(rows), device=self.device), ()
        if len(batch.score_mask_words):
            plain, rest = (each.nonzero()[:, 0] for each in (~masked, masked))
            under_masks = rest.split(MASKED_TILE)
        if whose.adapters:
            for tile in plain.split(MASKED_TILE):
                logits = self.logits(rows[tile], whose.of(tile))
                scores[tile] = self.ops.score_logits(logits, targets[tile], temperatures[tile])
        elif len(plain):
            scores[plain] = self._end.gather_logprobs(
                rows[plain], self.head, scale, targets[plain], temperatures[plain]
            )
        for tile in under_masks:
            logits = self.logits(rows[tile], whose.of(tile))
            finite = logits.amax(dim=-1, keepdim=True).isfinite()
            may = allowed(batch.score_mask_rows[tile], batch.score_mask_words, logits.shape[1])
            # as in a draw, a non-finite logit leaves a row without a logprob, even if it is masked
            cut = logits.masked_fill(~may, -math.inf).masked_fill(~finite, math.nan)
            scores[tile] = self.ops.score_logits(cut, targets[tile], temperatures[tile])
        return scores

    def draw(self, hidden: Tensor, batch: SamplingBatch, whose: HeadRows = NO_ADAPTERS) -> Draw:
        """Draw samples from the logits of rows [L, H] from a forward pass."""
        if whose.adapters:
            return self.ops.sample_logits(self.logits(hidden, whose), batch)
        return self._end.sample(hidden, self.head, self.logit_scale, batch)

    def logits(self, hidden: Tensor, whose: HeadRows = NO_ADAPTERS) -> Tensor:
        """Compute the logits of rows [L, H] from a forward pass: float32 [L, V]."""
        if whose.adapters and self.ops.step_adapters is not None:
            products = self._end.logits(hidden, self.head, UNSCALED)
            added = self.ops.lora(products, hidden, HEAD, whose)  # only to rows that change
            return scaled(added, self.logit_scale)
        logits = self._end.logits(hidden, self.head, self.logit_scale)
        if not whose.adapters:
            return logits
        # Rows whose adapter leaves the head unchanged keep the backend's logits, as in
        # steps without adapters.
        changes = [HEAD in adapter.parts for adapter in whose.adapters]
        changes = self.xp.tensor([*changes, False], device=self.device)  # index -1: no adapter
        changed = changes[whose.row_adapters].nonzero()[:, 0]
        rows, products = hidden[changed], logits[changed]
        if self.logit_scale != UNSCALED:
            products = self._end.logits(rows, self.head, UNSCALED)
        added = self.ops.lora(products, rows, HEAD, whose.of(changed))
        logits[changed] = scaled(added, self.logit_scale)
        return logits

    def best_tokens(
        self, hidden: Tensor, num_best: int, whose: HeadRows = NO_ADAPTERS
    ) -> BestTokens:
        """Return the most probable tokens after rows [T, H], as greedy draws report them."""
        if not len(hidden):
            nothing = self.xp.empty((0, num_best), device=self.device)
            return BestTokens(nothing.long(), nothing)
        draws = [
            self.draw(
                hidden[tile],
                greedy_batch(len(tile), num_best, self.device),
                whose.of(tile),
            )
            for tile in self.xp.arange(len(hidden), device=self.device).split(BEST_TILE)
        ]
        return BestTokens(
            self.xp.cat([draw.top_ids for draw in draws]),
            self.xp.cat([draw.top_logprobs for draw in draws]),
        )

    @without_gradients
    def serve_others(self) -> None:
        """Take part in a forward pass of other engines, without rows of its own.

        Engines in lockstep share their experts, so they run every forward pass together.
        """
        if self.rank_exchange.exchange is None:
            return
        nothing = self.xp.empty((0, self.spec.hidden_size), dtype=self.dtype, device=self.device)
        for mixture in self.mixtures.values():
            mixture.serve(self.ops, nothing)

    def forget_recorded(self) -> None:
        """Discard the backend's recordings, because weights or KV tensors have moved."""
        self.recorded.clear()

    def twin(
        self,
        params: dict[str, Any] | None = None,
        ops: Ops | None = None,
        layers: Sequence[int] | None = None,
        routes: RouteRecord | None = None,
        taps: Taps | None = None,
    ) -> "Decoder":
        """Return a copy of the model with some parts replaced and no recordings.

        Weights, operations and layers default to this model's. Without `routes` or `taps`, the copy
        has none. Rotary tables are shared.
        """
        other = copy.copy(self)
        other.params = self.params if params is None else params
        other.ops = self.ops if ops is None else ops
        other.routes, other.taps, other.recorded = routes, taps, {}
        other.layers = self.layers if layers is None else layers
        other.context = other._shared_context()
        other._build()
        return other

    def close(self) -> None:
        """Release the weights. The decoder is unusable afterwards."""
        self.params.clear()
        self.recorded.clear()
        self.blocks.clear()
        self.mixtures.clear()
        self.inputs, self.norm = None, self.not_rounded

    def _shared_context(self) -> SharedContext | None:
        group = self.rank_exchange.context
        return None if group is None else SharedContext(group, self.ops, self.spec)

    def _hidden(self, batch: ForwardBatch, view: KvcacheView) -> Tensor:
        """Compute the rows of `stage`, [N, H], valid until the next call."""
        if batch.adapters and self.ops.step_adapters is not None:
            batch = self.ops.step_adapters.group(batch)
        if self.ops.compile is None:
            return self.trunk(self.ops, batch, view)
        key = (view, bool(batch.adapters))
        if key not in self.recorded:
            self.recorded[key] = self.ops.compile(self.trunk, batch, view, self.dtype)
        return self.recorded[key](batch)

    def trunk(self, ops: Operations[X], batch: ForwardBatch, view: KvcacheView) -> X:
        """Compute everything but the head, messages included, only by calls of `ops`.

        A backend may record these calls once and replay them.
        """
        rank_exchange, shape = self.rank_exchange, (self.spec.hidden_size, self.xp.float32)
        received: X | None = None
        if not self.is_first_stage:
            received = ops.call(batch, rank_exchange.receive, (), *shape)
        out = self.stage(ops, batch, view, received)
        return out if self.is_last_stage else ops.call(batch, rank_exchange.send, (out,), *shape)

    def stage(
        self,
        ops: Operations[X],
        batch: ForwardBatch,
        view: KvcacheView,
        received: X | None = None,
    ) -> X:
        """Compute the part of `trunk` between its messages.

        Args:
            received: Residual stream [N, H] of the previous stage, float32. None: first stage.

        Returns:
            The rows after the last norm, or the residual stream for the next stage.
        """
        residual = self._embed(ops, batch) if received is None else received  # [N, H]
        step = Step(
            ops=ops,
            batch=batch,
            view=view,
            plans=self._plans(ops, batch, view),
            inputs=None if self.inputs is None else self.inputs(ops, batch, residual),
            routes=self.routes,
            taps=self.taps,
        )
        x: X | None = None
        for layer in self.blocks:
            x, residual = layer(step, x, residual)
        return self._leave(step, x, residual)

    def _plans(
        self, ops: Operations[X], batch: ForwardBatch, view: KvcacheView
    ) -> dict[int, object]:
        """Return attention plans by window, or none if ranks share the keys of a sequence."""
        if self.context is not None:
            return {}
        windows = set(self.spec.windows)
        return {each: ops.plan_attention(batch, view.block_size, each) for each in windows}

    def _leave(self, step: Step[X], x: X | None, residual: X) -> X:
        """Return the result of `stage` after its last layer."""
        ops, scale = step.ops, self.spec.residual_scale
        if self.is_last_stage:
            normed, residual = ops.rms_norm(x, residual, self.norm, scale)
            step.tapped(self.spec.num_layers, residual, self.spec.hidden_size)
            return normed
        _, residual = ops.rms_norm(x, residual, self.not_rounded, scale)
        return residual

    def _embed(self, ops: Operations[X], batch: ForwardBatch) -> X:
        """Return the residual stream before the first layer of the model."""
        rank_exchange, hidden = self.rank_exchange, self.spec.hidden_size
        weight = self.params["embed"]
        if rank_exchange.tensor is None:
            return self._embedded(ops, ops.embed(batch.input_ids, weight, self.embed_scale))
        part = (self.part.vocab.start, self.part.whole.vocab_size)
        rows = ops.embed(batch.input_ids, weight, self.embed_scale, part)
        rows = ops.call(batch, rank_exchange.add_up, (rows,), hidden, self.xp.float32)
        return self._embedded(ops, rows)

    def _embedded(self, ops: Operations[X], rows: X) -> X:
        """Normalize embeddings if the model does."""
        if not self.spec.embed_norm:
            return rows
        return ops.rms_norm(None, rows, self.norm._replace(dtype=self.xp.float32), 1.0)[0]


@without_gradients
def model_forward(model: Decoder, inputs: ForwardBatch, cache: KvcacheView) -> Tensor:
    """Run one forward pass and return logits, float32 [L, V].

    Rows of `inputs` go through `model`, and their keys and values are stored in `cache`.
    """
    return model.logits(model.forward(inputs, cache).hidden)
