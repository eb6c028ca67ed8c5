"""Context parallel: the keys and values of one sequence over several ranks, at fixed absolute
positions.

Of each block rank r of c stores the r-th of c equal runs of positions, a multiple of `SEGMENT`
long. A rank computes the rows whose positions it stores; only attention looks further. There a
row's query goes to every rank that holds keys which it sees, each computes the states of its own
segments, and the row's owner merges all of them in order of keys: the bits of one rank. Who does
what follows from the batch, which every rank has; nothing is negotiated.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from nano_inference.config import SEGMENT
from nano_inference.core.batch import ForwardBatch

MOST_NUMBERS = 2**25  # of the states that go between ranks at once: beyond, rows go piece by piece


class SegmentRows(NamedTuple):
    """Rows that may see only some of their keys here. M rows; keys are counted among those that lie
    here.
    """

    positions: Tensor  # [M] the last key that each row sees
    begins: Tensor  # [M] the first one; neither falls where the other rises
    row_chunks: Tensor  # [M] index of each row's block table
    block_tables: Tensor  # [S, blocks], padded with 0

    @property
    def counts(self) -> Tensor:
        """[M] segments in which each row sees a key."""
        return self.positions // SEGMENT - self.begins // SEGMENT + 1


@dataclass(frozen=True, slots=True)
class ContextSplit:
    """Who stores which position.

    Attributes:
        size: ranks.
        block_size: positions of a block, of all ranks together.
    """

    size: int
    block_size: int

    @property
    def run(self) -> int:
        """Positions of a block that a rank stores: the block size of its KV storage."""
        return self.block_size // self.size

    def owners(self, positions: Tensor) -> Tensor:
        """The rank that stores each position, and computes its row."""
        return positions % self.block_size // self.run

    def stored(self, positions: Tensor, rank: int) -> Tensor:
        """How many positions below each of these a rank stores."""
        in_block = positions % self.block_size - rank * self.run
        return positions // self.block_size * self.run + in_block.clamp(0, self.run)

    def slots(self, slots: Tensor) -> Tensor:
        """Slots of whole blocks as slots of their owner's storage."""
        return slots // self.block_size * self.run + slots % self.run

    def segments(self, local: Tensor, rank: int) -> Tensor:
        """The numbers, in the whole sequence, of a rank's own segments."""
        run = self.run // SEGMENT
        return local // run * (run * self.size) + rank * run + local % run

    def visible(self, positions: Tensor, window: int, rank: int) -> tuple[Tensor, Tensor]:
        """What rows at these positions see of a rank's keys: [first, end) of each, counted among
        those it stores.
        """
        first = (
            self.stored((positions - window + 1).clamp(min=0), rank)
            if window
            else torch.zeros_like(positions)
        )
        return first, self.stored(positions + 1, rank)


@dataclass(frozen=True, slots=True)
class Piece:
    """One exchange of a step as a rank takes part in it: P of its own rows, M rows of any rank
    that see its keys.
    """

    own: slice  # of this rank's rows
    queries: tuple[Tensor, ...]  # by rank: which of its rows go there
    asked: tuple[int, ...]  # by rank: how many come from there
    arrived: Tensor  # [M] what puts the queries that come back into the order of the batch
    rows: SegmentRows  # M of them
    answers: tuple[Tensor, ...]  # by rank: which of the states go back there
    answered: tuple[int, ...]  # by rank: how many come from there
    order: Tensor  # [K] what puts the states of own rows in order: row by row, by their keys
    counts: Tensor  # [P] states of each own row


@dataclass(frozen=True, slots=True)
class Rejoining:
    """How values of some rows of the batch come together again from their owners."""

    own: Tensor  # which of its own rows a rank brings
    counts: tuple[int, ...]  # by rank: how many it brings
    # what puts all ranks' values, one rank after the other, into the order of the batch
    order: Tensor


@dataclass(frozen=True, slots=True)
class ContextStep:
    """What a rank knows of a step beside its own rows."""

    rows: Tensor  # [N] which rows of the whole batch are its own; rising
    pieces: Mapping[int, tuple[Piece, ...]]  # by window
    logits: Rejoining  # of rows `logits_indices`
    scores: Rejoining  # of rows `score_rows`
    best: Rejoining  # of rows `best_rows`


