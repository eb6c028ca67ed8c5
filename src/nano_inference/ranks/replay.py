"""Replay of steps by workers: rank 0 sends the scheduler's decision and data that workers cannot
derive. Each worker builds its own batches from them with the same `BatchBuilder`.

A worker keeps a `Sequence` for each of rank 0's. A new sequence is sent once. Afterwards, only its
new tokens and new blocks are sent.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Listed
from dataclasses import fields, replace
from typing import Any, Protocol

import msgspec
import numpy as np

from nano_inference.core.apply import Applied
from nano_inference.core.batch import BatchBuilder, Chunks
from nano_inference.core.decision import SchedulerOutput
from nano_inference.core.named_ids import prompt_targets
from nano_inference.core.sequence import (
    CheckedRequest,
    Sequence,
    Sequences,
    SequenceStatus,
    ServedAdapter,
)
from nano_inference.kv_cache.sliding_window import UnitPool
from nano_inference.ops.batches import ForwardBatch
from nano_inference.sampling.sampling_batch import Masks
from nano_inference.sampling.tensors import TORCH, SamplingBatch
from nano_inference.types import SamplingParams

_REALS = [each.name for each in fields(SamplingParams) if isinstance(each.default, float)]
_FORGET = 64  # ended sequences that may accumulate before a step reports them


class NewSequence(msgspec.Struct, array_like=True, frozen=True):
    """Constant data of a sequence that batches need. See `Sequence` and `CheckedRequest`."""

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
    """Decision that rank 0 has applied.

    Attributes:
        decision: Decision of the scheduler.
        new: Sequences of this step that are new to the workers.
        ended: Ids of ended sequences.
        counts: Number of new tokens of each chunk's sequence. Empty if there are none.
        token_ids: All new tokens.
        tables: Sequence id, index of the first changed block, and the blocks from there on.
        scores: (sequence id, number of known scores) of sequences whose rows are scored.
        forks: Ids of the sequences that are created in this step, in order.
        copies: Blocks (source, target) to copy first.
        units: Blocks with changed units, followed by these units: int64 [1 + U, B].
        adapters: (sequence id, number of its adapter) of sequences with a new adapter.
        removed: Numbers of adapters that no sequence uses any more.
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
    adapters: list[tuple[int, int]]
    removed: list[int]


class Draw(msgspec.Struct, tag="draw", frozen=True):
    """Draw of a step.

    Attributes:
        places: Indices of the drawn samples, or None for all.
        counts, token_ids: New tokens as in `Forward`, if penalties count tokens.
        masks: (index, mask) of the drawn samples with a grammar.
    """

    places: list[int] | None
    counts: list[int]
    token_ids: list[int]
    masks: list[tuple[int, bytes]] = []


class NumberedAdapters(Protocol):
    """Rank 0's numbers of the adapters that the workers hold (`ranks/adapters.py`)."""

    def number(self, adapter: ServedAdapter | None) -> int:
        """Return the number of an adapter in messages."""
        ...

    def take_removed(self) -> list[int]:
        """Return the numbers of the adapters that the workers can drop, each once."""
        ...


class AdaptersByNumber(Protocol):
    """A worker's adapters (`ranks/adapters.py`)."""

    def get(self, number: int) -> ServedAdapter | None:
        """Return an adapter by its number in messages."""
        ...

    def drop(self, number: int) -> ServedAdapter | None:
        """Drop and return an adapter, if it is here."""
        ...


class StepSender:
    """Rank 0's end, which builds the messages of steps.

    Args:
        block_size: Tokens per block.
        units: Units of blocks, or None if a block is its unit.
        adapters: Adapters that the workers hold. None: they hold none.
    """

    def __init__(
        self,
        block_size: int,
        units: UnitPool | None = None,
        adapters: NumberedAdapters | None = None,
    ) -> None:
        self._block_size, self._units, self._adapters = block_size, units, adapters
        self._known: dict[int, int] = {}  # number of tokens known to the workers, by sequence
        self._adapter_of: dict[int, int] = {}  # number of the adapter that they know, by sequence
        self._alive: list[Sequence] = []  # the same sequences
        self._penalizes = False  # True if a sequence may need the latest tokens for a draw
        self._most = _FORGET
        self._sampled: Listed[Sequence] = ()

    def forward(self, decision: SchedulerOutput, applied: Applied, sequences: Sequences) -> Forward:
        """Return the message of a step."""
        # an ended sequence would keep the memory of its adapter
        ended = self._ended() if len(self._alive) > self._most or self._adapter_of else []
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
            adapters=self._new_adapters(seqs),
            removed=[] if self._adapters is None else self._adapters.take_removed(),
        )

    def draw(self, chunks: Chunks, masks: Masks) -> Draw:
        """Return the message of a draw of these samples of the step."""
        places = None
        if len(chunks.sampled) < len(self._sampled):
            wanted = {seq.seq_id for seq in chunks.sampled}
            places = [i for i, seq in enumerate(self._sampled) if seq.seq_id in wanted]
        new = self._new_tokens(chunks.sampled) if self._penalizes else ([], [])
        return Draw(places, *new, [(place, words.tobytes()) for place, words in masks])

    def _enter(self, seqs: Iterable[Sequence], whole: bool) -> list[Sequence]:
        """Register and return the sequences that are new to the workers.

        With `whole`, all their tokens are considered known.
        """
        known = self._known
        new = [seq for seq in seqs if seq.seq_id not in known]
        for seq in new:
            known[seq.seq_id] = len(seq.token_ids) if whole else 0
        self._alive += new
        self._penalizes |= any(seq.request.params.penalizes for seq in new)
        return new

    def _new_tokens(self, seqs: Iterable[Sequence]) -> tuple[list[int], list[int]]:
        """Return how many tokens of each sequence are new to the workers, and all new tokens."""
        known, counts, token_ids = self._known, list[int](), list[int]()
        for seq in seqs:
            before, now = known[seq.seq_id], len(seq.token_ids)
            counts.append(now - before)
            if now > before:
                token_ids += seq.token_ids[before:]
                known[seq.seq_id] = now
        return (counts, token_ids) if token_ids else ([], [])

    def _new_adapters(self, seqs: Iterable[Sequence]) -> list[tuple[int, int]]:
        """Return the adapters of sequences whose adapter the workers do not know yet."""
        new = list[tuple[int, int]]()
        for seq in seqs:
            if seq.adapter is not None and self._adapters is not None:
                number = self._adapters.number(seq.adapter)
                if self._adapter_of.get(seq.seq_id) != number:
                    self._adapter_of[seq.seq_id] = number
                    new.append((seq.seq_id, number))
        return new

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
        """Remove and return ended sequences. Called only if they may outnumber live ones."""
        ended = [seq.seq_id for seq in self._alive if seq.status is SequenceStatus.FINISHED]
        for seq_id in ended:
            del self._known[seq_id]
            self._adapter_of.pop(seq_id, None)
        self._alive = [seq for seq in self._alive if seq.seq_id in self._known]
        self._penalizes = any(seq.request.params.penalizes for seq in self._alive)
        self._most = 2 * len(self._alive) + _FORGET
        return ended


