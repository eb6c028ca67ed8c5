"""Workers replay decisions: rank 0 tells what the scheduler decided and what the workers cannot
know, and each worker builds its own batches of that, by the same `BatchBuilder`.

A worker keeps a `Sequence` for each of rank 0's. A new sequence travels once; from then on only the
tokens that became known since and the blocks that its table got.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Listed
from dataclasses import fields, replace
from typing import Any

import msgspec
import numpy as np

from nano_inference.core.apply import Applied
from nano_inference.core.batch import BatchBuilder, Chunks
from nano_inference.core.decision import SchedulerOutput
from nano_inference.core.sequence import CheckedRequest, Sequence, Sequences, SequenceStatus
from nano_inference.kv_cache.sliding_window import UnitPool
from nano_inference.ops.batches import ForwardBatch
from nano_inference.sampling.sampling_batch import Masks
from nano_inference.sampling.tensors import TORCH, SamplingBatch
from nano_inference.types import SamplingParams

_REALS = [each.name for each in fields(SamplingParams) if isinstance(each.default, float)]
_FORGET = 64  # sequences that may have ended before a step says so


class NewSequence(msgspec.Struct, array_like=True, frozen=True):
    """What a batch reads of a sequence and does not change; see `Sequence` and
    `CheckedRequest`.
    """

    seq_id: int
    sample_index: int
    num_prompt_tokens: int
    params: SamplingParams
    stop_ids: frozenset[int]
    seed: int
    scored: tuple[int, int]
    score_temperature: float
    num_best: int


class Forward(msgspec.Struct, tag="forward", frozen=True):
    """A decision that rank 0 has applied.

    Attributes:
        decision: of the scheduler.
        new: sequences that were in no step before.
        ended: ids of sequences that will be in none any more.
        counts: of each chunk's sequence, how many tokens became known; empty: none of any.
        token_ids: all these.
        tables: sequence id, place of the first block that changed, and the blocks from there on.
        scores: (sequence id, known scores) of those whose rows are scored.
        forks: ids of the sequences that are born in this step, in order.
        copies: blocks (source, target) to copy before.
        units: blocks whose units changed and, below, these units: int64 [1 + U, B].
    """

    decision: SchedulerOutput
    new: list[NewSequence]
    ended: list[int]
    counts: list[int]
    token_ids: list[int]
    tables: list[tuple[int, int, list[int]]]
    scores: list[tuple[int, int]]
    forks: list[int]
    copies: tuple[tuple[int, int], ...]
    units: bytes


class Draw(msgspec.Struct, tag="draw", frozen=True):
    """The draw of a step.

    Attributes:
        places: which of the step's samples are drawn; None: all.
        counts, token_ids: as in `Forward`, of these samples, where penalties count their tokens.
        masks: place among these samples, and its mask: of those that have a grammar.
    """

    places: list[int] | None
    counts: list[int]
    token_ids: list[int]
    masks: list[tuple[int, bytes]] = []


class StepSender:
    """Rank 0's end.

    Args:
        block_size: of the block tables.
        units: what stands behind blocks, where that is not the blocks themselves.
    """

    def __init__(self, block_size: int, units: UnitPool | None = None) -> None:
        self._block_size, self._units = block_size, units
        self._known: dict[int, int] = {}  # tokens of each sequence that the workers know
        self._alive: list[Sequence] = []  # the same sequences
        self._penalizes = False  # whether some of them may need the newest tokens for a draw
        self._most = _FORGET
        self._sampled: Listed[Sequence] = ()

    def forward(self, decision: SchedulerOutput, applied: Applied, sequences: Sequences) -> Forward:
        """The message of a step."""
        ended = self._ended() if len(self._alive) > self._most else []
        live = sequences.by_id
        seqs = [live[seq_id] for seq_id in decision.seq_ids]
        new = self._enter(seqs, whole=False)
        counts, token_ids = self._new_tokens(seqs)
        forks = self._enter(applied.sampled, whole=True)
        self._sampled = applied.sampled
        return Forward(
            decision=decision,
            new=[_told(seq) for seq in new],
            ended=ended,
            counts=counts,
            token_ids=token_ids,
            tables=self._tables(decision, seqs),
            scores=[
                (seq.seq_id, len(seq.scores))
                for seq, start in zip(seqs, decision.starts, strict=True)
                if start < seq.request.scored.stop
            ],
            forks=[seq.seq_id for seq in forks],
            copies=applied.block_copies,
            units=b"" if self._units is None else _changed_units(self._units),
        )

    def draw(self, chunks: Chunks, masks: Masks) -> Draw:
        """The message of a draw of these samples of the step."""
        places = None
        if len(chunks.sampled) < len(self._sampled):
            wanted = {seq.seq_id for seq in chunks.sampled}
            places = [i for i, seq in enumerate(self._sampled) if seq.seq_id in wanted]
        new = self._new_tokens(chunks.sampled) if self._penalizes else ([], [])
        return Draw(places, *new, [(place, words.tobytes()) for place, words in masks])

    def _enter(self, seqs: Iterable[Sequence], whole: bool) -> list[Sequence]:
        """Those that the workers do not know yet; from now on they do. `whole`: all tokens too."""
        known = self._known
        new = [seq for seq in seqs if seq.seq_id not in known]
        for seq in new:
            known[seq.seq_id] = len(seq.token_ids) if whole else 0
        self._alive += new
        self._penalizes |= any(seq.request.params.penalizes for seq in new)
        return new

    def _new_tokens(self, seqs: Iterable[Sequence]) -> tuple[list[int], list[int]]:
        """How many tokens of each are new to the workers, and all these."""
        known, counts, token_ids = self._known, list[int](), list[int]()
        for seq in seqs:
            before, now = known[seq.seq_id], len(seq.token_ids)
            counts.append(now - before)
            if now > before:
                token_ids += seq.token_ids[before:]
                known[seq.seq_id] = now
        return (counts, token_ids) if token_ids else ([], [])

    def _tables(
        self, decision: SchedulerOutput, seqs: Listed[Sequence]
    ) -> list[tuple[int, int, list[int]]]:
        whole = {admission.seq_id for admission in decision.admitted}
        return [
            (seq.seq_id, first, seq.block_ids[first:])
            for seq, start, fresh in zip(seqs, decision.starts, decision.fresh_blocks, strict=True)
            if fresh or seq.seq_id in whole
            for first in [0 if seq.seq_id in whole else start // self._block_size]
        ]

    def _ended(self) -> list[int]:
        """Forget sequences that ended. Looked for only once there may be as many as live ones."""
        ended = [seq.seq_id for seq in self._alive if seq.status is SequenceStatus.FINISHED]
        for seq_id in ended:
            del self._known[seq_id]
        self._alive = [seq for seq in self._alive if seq.seq_id in self._known]
        self._penalizes = any(seq.request.params.penalizes for seq in self._alive)
        self._most = 2 * len(self._alive) + _FORGET
        return ended


class StepReplay:
    """A worker's end: the sequences as far as batches read them, and the batches of the step."""

    def __init__(self, block_size: int, units: UnitPool | None = None) -> None:
        self._block_size, self._units = block_size, units
        self._sequences = Sequences()
        self._builder = BatchBuilder(block_size, TORCH)
        self._chunks: Chunks | None = None
        # sequence id -> place in the samples of the newest draw
        self._newest: dict[int, int] = {}

    def forward(
        self, message: Forward
    ) -> tuple[tuple[ForwardBatch, ...], tuple[tuple[int, int], ...]]:
        """The batches, and copies of blocks."""
        live, decision = self._sequences.by_id, message.decision
        for seq_id in message.ended:
            del live[seq_id]
        for new in message.new:
            live[new.seq_id] = _sequence(new)
        seqs = [live[seq_id] for seq_id in decision.seq_ids]
        if message.counts:
            _add_tokens(seqs, message.counts, message.token_ids)
        for seq_id, known in message.scores:
            live[seq_id].scores[:] = [0.0] * known
        for seq_id, first, blocks in message.tables:
            live[seq_id].block_ids[first:] = blocks
        sampled = self._sampled(decision, seqs, message.forks)
        if self._units is not None:
            _follow_units(self._units, message.units)
        self._chunks = self._builder.chunks(decision, sampled, self._sequences)
        return self._builder.forward_batches(self._chunks, self._newest), message.copies

    def draw(self, message: Draw) -> SamplingBatch:
        """The batch of a draw."""
        assert self._chunks is not None
        chunks = self._chunks
        if message.places is not None:
            chunks = chunks.drawing(message.places)
        if message.counts:
            _add_tokens(chunks.sampled, message.counts, message.token_ids)
        self._newest = {seq.seq_id: place for place, seq in enumerate(chunks.sampled)}
        masks = [(place, np.frombuffer(words, dtype=np.int32)) for place, words in message.masks]
        return self._builder.sampling_batch(chunks, masks)

    def _sampled(
        self, decision: SchedulerOutput, seqs: Listed[Sequence], forks: Listed[int]
    ) -> list[Sequence]:
        """Who gets a token, in the order of the samples; new samples of a group are born."""
        ids, sampled = iter(forks), list[Sequence]()
        columns = zip(seqs, decision.samples, decision.drafts, strict=True)
        for seq, count, drafts in columns:
            sampled += [seq] * (1 + len(drafts)) if count else []
            for index in range(1, count):
                fork = seq.fork(next(ids), index, None)
                self._sequences.by_id[fork.seq_id] = fork
                sampled.append(fork)
        return sampled