def own_rows(
    batch: ForwardBatch[Tensor],
    split: ContextSplit,
    rank: int,
    windows: Collection[int] = (0,),
    most_states: int = MOST_NUMBERS,
) -> ForwardBatch[Tensor]:
    """The rows of a step that a rank computes, as a batch of its own, with `context` set.

    Args:
        batch: of all ranks together.
        split: who stores what.
        rank: in the context group.
        windows: that the model's layers have (0: none).
        most_states: that go between ranks at once; all ranks give the same.
    """
    owners = split.owners(batch.positions)
    rows = (owners == rank).nonzero()[:, 0]
    index = torch.full_like(owners, -1)  # of a row among its owner's own
    for each in range(split.size):
        index[owners == each] = torch.arange(int((owners == each).sum()), device=owners.device)
    wanted = batch.score_rows, batch.best_rows, batch.relay_rows
    scored, best, relayed = (owners[each] == rank for each in wanted)
    step = ContextStep(
        rows=rows,
        pieces={
            window: _pieces(batch, split, rank, window, owners, index, most_states)
            for window in windows
        },
        logits=_rejoining(batch.logits_indices, owners, index, rank, split.size),
        scores=_rejoining(batch.score_rows, owners, index, rank, split.size),
        best=_rejoining(batch.best_rows, owners, index, rank, split.size),
    )
    return replace(
        batch,
        input_ids=batch.input_ids[rows],
        positions=batch.positions[rows],
        slot_mapping=split.slots(batch.slot_mapping[rows]),
        row_chunks=batch.row_chunks[rows],
        cu_seqlens_q=torch.searchsorted(rows, batch.cu_seqlens_q),
        logits_indices=step.logits.own,
        score_rows=step.scores.own,
        score_targets=batch.score_targets[scored],
        score_temperatures=batch.score_temperatures[scored],
        score_mask_rows=batch.score_mask_rows[scored],
        relay_rows=index[batch.relay_rows[relayed]],
        relay_sources=batch.relay_sources[relayed],
        best_rows=index[batch.best_rows[best]],
        context=step,
    )


def _rejoining(wanted: Tensor, owners: Tensor, index: Tensor, rank: int, size: int) -> Rejoining:
    owners = owners[wanted]
    order = torch.argsort(torch.argsort(owners, stable=True))
    return Rejoining(index[wanted[owners == rank]], _counts(owners, size), order)


def _counts(owners: Tensor, size: int) -> tuple[int, ...]:
    """How many each rank has."""
    return tuple(torch.bincount(owners, minlength=size).tolist())


def _pieces(
    batch: ForwardBatch[Tensor],
    split: ContextSplit,
    rank: int,
    window: int,
    owners: Tensor,
    index: Tensor,
    most_states: int,
) -> tuple[Piece, ...]:
    """Cut a step where the states of its rows become too many. Every rank cuts alike."""
    first = (
        (batch.positions - window + 1).clamp(min=0) if window else torch.zeros_like(batch.positions)
    )
    before = (batch.positions // SEGMENT - first // SEGMENT + 1).cumsum(0)
    bounds, taken = [0], 0
    while bounds[-1] < len(before):
        end = max(int(torch.searchsorted(before, taken + most_states, right=True)), bounds[-1] + 1)
        bounds.append(end)
        taken = int(before[end - 1])
    pieces = (torch.arange(start, end, device=owners.device) for start, end in pairwise(bounds))
    return tuple(_piece(batch, split, rank, window, rows, owners, index) for rows in pieces)


def _piece(
    batch: ForwardBatch[Tensor],
    split: ContextSplit,
    rank: int,
    window: int,
    rows: Tensor,
    owners: Tensor,
    index: Tensor,
) -> Piece:
    owners, index, positions = owners[rows], index[rows], batch.positions[rows]
    own = owners == rank
    queries: list[Tensor] = []
    found: list[Tensor] = []  # by rank: where in the order of own rows and keys its states belong
    for each in range(split.size):
        first, end = split.visible(positions, window, each)
        asked = own & (end > first)
        queries.append(index[asked])
        of_row, segment = _segments(first[asked], end[asked])
        found.append(index[asked][of_row] * _MOST_SEGMENTS + split.segments(segment, each))
    keys = torch.cat(found)

    first, end = split.visible(positions, window, rank)
    seen = (end > first).nonzero()[:, 0]
    of_row, _ = _segments(first[seen], end[seen])
    askers = owners[seen]
    mine = index[own]
    start = int(mine[0]) if len(mine) else 0
    return Piece(
        own=slice(start, start + len(mine)),
        queries=tuple(queries),
        asked=_counts(askers, split.size),
        arrived=torch.argsort(torch.argsort(askers, stable=True)),
        rows=SegmentRows(
            end[seen] - 1, first[seen], batch.row_chunks[rows[seen]], batch.block_tables
        ),
        answers=tuple((askers[of_row] == each).nonzero()[:, 0] for each in range(split.size)),
        answered=tuple(map(len, found)),
        order=torch.argsort(keys),
        counts=torch.bincount(keys // _MOST_SEGMENTS - start, minlength=len(mine)),
    )


_MOST_SEGMENTS = 2**32  # of a sequence


def _segments(first: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Of rows that see keys [first, end): all their segments, as (row, number), row by row."""
    start = first // SEGMENT
    counts = (end - 1) // SEGMENT - start + 1
    rows = torch.arange(len(first), device=first.device).repeat_interleave(counts)
    return rows, start[rows] + torch.arange(len(rows), device=first.device) - (
        counts.cumsum(0) - counts
    )[rows]
