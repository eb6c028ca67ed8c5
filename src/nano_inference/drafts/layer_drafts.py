"""`LayerDrafts`: drafts by a head that is one layer with its own keys and values.

Its inputs are the newest tokens and the policy's activations. The row at a position reads the next
token and the policy's activations at that position. It can therefore be computed once the next
token is known: for prompt tokens in the same step, for a drawn token in the next one.

Keys and values use the slots of the sequence's own blocks, so prefixes, forks and preemption need
no work here. Stale values there can only make drafts wrong.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Listed
from itertools import compress
from typing import Any, NamedTuple

from nano_inference.arrays import Tensor, namespace, on_device, without_gradients
from nano_inference.core.batch import ALL, Chunks
from nano_inference.core.sequence import DRAFT, POLICY, Sequence
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.drafts.drawn_rows import DrawnRows
from nano_inference.drafts.model import (
    Drafting,
    DraftTimes,
    draws_of,
    guesses_of,
    take_drawn,
)
from nano_inference.drafts.source import Guess
from nano_inference.models.decoder import Decoder
from nano_inference.ops.batches import ForwardBatch, Rows, batch_of_rows
from nano_inference.ops.interface import KvcacheView, Operations, Trunk, X
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.tensors import SamplingBatch

UNKNOWN = 256  # sequences to remember beyond four times the number in a step


class _Part(NamedTuple):
    """Rows of a sequence whose next tokens are known, and the head's inputs for them."""

    rows: Rows
    inputs: list[Tensor]  # each [n, H]


class LayerDrafts(ABC):
    """A `TimedSource` that runs a head of one layer. Subclasses have its formula.

    Args:
        policy: Model whose activations are read. It must have the head's taps.
        storage: KV storage of the head. Its slots correspond to the slots of the policy's blocks.
        scratch: Blocks of that storage that no sequence uses, for drafts after a sequence's last
            block.
    """

    name: str

    def __init__(self, policy: Decoder, storage: KVStorage, scratch: Listed[int]) -> None:
        assert policy.taps is not None
        self.policy = policy
        self._storage, self._scratch = storage, scratch
        self._taps = policy.taps
        self._num_positions = len(policy.ropes[0][0])
        self._rows = DrawnRows()
        self._settled: dict[int, int] = {}  # sequence id -> number of rows with stored keys
        self._inputs: Tensor | None = None  # inputs of the rows being computed, [N, H]
        self._recorded: dict[Callable[..., Any], Callable[[ForwardBatch], Tensor]] = {}
        self._times = DraftTimes()

    # -- the head's formula ------------------------------------------------------------------------

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """Width of the layer's inputs and of its output."""

    @abstractmethod
    def combined(self, taps: Tensor) -> Tensor:
        """Return the layer's inputs for the policy's activations: [N, X] -> float32 [N, H]."""

    @abstractmethod
    def store(self, ops: Operations[X], batch: ForwardBatch, view: KvcacheView) -> X:
        """Store the keys and values of rows, whose inputs `give` supplies. Return the queries.

        Only operations that a backend may record are called, here and in `layer`.
        """

    @abstractmethod
    def layer(self, ops: Operations[X], batch: ForwardBatch, view: KvcacheView) -> X:
        """Return the layer's output for rows, float32 [N, H], and store their keys and values."""

    @abstractmethod
    def after(self, computed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows to draw from, [S, H], and the inputs of the rows after them, float32
        [S, H], for outputs of `layer`.
        """

    @abstractmethod
    def draw(self, rows: Tensor, batch: SamplingBatch) -> Draw:
        """Draw a token from each row of `after`."""

    # -- activations of the policy -----------------------------------------------------------------

    @without_gradients
    def see(self, chunks: Chunks, batches: Listed[ForwardBatch], result: Any) -> None:
        """Watch a step of the loop.

        Store the keys of rows whose next token is known, and keep the rows that tokens are drawn
        from.
        """
        with on_device(self.policy.device):
            self._rows.keep(chunks, self._drawn_rows(chunks, batches))

    def _drawn_rows(self, chunks: Chunks, batches: Listed[ForwardBatch]) -> Tensor:
        """Store the keys of known rows. Return the rows that tokens are drawn from."""
        hidden, xp = self.hidden_size, namespace(self.policy.device)
        drawn: list[Tensor] = []
        for (name, part), batch in zip(chunks.parts, batches, strict=True):
            count = len(batch.logits_indices)
            if name == POLICY:
                rows = self.combined(self._taps.rows(len(batch.input_ids)))
                self._store(self._known_parts(chunks, part, rows))
                drawn.append(rows[batch.logits_indices.to(rows.device)])
            else:  # the head cannot use rows of other models
                drawn.append(xp.full((count, hidden), math.nan, device=self.policy.device))
        return xp.cat(drawn)

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

    # -- drafts ------------------------------------------------------------------------------------

    def seconds(self, num_seqs: int) -> float:
        return self._times.of(num_seqs)

    @without_gradients
    def propose(self, seqs: Listed[Sequence], most: int) -> list[Guess]:
        with on_device(self.policy.device):
            return self._guesses(seqs, most)

    def _guesses(self, seqs: Listed[Sequence], most: int) -> list[Guess]:
        drafting, rows = self._begin(seqs, most)
        xp = namespace(self.policy.device)
        hidden = xp.cat(rows) if rows else xp.empty(0)
        while places := [place for place, each in enumerate(drafting) if each.is_open]:
            began = time.perf_counter()
            live = [drafting[place] for place in places]
            drawn, following = self.after(self._compute(live, hidden[places]))
            draw = self.draw(drawn, draws_of(live, self.policy.device))
            take_drawn(live, draw, self.policy.spec.vocab_size)
            hidden[places] = following
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

    def _compute(self, live: Listed[Drafting], hidden: Tensor) -> Tensor:
        """Compute one row of each sequence. Return the layer's output, float32 [S, H]."""
        rows = [Rows(each.token_ids[-1:], len(each.token_ids) - 2, each.table) for each in live]
        return self._run(self.layer, rows, hidden).clone()

    def _store(self, parts: Listed[_Part]) -> None:
        """Store the keys and values of rows."""
        if parts:
            inputs = namespace(self.policy.device).cat(
                [rows for part in parts for rows in part.inputs]
            )
            self._run(self.store, [part.rows for part in parts], inputs)

    def _run(self, trunk: Trunk, rows: Listed[Rows], inputs: Tensor) -> Tensor:
        ops, storage, policy = self.policy.ops, self._storage, self.policy
        batch = batch_of_rows(rows, storage.block_size, weight_set=DRAFT, device=policy.device)
        self._inputs = inputs
        if ops.compile is None:
            return trunk(ops, batch, storage)
        if trunk not in self._recorded:
            self._recorded[trunk] = ops.compile(trunk, batch, storage, policy.dtype)
        return self._recorded[trunk](batch)

    def give(self, _batch: ForwardBatch, out: Tensor) -> None:
        """Write the inputs of the rows being computed (`Ops.call`)."""
        assert self._inputs is not None
        out.copy_(self._inputs)


def side_by_side(_batch: ForwardBatch, out: Tensor, one: Tensor, other: Tensor) -> None:
    """Write rows [N, A] and [N, B] to rows [N, A + B] (`Ops.call`)."""
    out[:, : one.shape[1]] = one
    out[:, one.shape[1] :] = other
