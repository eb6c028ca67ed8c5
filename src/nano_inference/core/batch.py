"""A decision made into arrays: a `ForwardBatch` for the model, a `SamplingBatch` for the draw.
Complete at birth.
"""

from collections.abc import Mapping, Set
from collections.abc import Sequence as Listed
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, Generic, NamedTuple

import numpy as np

from nano_inference.core.decision import SchedulerOutput
from nano_inference.core.sequence import Sequence, Sequences
from nano_inference.sampling.columns import A, Arrays, column
from nano_inference.sampling.drafted import NO_DRAFTS, Drafts
from nano_inference.sampling.sampling_batch import (
    Masks,
    SamplingBatch,
    SamplingTable,
    mask_columns,
)
from nano_inference.structured.mask_bits import bans_under

ALL = np.ones(0, dtype=bool)  # all chunks are of one weight set


class Scored(NamedTuple):
    """Rows [start, end) of a sequence, by position, whose scores a forward computes."""

    seq: Sequence
    start: int
    end: int

    @property
    def num_scores(self) -> int:
        """Of all its rows together."""
        return (self.end - self.start) * self.seq.request.score_width

    @property
    def targets(self) -> Listed[int]:
        """The tokens that are scored, row by row."""
        request = self.seq.request
        if not request.score_targets:
            return self.seq.token_ids[self.start + 1 : self.end + 1]
        first = request.scored.start
        rows = request.score_targets[self.start - first : self.end - first]
        return [target for row in rows for target in row]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch(Generic[A]):
    """The rows of one step that one weight set computes: N rows in S chunks, B blocks at most."""

    weight_set: str
    # rows named by relay_rows hold a placeholder
    input_ids: A = column("int64", "N", padding=0)
    # absolute position of each row in its sequence
    positions: A = column("int64", "N", padding=0)
    # where each row's keys and values go: block * block_size + offset
    slot_mapping: A = column("int64", "N", padding=-1)
    row_chunks: A = column("int64", "N")  # index of each row's chunk
    # first row of each chunk, and N
    cu_seqlens_q: A = column("int64", "S + 1", padding=0)
    seq_lens: A = column("int64", "S", padding=0)  # context length after this step
    block_tables: A = column("int64", "S", "B", padding=0)  # padded with 0
    logits_indices: A = column("int64", "L")  # rows to draw from
    # rows to score: the logprob of a given token is wanted. A row with several tokens is listed
    # once for each
    score_rows: A = column("int64", "P")
    # the token that each of score_rows scores: the next one, or a token that a trainer names
    score_targets: A = column("int64", "P")
    # temperature of each score
    score_temperatures: A = column("float64", "P")
    # mask of each score: a row of score_mask_words, or -1 for all tokens; see `SamplingBatch`
    score_mask_rows: A = column("int64", "P")
    score_mask_words: A = column("int32", "M", "W")
    # rows whose token the step before is sampling, and where in its samples it stands
    relay_rows: A = column("int64", "R")
    relay_sources: A = column("int64", "R")
    # the adapter of each row, a place in `adapters`, -1 for none; empty: no row has one
    row_adapters: A = column("int64", "N")
    # those of score_rows whose most probable next tokens are wanted too
    best_rows: A = column("int64", "T")
    scored: tuple[Scored, ...] = ()  # the sequences of score_rows, in order
    num_prompt_tokens: int = 0  # rows that belong to prompts, for the books
    num_best: int = 0  # how many most probable tokens are wanted
    adapters: tuple[Any, ...] = ()  # `ops.lora.Adapter`
    # int64 [1]: numbers from one row of block_tables to the next, where only the device knows
    # (`CudaRunner`)
    table_stride: A | None = None
    context: Any = None  # `parallel.context.ContextStep`, where these are one rank's rows of a step


