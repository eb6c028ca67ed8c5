"""A decision as arrays: a `ForwardBatch` for the model and a `SamplingBatch` for the draw."""

from collections.abc import Mapping, Set
from collections.abc import Sequence as Listed
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, Generic, NamedTuple

import numpy as np

from nano_inference.core.decision import SchedulerOutput
from nano_inference.core.failures import NoTokenLeft
from nano_inference.core.sequence import Sequence, Sequences
from nano_inference.sampling.columns import A, Arrays, column
from nano_inference.sampling.drafted import NO_DRAFTS, Drafts
from nano_inference.sampling.sampling_batch import (
    Biases,
    Masks,
    SamplingBatch,
    SamplingTable,
    mask_columns,
)
from nano_inference.structured.mask_bits import bans_under

ALL = np.ones(0, dtype=bool)  # all chunks have the same weight set


class Scored(NamedTuple):
    """Rows [start, end) of a sequence, by position, whose scores a forward pass computes."""

    seq: Sequence
    start: int
    end: int

    @property
    def num_scores(self) -> int:
        """Number of scores of all rows."""
        return (self.end - self.start) * self.seq.request.score_width

    @property
    def targets(self) -> Listed[int]:
        """Tokens to score, row by row."""
        request = self.seq.request
        if not len(request.score_targets):
            return self.seq.token_ids[self.start + 1 : self.end + 1]
        first = request.scored.start
        rows = request.score_targets[self.start - first : self.end - first]
        return [target for row in rows for target in row]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch(Generic[A]):
    """Rows of one step and one weight set: N rows in S chunks, up to B blocks per chunk."""

    weight_set: str
    # the rows in relay_rows hold a placeholder
    input_ids: A = column("int64", "N", padding=0)
    # absolute position of each row in its sequence
    positions: A = column("int64", "N", padding=0)
    # cache slot of each row's keys and values: block * block_size + offset
    slot_mapping: A = column("int64", "N", padding=-1)
    row_chunks: A = column("int64", "N")  # index of each row's chunk
    # first row of each chunk, then N
    cu_seqlens_q: A = column("int64", "S + 1", padding=0)
    seq_lens: A = column("int64", "S", padding=0)  # context length after this step
    block_tables: A = column("int64", "S", "B", padding=0)  # padded with 0
    logits_indices: A = column("int64", "L")  # rows to draw from
    # rows to score, repeated for each target of the row
    score_rows: A = column("int64", "P")
    # target of each of score_rows: the next token, or one that a trainer names
    score_targets: A = column("int64", "P")
    # temperature of each score
    score_temperatures: A = column("float64", "P")
    # mask of each score: a row of score_mask_words, or -1 for all tokens
    score_mask_rows: A = column("int64", "P")
    score_mask_words: A = column("int32", "M", "W")
    # rows whose token the previous step is sampling, and its index in that step's samples
    relay_rows: A = column("int64", "R")
    relay_sources: A = column("int64", "R")
    # adapter of each row, an index into `adapters` or -1; empty if no row has one
    row_adapters: A = column("int64", "N")
    # rows whose most probable next tokens are requested too
    best_rows: A = column("int64", "T")
    scored: tuple[Scored, ...] = ()  # the sequences of score_rows, in order
    num_prompt_tokens: int = 0  # rows of prompts, for statistics
    num_best: int = 0  # most probable tokens to return for each of best_rows
    adapters: tuple[Any, ...] = ()  # `ops.lora.Adapter`
    # int64 [1]: row stride of block_tables, if only the device knows it (`CudaRunner`)
    table_stride: A | None = None
    context: Any = None  # `parallel.context.ContextStep` if a rank has only some of a step's rows


