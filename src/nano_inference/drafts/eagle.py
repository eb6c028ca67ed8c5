"""Drafts by an EAGLE-3 head: one layer with its own keys and values.

Its inputs are the newest tokens and the policy's activations at three layers. The row at a position
reads the next token and the policy's activations at that position. It can therefore be computed
once the next token is known: for prompt tokens in the same step, for a drawn token in the next one.

Keys and values use the slots of the sequence's own blocks, so prefixes, forks and preemption need
no work here. Stale values there can only make drafts wrong.
"""

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Listed
from itertools import compress
from typing import Any, NamedTuple

from nano_inference.arrays import Tensor, namespace, without_gradients
from nano_inference.core.batch import ALL, Chunks
from nano_inference.core.sequence import DRAFT, POLICY, Sequence
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.drafts.drawn_rows import DrawnRows
from nano_inference.drafts.heads import EagleSpec, HeadWeights
from nano_inference.drafts.medusa import draw_known
from nano_inference.drafts.model import (
    Drafting,
    DraftTimes,
    draws_of,
    guesses_of,
    take_drawn,
)
from nano_inference.drafts.source import Guess
from nano_inference.models.decoder import Decoder
from nano_inference.models.rope import rope_table
from nano_inference.ops.batches import ForwardBatch, Rows, batch_of_rows
from nano_inference.ops.interface import (
    AttentionArgs,
    HeadNorms,
    KvcacheView,
    Norm,
    Operations,
    RopeArgs,
    Trunk,
    X,
)

UNKNOWN = 256  # sequences to remember beyond four times the number in a step


class _Part(NamedTuple):
    """Rows of a sequence whose next tokens are known, and the head's inputs for them."""

    rows: Rows
    inputs: list[Tensor]  # each [n, H]