class StepReplay:
    """Worker's end: the sequences as batches need them, and the batches of a step."""

    def __init__(
        self,
        block_size: int,
        units: UnitPool | None = None,
        adapters: AdaptersByNumber | None = None,
    ) -> None:
        self._block_size, self._units, self._adapters = block_size, units, adapters
        self._sequences = Sequences()
        self._builder = BatchBuilder(block_size, TORCH)
        self._chunks: Chunks | None = None
        # sequence id -> index in the samples of the latest draw
        self._newest: dict[int, int] = {}

    def forward(
        self, message: Forward
    ) -> tuple[tuple[ForwardBatch, ...], tuple[tuple[int, int], ...]]:
        """Return the batches of a step, and the blocks to copy."""
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
        self._follow_adapters(message)
        sampled = self._sampled(decision, seqs, message.forks)
        if self._units is not None:
            _follow_units(self._units, message.units)
        self._chunks = self._builder.chunks(decision, sampled, self._sequences)
        return self._builder.forward_batches(self._chunks, self._newest), message.copies

    def draw(self, message: Draw) -> SamplingBatch:
        """Return the batch of a draw."""
        assert self._chunks is not None
        chunks = self._chunks
        if message.places is not None:
            chunks = chunks.drawing(message.places)
        if message.counts:
            _add_tokens(chunks.sampled, message.counts, message.token_ids)
        self._newest = {seq.seq_id: place for place, seq in enumerate(chunks.sampled)}
        masks = [(place, np.frombuffer(words, dtype=np.int32)) for place, words in message.masks]
        return self._builder.sampling_batch(chunks, masks)

    def _follow_adapters(self, message: Forward) -> None:
        """Set the adapters of sequences, and drop adapters that rank 0 has dropped."""
        if self._adapters is None:
            return
        live = self._sequences.by_id
        for seq_id, number in message.adapters:
            live[seq_id].adapter = self._adapters.get(number)
        for number in message.removed:
            adapter = self._adapters.drop(number)
            for seq in live.values():  # ended sequences, which are reported later
                if seq.adapter is adapter:
                    seq.adapter = None

    def _sampled(
        self, decision: SchedulerOutput, seqs: Listed[Sequence], forks: Listed[int]
    ) -> list[Sequence]:
        """Return the sequence of each sample in order, creating forks of a group."""
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
    # convert integers and numpy numbers, which msgspec cannot encode as floats
    if any(type(getattr(params, name)) is not float for name in _REALS):
        reals: Any = {name: float(getattr(params, name)) for name in _REALS}
        params = replace(params, **reals)
    if params.stop or params.bad_words or params.cache_salt is not None:  # texts for rank 0
        params = replace(params, stop=(), bad_words=(), cache_salt=None)
    if params.keep_cache_seconds:  # only rank 0 has the cache
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
    token_ids, scored = list[int](), range(*new.scored)  # `Forward` brings the tokens
    request = CheckedRequest(
        request_id=0,
        num_prompt_tokens=new.num_prompt_tokens,
        params=new.params,
        stop_ids=new.stop_ids,
        seed=new.seed,
        scored=scored,
        score_targets=prompt_targets(new.params, token_ids, scored),
        score_temperature=new.score_temperature,
        num_best=new.num_best,
    )
    return Sequence(new.seq_id, request, token_ids, sample_index=new.sample_index)


def _changed_units(pool: UnitPool) -> bytes:
    # `changed` is not cleared here: rank 0's device mirror does, or `RankedRunner` on a CPU
    blocks = np.fromiter(pool.changed, dtype=np.int64, count=len(pool.changed))
    return np.concatenate((blocks[None], _units(pool)[:, blocks])).tobytes()


def _follow_units(pool: UnitPool, message: bytes) -> None:
    numbers = np.frombuffer(message, dtype=np.int64)
    blocks, *behind = numbers.reshape(1 + pool.layout.num_units, -1)
    _units(pool)[:, blocks] = behind
    pool.changed.update(blocks.tolist())


def _units(pool: UnitPool) -> np.ndarray:
    return np.frombuffer(pool.unit_of, dtype=np.int64).reshape(pool.layout.num_units, -1)