def layout_of_rows(
    starts: np.ndarray, lengths: np.ndarray, tables: np.ndarray, block_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return `cu_seqlens_q` [S + 1] and, for each row, its chunk, position and slot [N].

    `ForwardBatch` describes these arrays.

    Args:
        starts: First position of each chunk [S].
        lengths: Length of each chunk [S].
        tables: Block tables of the chunks [S, blocks].
        block_size: Tokens per block.
    """
    if len(lengths) and (lengths == 1).all():  # decode only
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
        ("least", np.int64),  # tokens that the sequence needs before it may stop
        ("scored", np.bool_),  # some rows need scores
        ("undrawn", np.bool_),  # the `SamplingTable` lacks its parameters
        ("structured", np.bool_),  # has a grammar, or rules
        ("adapted", np.bool_),  # has an adapter
    ],
    align=True,  # unaligned, gathering the integers takes three times as long
)


def _record(seq: Sequence) -> tuple[int, int, bool, bool, bool, bool]:
    """Return the `_RECORD` of a sequence that has drawn nothing yet."""
    request = seq.request
    prompt = request.num_prompt_tokens
    least = prompt + request.params.min_tokens
    has_masks = seq.grammar is not None or seq.rules is not None
    return prompt, least, bool(request.scored), True, has_masks, seq.adapter is not None


class BatchBuilder(Generic[A]):
    """Builds a step's batches from arrays with one slot per sequence.

    A slot is written when its sequence first appears, and its block table when that changes. Both
    are rare: a step mostly gathers from the slots. It gathers into new arrays, because a step in
    flight may still read its own.

    Args:
        block_size: Tokens per block.
        arrays: Factory of the batches' arrays.
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
        """Return the chunks of a step as arrays.

        Args:
            decision: An applied decision, so that block tables cover its chunks.
            sampled: Sequence of each sample, in the order of the chunks.
            sequences: The live sequences.
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
        else:  # logits rows are grouped by weight set
            parts = [
                (name, np.array([each == name for each in decision.weight_sets])) for name in names
            ]
            rows = np.zeros(len(draws.rows), dtype=np.int64)
            order = np.concatenate([np.flatnonzero(part[draws.chunks]) for _, part in parts])
            rows[order] = np.arange(len(rows))
        if len(draws.rows) == len(slots) == len(sampled) == np.count_nonzero(samples):
            sample_slots, times = slots, 1  # each chunk draws one token
        else:
            sample_slots = self._slots_of([seq.seq_id for seq in sampled], sequences)
            times = samples[draws.chunks]
        return Chunks(
            seqs=[sequences.by_id[seq_id] for seq_id in decision.seq_ids],
            parts=parts,
            columns=_Columns(slots, starts, lengths, draws),
            drafts=decision.drafts,
            sampled=sampled,
            behind=_behind(decision) if any(decision.drafts) else NO_DRAFTS,
            slots=sample_slots,
            rows=np.repeat(rows, times),
            positions=np.repeat(starts[draws.chunks] + draws.rows + 1, times),
        )

    def forward_batches(
        self, chunks: "Chunks", sampling_now: Mapping[int, int]
    ) -> tuple[ForwardBatch[A], ...]:
        """Return one `ForwardBatch` for each weight set, in order of first appearance.

        `sampling_now` maps a sequence id to its index in the samples of the step in flight, for
        tokens that the host does not know yet.
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
        """Return the masks of samples that have a grammar or rules, with the sample's index.

        Raises `NoTokenLeft`.
        """
        masks: list[tuple[int, np.ndarray]] = []
        for index in np.flatnonzero(self._records["structured"][chunks.slots]).tolist():
            seq, drafts = chunks.sampled[index], chunks.behind.get(index, ())
            words: Any = None if seq.grammar is None else seq.grammar.mask_behind(len(drafts))
            if seq.rules is not None:
                words = seq.rules.mask(seq.token_ids, drafts, words)
                if words is not None and not words.any():
                    raise NoTokenLeft("bad_words left no token to draw")
            if words is not None:
                masks.append((index, words))
        return masks

    def sampling_batch(
        self, chunks: "Chunks", masks: Masks, biases: Biases = ()
    ) -> SamplingBatch[A]:
        """Return the draw of a step, once the tokens before it are known.

        The logits of the step's batches are concatenated. `masks` is the result of `masks()`.
        `biases` are added to logits.

        Parameters are read here and not before the forward pass, so bad parameters of one sequence
        stop no forward pass.
        """
        for index in np.flatnonzero(self._records["undrawn"][chunks.slots]).tolist():
            seq, slot = chunks.sampled[index], int(chunks.slots[index])
            self._draws.put(
                slot,
                seq.request.params,
                seq.request.seed,
                seq.sample_index,
                seq.token_ids[: seq.request.num_prompt_tokens],
            )
            self._records["undrawn"][slot] = False
        for index, counts in self._draws.penalized(chunks.slots):
            seq = chunks.sampled[index]
            counts.add(seq.token_ids[seq.request.num_prompt_tokens + counts.length :])
        early = np.flatnonzero(chunks.positions < self._records["least"][chunks.slots]).tolist()
        banned = {index: sorted(chunks.sampled[index].request.stop_ids) for index in early}
        for index, words in masks:
            if index in banned and not bans_under(words, banned[index]):
                del banned[index]
        return self._draws.batch(
            chunks.slots, chunks.rows, chunks.positions, banned, masks, chunks.behind, biases
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
            adapters, indices = _adapters(seqs, lengths)
            row_adapters = make(indices)
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
        """Write the changed part of the block tables.

        That is the whole table of an admitted sequence, otherwise the part from the chunk's first
        block on.
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
        """Provide at least `wanted` free slots.

        Slots of finished sequences are freed first. More slots are allocated if that is not enough.
        """
        if wanted <= len(self._free):
            return
        for seq_id in self._slots.keys() - live:
            self._free.append(self._slots.pop(seq_id))
        # leave half of the slots free, so that the next search is far off
        if len(self._free) < wanted + len(self._slots):
            old = len(self._records)
            more = max(old, 2 * wanted)
            self._free += range(old, old + more)
            self._tables = np.pad(self._tables, ((0, more), (0, 0)))
            self._records = np.concatenate([self._records, np.zeros(more, dtype=_RECORD)])


class _Draws(NamedTuple):
    """Rows at which tokens are drawn: [D]."""

    chunks: np.ndarray  # index of each row's chunk
    rows: np.ndarray  # row within that chunk

    @classmethod
    def of(cls, drafts: Listed[Listed[int]], samples: np.ndarray, lengths: np.ndarray) -> "_Draws":
        """Return the draw rows of a decision.

        These are the last known row of each drawing chunk, and its draft rows.
        """
        ends = np.flatnonzero(samples)
        if not any(drafts):
            return cls(ends, lengths[ends] - 1)
        behind = np.fromiter(map(len, drafts), dtype=np.int64, count=len(drafts))[ends]
        chunks = np.repeat(ends, behind + 1)
        firsts = np.cumsum(behind + 1) - behind - 1  # index of each chunk's first row
        rows = np.arange(len(chunks)) - np.repeat(firsts, behind + 1)
        return cls(chunks, lengths[chunks] - 1 - np.repeat(behind, behind + 1) + rows)

    def within(self, part: np.ndarray) -> "_Draws":
        """Return the draw rows of the chunks selected by `part`, bool [S]."""
        kept = part[self.chunks]
        return _Draws((np.cumsum(part) - 1)[self.chunks[kept]], self.rows[kept])


class _Columns(NamedTuple):
    """Columns of the chunks, each [S]."""

    slots: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    draws: _Draws

    def of(self, part: np.ndarray) -> "_Columns":
        """Return the columns of the chunks selected by `part`, bool [S]."""
        slots, starts, lengths, draws = self
        return _Columns(slots[part], starts[part], lengths[part], draws.within(part))


@dataclass(frozen=True, slots=True)
class Chunks:
    """A step's chunks and samples as arrays: S chunks, R samples."""

    seqs: Listed[Sequence]  # [S]
    # weight sets in order of first appearance, each with its chunks: bool [S] or ALL
    parts: Listed[tuple[str, np.ndarray]]
    columns: _Columns
    drafts: Listed[tuple[int, ...]]  # [S]
    sampled: Listed[Sequence]  # [R]
    behind: Drafts  # sample index -> drafts that the sample follows
    slots: np.ndarray  # [R]
    rows: np.ndarray  # [R] rows of the step's logits
    positions: np.ndarray  # [R] positions of the tokens to draw

    def drawing(self, places: Listed[int]) -> "Chunks":
        """Return the same chunks with only the samples at `places`."""
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
    """Return the drafts that samples follow, by sample index."""
    behind: dict[int, tuple[int, ...]] = {}
    index = 0
    for count, drafts in zip(decision.samples, decision.drafts, strict=True):
        behind |= {index + length: drafts[:length] for length in range(1, len(drafts) + 1)}
        index += count + len(drafts)
    return behind


def _input_ids(
    seqs: Listed[Sequence],
    starts: Listed[int],
    ends: Listed[int],
    drafts: Listed[Listed[int]],
    sampling_now: Mapping[int, int],
) -> tuple[list[int], list[int], list[int]]:
    """Return the tokens of all rows, and the rows whose token is still being sampled.

    The third list holds the index of each such token in the samples of the step in flight.
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
    """Return rows to score, their targets, rows that need best tokens, and their sequences.

    `places` are the indices of chunks whose sequences have rows to score.
    """
    score_rows: list[int] = []
    score_targets: list[int] = []
    best_rows: list[int] = []
    scored: list[Scored] = []
    for index in places:
        seq, start = seqs[index], int(starts[index])
        rows = seq.rows_to_score(start, int(ends[index]))
        if rows:
            first = int(cu_seqlens[index]) - start
            in_batch = range(first + rows.start, first + rows.stop)
            part = Scored(seq, rows.start, rows.stop)
            width = seq.request.score_width
            score_rows += in_batch if width == 1 else np.repeat(in_batch, width).tolist()
            best_rows += in_batch if seq.request.num_best else ()
            score_targets += part.targets
            scored.append(part)
    return score_rows, score_targets, best_rows, scored


def _adapters(seqs: Listed[Sequence], lengths: np.ndarray) -> tuple[tuple[Any, ...], np.ndarray]:
    """Return the adapters of the chunks, and each row's index among them."""
    places: dict[Any, int] = {}
    indices = [-1 if s.adapter is None else places.setdefault(s.adapter, len(places)) for s in seqs]
    return tuple(places), np.repeat(np.array(indices, dtype=np.int64), lengths)


def _temperatures(scored: Listed[Scored]) -> np.ndarray:
    temperatures = [part.seq.request.score_temperature for part in scored]
    return np.repeat(np.array(temperatures, dtype=np.float64), [part.num_scores for part in scored])


def _score_masks(arrays: Arrays[A], num_rows: int, scored: Listed[Scored]) -> dict[str, A]:
    """Return the columns for the masks that scores are normalized over."""
    if not num_rows:
        return {"score_mask_rows": arrays.no_integers, "score_mask_words": arrays.no_masks}
    masks: list[tuple[int, np.ndarray]] = []
    at = 0
    for part in scored:
        seq, start, end = part
        first = seq.request.scored.start
        masks += enumerate(seq.request.score_masks[start - first : end - first], at)
        at += part.num_scores
    columns = mask_columns(arrays, num_rows, masks)
    return {f"score_{name}": each for name, each in columns.items()}