class EagleDrafts:
    """A `TimedSource` that runs an EAGLE-3 head.

    Args:
        policy: Model whose activations are read. It must have the head's taps.
        weights: Weights of the head.
        storage: KV storage of the head. Its slots correspond to the slots of the policy's blocks.
        scratch: Blocks of that storage that no sequence uses, for drafts after a sequence's last
            block.
    """

    name = "eagle"

    def __init__(
        self, policy: Decoder, weights: HeadWeights, storage: KVStorage, scratch: Listed[int]
    ) -> None:
        assert isinstance(weights.spec, EagleSpec)
        assert policy.taps is not None
        self.policy, self.weights, self.spec = policy, weights, weights.spec
        self._storage, self._scratch = storage, scratch
        self._taps = policy.taps
        layer = self.spec.layer
        self._num_positions = len(policy.ropes[0][0])
        self._rope = rope_table(layer.ropes[0], layer.head_dim, self._num_positions, policy.device)
        self._rows = DrawnRows()
        self._settled: dict[int, int] = {}  # sequence id -> number of rows with stored keys
        self._inputs: Tensor | None = None  # inputs of the rows being computed, [N, H]
        self._recorded: dict[Callable[..., Any], Callable[[ForwardBatch], Tensor]] = {}
        self._times = DraftTimes()

    # -- activations of the policy -----------------------------------------------------------------

    @without_gradients
    def see(self, chunks: Chunks, batches: Listed[ForwardBatch], result: Any) -> None:
        """Watch a step of the loop.

        Store the keys of rows whose next token is known, and keep the rows that tokens are drawn
        from.
        """
        hidden, xp = self.spec.layer.hidden_size, namespace(self.policy.device)
        drawn: list[Tensor] = []
        for (name, part), batch in zip(chunks.parts, batches, strict=True):
            count = len(batch.logits_indices)
            if name == POLICY:
                rows = self._combined(self._taps.rows())
                self._store(self._known_parts(chunks, part, rows))
                drawn.append(rows[batch.logits_indices.to(rows.device)])
            else:  # the head cannot use rows of other models
                drawn.append(xp.full((count, hidden), math.nan, device=self.policy.device))
        self._rows.keep(chunks, xp.cat(drawn))

    def _known_parts(self, chunks: Chunks, part: Any, rows: Tensor) -> list[_Part]:
        columns = chunks.columns if part is ALL else chunks.columns.of(part)
        seqs = chunks.seqs if part is ALL else list(compress(chunks.seqs, part.tolist()))
        parts: list[_Part] = []
        first = 0
        bounds = zip(seqs, columns.starts.tolist(), columns.lengths.tolist(), strict=True)
        for seq, start, length in bounds:
            end = max(min(start + length, len(seq.token_ids) - 1), start)
            earlier = self._earlier(seq, start)
            inputs = [*earlier, rows[first : first + end - start]]
            begin = start - len(earlier)
            if end > begin:
                tokens = seq.token_ids[begin + 1 : end + 1]
                parts.append(_Part(Rows(tokens, begin, seq.block_ids), inputs))
            self._settled[seq.seq_id] = end
            first += length
        if len(self._settled) > 4 * len(seqs) + UNKNOWN:
            live = {seq.seq_id for seq in seqs}
            self._settled = {key: each for key, each in self._settled.items() if key in live}
        return parts

    def _earlier(self, seq: Sequence, end: int) -> list[Tensor]:
        """Return the rows [1, H] before position `end` that are not stored yet."""
        begin = self._settled.get(seq.seq_id, max(end - 1, 0))
        rows = [self._rows.of(seq, position + 1) for position in range(begin, end)]
        while rows and rows[0] is None:  # no longer among the kept steps
            rows.pop(0)
        known = [row[None] for row in rows if row is not None]
        return known if len(known) == len(rows) else []

    def _combined(self, rows: Tensor) -> Tensor:
        """Combine the policy's activations at three layers: [N, 3 target] -> float32 [N, H]."""
        spec, ops, params = self.spec, self.policy.ops, self.weights.params
        if spec.norm_before_fc:
            x = ops.rms_norm(None, rows, self._norm("input_norm"), 1.0)[0]
        elif spec.fc_norm:
            parts = rows.split(spec.target_hidden_size, dim=1)
            normed = [
                ops.rms_norm(None, part.contiguous(), self._norm(f"fc_norm.{i}"), 1.0)[0]
                for i, part in enumerate(parts)
            ]
            x = namespace(rows).cat(normed, dim=1)
        else:
            x = rows.to(self.policy.dtype)
        return ops.linear(x, params["fc"], None).float()

    # -- drafts ------------------------------------------------------------------------------------

    def seconds(self, num_seqs: int) -> float:
        return self._times.of(num_seqs)

    @without_gradients
    def propose(self, seqs: Listed[Sequence], most: int) -> list[Guess]:
        drafting, rows = self._begin(seqs, most)
        xp = namespace(self.policy.device)
        hidden = xp.cat(rows) if rows else xp.empty(0)
        while places := [place for place, each in enumerate(drafting) if each.is_open]:
            began = time.perf_counter()
            live = [drafting[place] for place in places]
            computed, normed = self._compute(live, hidden[places])
            params, spec = self.weights.params, self.spec
            requests = draws_of(live, self.policy.device)
            vocab_size = spec.layer.vocab_size
            draw = draw_known(
                *(self.policy.ops, normed, params["head"]),
                self.weights.targets,
                vocab_size,
                requests,
            )
            take_drawn(live, draw, vocab_size)
            hidden[places] = normed.float() if spec.norm_output else computed
            self._times.note(len(live), time.perf_counter() - began)
        return guesses_of(seqs, drafting)

    def _begin(self, seqs: Listed[Sequence], most: int) -> tuple[list[Drafting], list[Tensor]]:
        """Return the sequences that can have drafts, and the rows [1, H] that they start from."""
        size, scratch = self._storage.block_size, list(self._scratch)
        drafting: list[Drafting] = []
        rows: list[Tensor] = []
        missing: list[_Part] = []
        for seq in seqs:
            start = len(seq.token_ids) - 2  # first row that a draft is drawn from
            row = self._rows.of(seq, start + 1)
            if row is None:
                continue
            earlier = self._earlier(seq, start)
            if earlier:
                begin = start - len(earlier)
                tokens = seq.token_ids[begin + 1 : start + 1]
                missing.append(_Part(Rows(tokens, begin, seq.block_ids), earlier))
            wanted = min(most, self._num_positions - start)
            lacking = max(-(-(start + wanted) // size) - len(seq.block_ids), 0)
            table = seq.block_ids + scratch[:lacking]
            del scratch[:lacking]
            wanted = min(wanted, len(table) * size - start)
            self._settled[seq.seq_id] = start
            if wanted > 0:
                self._settled[seq.seq_id] = start + 1
                drafting.append(Drafting(seq, start, table, wanted))
                rows.append(row[None])
        self._store(missing)
        return drafting, rows

    def _compute(self, live: Listed[Drafting], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Compute one row of each sequence.

        Return the layer's output, float32 [S, H], and the same after the norm.
        """
        rows = [Rows(each.token_ids[-1:], len(each.token_ids) - 2, each.table) for each in live]
        computed = self._run(self._layer, rows, hidden).clone()
        return computed, self.policy.ops.rms_norm(None, computed, self._norm("norm"), 1.0)[0]

    def _store(self, parts: Listed[_Part]) -> None:
        """Store the keys and values of rows."""
        if parts:
            inputs = namespace(self.policy.device).cat(
                [rows for part in parts for rows in part.inputs]
            )
            self._run(self._projected, [part.rows for part in parts], inputs)

    def _run(self, trunk: Trunk, rows: Listed[Rows], inputs: Tensor) -> Tensor:
        ops, storage, policy = self.policy.ops, self._storage, self.policy
        batch = batch_of_rows(rows, storage.block_size, weight_set=DRAFT, device=policy.device)
        self._inputs = inputs
        if ops.compile is None:
            return trunk(ops, batch, storage)
        if trunk not in self._recorded:
            self._recorded[trunk] = ops.compile(trunk, batch, storage, policy.dtype)
        return self._recorded[trunk](batch)

    # -- the layer, made of operations that a backend may record -----------------------------------

    def _projected(self, ops: Operations[X], batch: ForwardBatch, view: KvcacheView) -> X:
        """Return the queries, and store keys and values."""
        return self._attending(ops, batch, view)[0]

    def _attending(self, ops: Operations[X], batch: ForwardBatch, view: KvcacheView) -> tuple[X, X]:
        """Return the queries and the residual, and store keys and values."""
        layer, params, dtype = self.spec.layer, self.weights.params, self.policy.dtype
        hidden, float32 = layer.hidden_size, namespace(dtype).float32
        source = params if self.spec.has_embedding else self.policy.params
        embedded = ops.embed(batch.input_ids, source["embed"], 1.0)
        embedded = ops.rms_norm(None, embedded, self._norm("embed_norm"), 1.0)[0]
        residual = ops.call(batch, self._give, (), hidden, float32)
        norm = self._norm("hidden_norm")
        if self.spec.norm_before_residual:
            residual = ops.rms_norm(None, residual, norm._replace(dtype=float32), 1.0)[0]
            norm = Norm(None, 0.0, 0.0, dtype)
        normed = ops.rms_norm(None, residual, norm, 1.0)[0]
        x = ops.call(batch, _side_by_side, (embedded, normed), 2 * hidden, dtype)
        norms = HeadNorms()
        if layer.qk_norm:
            norms = HeadNorms(self._norm("q_norm"), self._norm("k_norm"))
        rope = RopeArgs(*self._rope, layer.num_heads, layer.num_kv_heads, norms)
        qkv = ops.linear(x, params["qkv"], params.get("qkv_bias"))
        where = batch.positions, batch.slot_mapping, view, 0
        return ops.rope_and_store(qkv, rope, *where), residual

    def _layer(self, ops: Operations[X], batch: ForwardBatch, view: KvcacheView) -> X:
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

    def _give(self, _batch: ForwardBatch, out: Tensor) -> None:
        assert self._inputs is not None
        out.copy_(self._inputs)

    def _norm(self, name: str) -> Norm:
        eps = self.spec.layer.rms_norm_eps
        return Norm(self.weights.params[name], eps, 0.0, self.policy.dtype)


def _side_by_side(_batch: ForwardBatch, out: Tensor, one: Tensor, other: Tensor) -> None:
    out[:, : one.shape[1]] = one
    out[:, one.shape[1] :] = other