def _add_tokens(seqs: Iterable[Sequence], counts: Listed[int], token_ids: Listed[int]) -> None:
    start = 0
    for seq, count in zip(seqs, counts, strict=True):
        if count:
            seq.token_ids += token_ids[start : start + count]
            start += count


def _told(seq: Sequence) -> NewSequence:
    request = seq.request
    params = request.params
    # integers and numpy's numbers, which msgspec cannot write as they are
    if any(type(getattr(params, name)) is not float for name in _REALS):
        reals: Any = {name: float(getattr(params, name)) for name in _REALS}
        params = replace(params, **reals)
    if params.stop or params.cache_salt is not None:  # text that no worker reads
        params = replace(params, stop=(), cache_salt=None)
    if params.keep_cache_seconds:  # the cache is rank 0's
        params = replace(params, keep_cache_seconds=0.0, cache_priority=0)
    return NewSequence(
        seq.seq_id,
        seq.sample_index,
        request.num_prompt_tokens,
        params,
        request.stop_ids,
        request.seed,
        (request.scored.start, request.scored.stop),
        request.score_temperature,
        request.num_best,
    )


def _sequence(new: NewSequence) -> Sequence:
    request = CheckedRequest(
        request_id=0,
        num_prompt_tokens=new.num_prompt_tokens,
        params=new.params,
        stop_ids=new.stop_ids,
        seed=new.seed,
        scored=range(*new.scored),
        score_temperature=new.score_temperature,
        num_best=new.num_best,
    )
    return Sequence(new.seq_id, request, [], sample_index=new.sample_index)


def _changed_units(pool: UnitPool) -> bytes:
    # `changed` is not cleared here: rank 0's own mirror on a device does that
    blocks = np.fromiter(pool.changed, dtype=np.int64, count=len(pool.changed))
    return np.concatenate((blocks[None], _units(pool)[:, blocks])).tobytes()


def _follow_units(pool: UnitPool, message: bytes) -> None:
    numbers = np.frombuffer(message, dtype=np.int64)
    blocks, *behind = numbers.reshape(1 + pool.layout.num_units, -1)
    _units(pool)[:, blocks] = behind
    pool.changed.update(blocks.tolist())


def _units(pool: UnitPool) -> np.ndarray:
    return np.frombuffer(pool.unit_of, dtype=np.int64).reshape(pool.layout.num_units, -1)