def layout_of_rows(
    starts: np.ndarray, lengths: np.ndarray, tables: np.ndarray, block_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """What follows from where chunks start, how long they are and their block tables [S, blocks].

    Returns `cu_seqlens_q` [S + 1] and, for each row, its chunk, position and slot [N]; see
    `ForwardBatch`.
    """
    if len(lengths) and (lengths == 1).all():  # a step that only decodes
        rows = np.arange(len(starts) + 1)
        places, offsets = np.divmod(starts, block_size)
        return (
            rows,
            rows[:-1].copy(),
            starts.copy(),
            tables[rows[:-1], places] * block_size + offsets,
        )
    cu_seqlens = np.zeros(len(starts) + 1, dtype=np.int64)
    np.cumsum(lengths, out=cu_seqlens[1:])
    row_chunks = np.repeat(np.arange(len(starts)), lengths)
    positions = np.arange(len(row_chunks)) - (cu_seqlens[:-1] - starts)[row_chunks]
    places, offsets = np.divmod(positions, block_size)
    return cu_seqlens, row_chunks, positions, tables[row_chunks, places] * block_size + offsets


_RECORD = np.dtype(
    [
        ("prompt", np.int64),  # prompt tokens
        ("least", np.int64),  # tokens that the sequence has before it may stop
        ("scored", np.bool_),  # some of its rows are to be scored
        ("undrawn", np.bool_),  # the `SamplingTable` does not know its parameters yet
        ("structured", np.bool_),  # it has a grammar
        ("adapted", np.bool_),  # it has an adapter
    ],
    align=True,  # else a gather of the integers takes three times as long
)


def _record(seq: Sequence) -> tuple[int, int, bool, bool, bool, bool]:
    """The `_RECORD` of a sequence that was not drawn yet."""
    request = seq.request
    prompt = request.num_prompt_tokens
    least = prompt + request.params.min_tokens
    has_grammar, has_adapter = seq.grammar is not None, seq.adapter is not None
    return prompt, least, bool(request.scored), True, has_grammar, has_adapter


class BatchBuilder(Generic[A]):
    """Makes a step's batches from arrays that keep what every step needs of a sequence, one slot
    each.

    A slot is written when its sequence first appears, and its block table when that changed: both
    are rare. A step only gathers from the slots, into new arrays: one that is in flight may still
    be reading its own.

    Args:
        block_size: tokens of a block.
        arrays: makes the arrays of its batches.
    """

    def __init__(self, block_size: int, arrays: Arrays[A]) -> None:
        self._block_size, self._arrays = block_size, arrays
        self._slots: dict[int, int] = {}  # sequence id -> slot
        self._free: list[int] = []
        self._tables = np.zeros((0, 0), dtype=np.int64)  # [slots, blocks], padded with 0
        self._records = np.zeros(0, dtype=_RECORD)  # [slots]
        self._draws = SamplingTable(arrays)

    def chunks(
        self, decision: SchedulerOutput, sampled: Listed[Sequence], sequences: Sequences
    ) -> "Chunks":
        """The chunks of a step as arrays.

        Args:
            decision: applied already, so that block tables cover its chunks.
            sampled: who gets a token, in the order of the chunks' samples.
            sequences: the live sequences.
        """
        slots = self._slots_of(decision.seq_ids, sequences)
        starts, lengths, samples = (
            np.array(column, dtype=np.int64)
            for column in (decision.starts, decision.lengths, decision.samples)
        )
        draws = _Draws.of(decision.drafts, samples, lengths)
        self._follow_tables(decision, sequences)
        names = list(dict.fromkeys(decision.weight_sets))
        if len(names) == 1:
            parts, rows = [(names[0], ALL)], np.arange(len(draws.rows))
        else:  # in the logits chunks are grouped by weight set
            parts = [
                (name, np.array([each == name for each in decision.weight_sets])) for name in names
            ]
            rows = np.zeros(len(draws.rows), dtype=np.int64)
            order = np.concatenate([np.flatnonzero(part[draws.chunks]) for _, part in parts])
            rows[order] = np.arange(len(rows))
        if len(draws.rows) == len(slots) == len(sampled) == np.count_nonzero(samples):
            own, times = slots, 1  # one token of each
        else:
            own = self._slots_of([seq.seq_id for seq in sampled], sequences)
            times = samples[draws.chunks]
        return Chunks(
            seqs=[sequences.by_id[seq_id] for seq_id in decision.seq_ids],
            parts=parts,
            columns=_Columns(slots, starts, lengths, draws),
            drafts=decision.drafts,
            sampled=sampled,
            behind=_behind(decision) if any(decision.drafts) else NO_DRAFTS,
            slots=own,
            rows=np.repeat(rows, times),
            positions=np.repeat(starts[draws.chunks] + draws.rows + 1, times),
        )

    def forward_batches(
        self, chunks: "Chunks", sampling_now: Mapping[int, int]
    ) -> tuple[ForwardBatch[A], ...]:
        """One `ForwardBatch` a weight set, in order of first appearance.

        `sampling_now`: sequence id -> place in the samples of the step in flight, for tokens not
        known on the host.
        """
        return tuple(
            self._build(name, chunks.seqs, chunks.drafts, chunks.columns, sampling_now)
            if part is ALL
            else self._build(
                name,
                list(compress(chunks.seqs, part.tolist())),
                list(compress(chunks.drafts, part.tolist())),
                chunks.columns.of(part),
                sampling_now,
            )
            for name, part in chunks.parts
        )

    def masks(self, chunks: "Chunks") -> Masks:
        """The masks of samples that have a grammar, by their place."""
        masks: list[tuple[int, np.ndarray]] = []
        for place in np.flatnonzero(self._records["structured"][chunks.slots]).tolist():
            grammar: Any = chunks.sampled[place].grammar
            masks.append((place, grammar.mask_behind(len(chunks.behind.get(place, ())))))
        return masks

    def sampling_batch(self, chunks: "Chunks", masks: Masks) -> SamplingBatch[A]:
        """The draw of a step, once the tokens before it are known. Logits of its batches stand one
        after another. `masks`: as the method gives them.

        Parameters are read here and not before the forward: an error in the parameters of one
        sequence then stops no forward.
        """
        for place in np.flatnonzero(self._records["undrawn"][chunks.slots]).tolist():
            seq, slot = chunks.sampled[place], int(chunks.slots[place])
            self._draws.put(
                slot,
                seq.request.params,
                seq.request.seed,
                seq.sample_index,
                seq.token_ids[: seq.request.num_prompt_tokens],
            )
            self._records["undrawn"][slot] = False
        for place, counts in self._draws.penalized(chunks.slots):
            seq = chunks.sampled[place]
            counts.add(seq.token_ids[seq.request.num_prompt_tokens + counts.length :])
        early = np.flatnonzero(chunks.positions < self._records["least"][chunks.slots]).tolist()
        banned = {place: sorted(chunks.sampled[place].request.stop_ids) for place in early}
        for place, words in masks:
            if place in banned and not bans_under(words, banned[place]):
                del banned[place]
        return self._draws.batch(
            chunks.slots, chunks.rows, chunks.positions, banned, masks, chunks.behind
        )

    def _build(
        self,
        weight_set: str,
        seqs: Listed[Sequence],
        drafts: Listed[Listed[int]],
        columns: "_Columns",
        sampling_now: Mapping[int, int],
    ) -> ForwardBatch[A]:
        slots, starts, lengths, draws = columns
        ends = starts + lengths
        tables = self._tables[slots, : -(-int(ends.max()) // self._block_size)]
        cu_seqlens, row_chunks, positions, slot_mapping = layout_of_rows(
            starts, lengths, tables, self._block_size
        )

        input_ids, relay_rows, relay_sources = _input_ids(
            seqs, starts.tolist(), ends.tolist(), drafts, sampling_now
        )
        score_rows, score_targets, best_rows, scored = _rows_to_score(
            np.flatnonzero(self._records["scored"][slots]).tolist(), seqs, starts, ends, cu_seqlens
        )
        arrays, make = self._arrays, self._arrays.make
        adapters, row_adapters = (), arrays.no_integers
        if self._records["adapted"][slots].any():
            adapters, own = _adapters(seqs, lengths)
            row_adapters = make(own)
        prompts = self._records["prompt"][slots]
        return ForwardBatch(
            weight_set=weight_set,
            adapters=adapters,
            row_adapters=row_adapters,
            input_ids=arrays.integers(input_ids),
            positions=make(positions),
            slot_mapping=make(slot_mapping),
            row_chunks=make(row_chunks),
            block_tables=make(tables),
            cu_seqlens_q=make(cu_seqlens),
            seq_lens=make(ends),
            logits_indices=make(cu_seqlens[draws.chunks] + draws.rows),
            score_rows=arrays.integers(score_rows),
            score_targets=arrays.integers(score_targets),
            score_temperatures=make(_temperatures(scored)) if scored else arrays.no_doubles,
            **_score_masks(arrays, len(score_rows), scored),
            scored=tuple(scored),
            relay_rows=arrays.integers(relay_rows),
            relay_sources=arrays.integers(relay_sources),
            num_prompt_tokens=int(np.minimum(np.maximum(prompts - starts, 0), lengths).sum()),
            best_rows=arrays.integers(best_rows),
            num_best=max((seq.request.num_best for seq, _, _ in scored), default=0),
        )

    def _follow_tables(self, decision: SchedulerOutput, sequences: Sequences) -> None:
        """Write what this step changed in block tables: all of a newcomer's, else from the chunk's
        first block on.
        """
        for seq_id, start, fresh in zip(
            decision.seq_ids, decision.starts, decision.fresh_blocks, strict=True
        ):
            if fresh:
                self._write_table(
                    self._slots[seq_id],
                    sequences.by_id[seq_id].block_ids,
                    start // self._block_size,
                )
        for admission in decision.admitted:
            self._write_table(
                self._slots[admission.seq_id], sequences.by_id[admission.seq_id].block_ids, 0
            )

    def _write_table(self, slot: int, block_ids: list[int], first: int) -> None:
        room, wanted = self._tables.shape[1], len(block_ids)
        if wanted > room:
            self._tables = np.pad(self._tables, ((0, 0), (0, max(room, wanted - room))))
        self._tables[slot, first:wanted] = block_ids[first:]
        self._tables[slot, wanted:] = 0

    def _slots_of(self, seq_ids: Listed[int], sequences: Sequences) -> np.ndarray:
        slots = self._slots
        new = [seq_id for seq_id in seq_ids if seq_id not in slots]
        if new:
            self._free_slots(len(new), sequences.by_id.keys())
            for seq in map(sequences.by_id.__getitem__, new):
                slot = slots[seq.seq_id] = self._free.pop()
                self._records[slot] = _record(seq)
                self._write_table(slot, seq.block_ids, 0)
        return np.fromiter(map(slots.__getitem__, seq_ids), dtype=np.int64, count=len(seq_ids))

    def _free_slots(self, wanted: int, live: Set[int]) -> None:
        """Have so many free slots: those of sequences that are gone, and where that is not enough,
        new ones.
        """
        if wanted <= len(self._free):
            return
        for seq_id in self._slots.keys() - live:
            self._free.append(self._slots.pop(seq_id))
        # more than half would be held: the next search is far off
        if len(self._free) < wanted + len(self._slots):
            old = len(self._records)
            more = max(old, 2 * wanted)
            self._free += range(old, old + more)
            self._tables = np.pad(self._tables, ((0, more), (0, 0)))
            self._records = np.concatenate([self._records, np.zeros(more, dtype=_RECORD)])


class _Draws(NamedTuple):
    """Rows that tokens are drawn at: [D]."""

    chunks: np.ndarray  # index of each row's chunk
    rows: np.ndarray  # of that chunk

    @classmethod
    def of(cls, drafts: Listed[Listed[int]], samples: np.ndarray, lengths: np.ndarray) -> "_Draws":
        """Those of a decision: the last known row of each chunk that draws, and those behind it."""
        ends = np.flatnonzero(samples)
        if not any(drafts):
            return cls(ends, lengths[ends] - 1)
        behind = np.fromiter(map(len, drafts), dtype=np.int64, count=len(drafts))[ends]
        chunks = np.repeat(ends, behind + 1)
        firsts = np.cumsum(behind + 1) - behind - 1  # place of each chunk's first row
        rows = np.arange(len(chunks)) - np.repeat(firsts, behind + 1)
        return cls(chunks, lengths[chunks] - 1 - np.repeat(behind, behind + 1) + rows)

    def within(self, part: np.ndarray) -> "_Draws":
        """Those of some of the chunks: bool [S]."""
        kept = part[self.chunks]
        return _Draws((np.cumsum(part) - 1)[self.chunks[kept]], self.rows[kept])


class _Columns(NamedTuple):
    """Chunks, column by column: [S]."""

    slots: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    draws: _Draws

    def of(self, part: np.ndarray) -> "_Columns":
        """Some of the chunks: bool [S]."""
        slots, starts, lengths, draws = self
        return _Columns(slots[part], starts[part], lengths[part], draws.within(part))


@dataclass(frozen=True, slots=True)
class Chunks:
    """A step's chunks and samples as arrays; S chunks, R samples."""

    seqs: Listed[Sequence]  # [S]
    # weight sets in order of first appearance, and their chunks: bool [S] or ALL
    parts: Listed[tuple[str, np.ndarray]]
    columns: _Columns
    drafts: Listed[tuple[int, ...]]  # [S]
    sampled: Listed[Sequence]  # [R]
    behind: Drafts  # of the samples drawn behind drafts: their place, and these drafts
    slots: np.ndarray  # [R]
    rows: np.ndarray  # [R] row of the step's logits
    positions: np.ndarray  # [R] of the token to draw

    def drawing(self, places: Listed[int]) -> "Chunks":
        """The same chunks with some of their samples."""
        kept = np.array(places, dtype=np.int64)
        sampled = [self.sampled[place] for place in places]
        behind = self.behind
        return replace(
            self,
            sampled=sampled,
            behind={new: behind[old] for new, old in enumerate(places) if old in behind},
            slots=self.slots[kept],
            rows=self.rows[kept],
            positions=self.positions[kept],
        )


def _behind(decision: SchedulerOutput) -> Drafts:
    """Which samples are drawn behind which drafts."""
    found: dict[int, tuple[int, ...]] = {}
    place = 0
    for count, drafts in zip(decision.samples, decision.drafts, strict=True):
        found |= {place + length: drafts[:length] for length in range(1, len(drafts) + 1)}
        place += count + len(drafts)
    return found


def _input_ids(
    seqs: Listed[Sequence],
    starts: Listed[int],
    ends: Listed[int],
    drafts: Listed[Listed[int]],
    sampling_now: Mapping[int, int],
) -> tuple[list[int], list[int], list[int]]:
    """The tokens of all rows, the rows whose token is being sampled, and the place of each such
    token in the samples of the step in flight.
    """
    input_ids: list[int] = []
    relay_rows: list[int] = []
    relay_sources: list[int] = []
    for seq, start, end, drafted in zip(seqs, starts, ends, drafts, strict=True):
        token_ids = seq.token_ids
        input_ids += token_ids[start:end]
        if drafted:
            input_ids += drafted
        elif end > len(token_ids):  # its newest token is being sampled right now
            relay_rows.append(len(input_ids))
            relay_sources.append(sampling_now[seq.seq_id])
            input_ids.append(0)
    return input_ids, relay_rows, relay_sources


def _rows_to_score(
    places: Listed[int],
    seqs: Listed[Sequence],
    starts: np.ndarray,
    ends: np.ndarray,
    cu_seqlens: np.ndarray,
) -> tuple[list[int], list[int], list[int], list[Scored]]:
    """Rows that are scored, the tokens that are scored after them, the rows whose best tokens are
    wanted, and whose they are. `places`: of the chunks whose sequences have such rows.
    """
    score_rows: list[int] = []
    score_targets: list[int] = []
    best_rows: list[int] = []
    scored: list[Scored] = []
    for place in places:
        seq, start = seqs[place], int(starts[place])
        rows = seq.rows_to_score(start, int(ends[place]))
        if rows:
            first = int(cu_seqlens[place]) - start
            in_batch = range(first + rows.start, first + rows.stop)
            own = Scored(seq, rows.start, rows.stop)
            width = seq.request.score_width
            score_rows += in_batch if width == 1 else np.repeat(in_batch, width).tolist()
            best_rows += in_batch if seq.request.num_best else ()
            score_targets += own.targets
            scored.append(own)
    return score_rows, score_targets, best_rows, scored


def _adapters(seqs: Listed[Sequence], lengths: np.ndarray) -> tuple[tuple[Any, ...], np.ndarray]:
    """The adapters of chunks, and of each row its place among them."""
    places: dict[Any, int] = {}
    own = [-1 if s.adapter is None else places.setdefault(s.adapter, len(places)) for s in seqs]
    return tuple(places), np.repeat(np.array(own, dtype=np.int64), lengths)


def _temperatures(scored: Listed[Scored]) -> np.ndarray:
    each = [own.seq.request.score_temperature for own in scored]
    return np.repeat(np.array(each, dtype=np.float64), [own.num_scores for own in scored])


def _score_masks(arrays: Arrays[A], num_rows: int, scored: Listed[Scored]) -> dict[str, A]:
    """The columns of the masks that rows are scored under."""
    if not num_rows:
        return {"score_mask_rows": arrays.no_integers, "score_mask_words": arrays.no_masks}
    masks: list[tuple[int, np.ndarray]] = []
    at = 0
    for own in scored:
        seq, start, end = own
        first = seq.request.scored.start
        masks += enumerate(seq.request.score_masks[start - first : end - first], at)
        at += own.num_scores
    columns = mask_columns(arrays, num_rows, masks)
    return {f"score_{name}": each for name, each in columns.items()}
