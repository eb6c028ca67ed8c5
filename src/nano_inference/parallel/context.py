"""Context parallelism: the keys and values of a sequence are split over ranks by absolute position.

With c ranks, each block is divided into c equal runs of positions, each a multiple of `SEGMENT`
long. Rank r stores the r-th run and computes the rows whose positions it stores. Only attention
needs other ranks: a row's query is sent to every rank with visible keys, and each rank computes the
states of its own segments. The row's owner then merges all states in the order of keys. The result
has the bits of a single rank. Every rank has the batch and derives the exchange from it, without
negotiation.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from nano_inference.arrays import Tensor, namespace
from nano_inference.config import SEGMENT
from nano_inference.core.batch import ForwardBatch

MOST_NUMBERS = 2**25  # maximum numbers of states per exchange: more rows are split into pieces


class SegmentRows(NamedTuple):
    """M rows with their visible keys on this rank.

    Key positions are counted among the local keys.
    """

    positions: Tensor  # [M] last visible key of each row
    begins: Tensor  # [M] first visible key of each row, a non-decreasing function of `positions`
    row_chunks: Tensor  # [M] index of each row's block table
    block_tables: Tensor  # [S, blocks], padded with 0

    @property
    def counts(self) -> Tensor:
        """Number of segments with visible keys for each row, [M]."""
        return self.positions // SEGMENT - self.begins // SEGMENT + 1


@dataclass(frozen=True, slots=True)
class ContextSplit:
    """Assignment of positions to ranks.

    Attributes:
        size: Number of ranks.
        block_size: Positions per block, over all ranks.
    """

    size: int
    block_size: int

    @property
    def run(self) -> int:
        """Positions of a block that a rank stores: the block size of its KV storage."""
        return self.block_size // self.size

    def owners(self, positions: Tensor) -> Tensor:
        """Return the rank that stores each position and computes its row."""
        return positions % self.block_size // self.run

    def stored(self, positions: Tensor, rank: int) -> Tensor:
        """Return how many positions below each of `positions` a rank stores."""
        in_block = positions % self.block_size - rank * self.run
        return positions // self.block_size * self.run + in_block.clamp(0, self.run)

    def slots(self, slots: Tensor) -> Tensor:
        """Convert slots of whole blocks to slots of their owner's storage."""
        return slots // self.block_size * self.run + slots % self.run

    def segments(self, local: Tensor, rank: int) -> Tensor:
        """Convert a rank's own segment numbers to segment numbers of the whole sequence."""
        run = self.run // SEGMENT
        return local // run * (run * self.size) + rank * run + local % run

    def visible(self, positions: Tensor, window: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return the visible keys [first, end) of each row, counted among a rank's own keys."""
        first = (
            self.stored((positions - window + 1).clamp(min=0), rank)
            if window
            else namespace(positions).zeros_like(positions)
        )
        return first, self.stored(positions + 1, rank)


@dataclass(frozen=True, slots=True)
class Piece:
    """Exchange of a step on one rank: P own rows, and M rows of all ranks that see its keys."""

    own_rows: slice  # this rank's rows in the exchange
    queries: tuple[Tensor, ...]  # by rank: own rows whose queries are sent to it
    asked: tuple[int, ...]  # by rank: number of queries received from it
    arrived: Tensor  # [M] permutation of the received queries to the order of the batch
    rows: SegmentRows  # the M rows
    answers: tuple[Tensor, ...]  # by rank: indices of the states that are sent back to it
    answered: tuple[int, ...]  # by rank: number of states received from it
    order: Tensor  # [K] permutation of the own rows' states: row by row, in the order of keys
    counts: Tensor  # [P] number of states of each own row


@dataclass(frozen=True, slots=True)
class Rejoining:
    """Exchange that collects values of some rows of the batch from their owners."""

    own_rows: Tensor  # own rows that this rank contributes
    counts: tuple[int, ...]  # by rank: number of rows that it contributes
    # permutation of the concatenated values of all ranks to the order of the batch
    order: Tensor


@dataclass(frozen=True, slots=True)
class ContextStep:
    """Data of a step that a rank needs in addition to its own rows."""

    rows: Tensor  # [N] own rows within the whole batch, ascending
    pieces: Mapping[int, tuple[Piece, ...]]  # exchanges by window
    logits: Rejoining  # exchange of rows `logits_indices`
    scores: Rejoining  # exchange of rows `score_rows`
    best: Rejoining  # exchange of rows `best_rows`


def own_rows(
    batch: ForwardBatch[Tensor],
    split: ContextSplit,
    rank: int,
    windows: Collection[int] = (0,),
    most_states: int = MOST_NUMBERS,
) -> ForwardBatch[Tensor]:
    """Return the rows of a step that a rank computes, as a separate batch with `context` set.

    Args:
        batch: Batch of all ranks together.
        split: Assignment of positions to ranks.
        rank: Rank within the context group.
        windows: Windows of the model's layers (0 means none).
        most_states: Maximum number of states per exchange, equal on all ranks.
    """
    xp, owners = namespace(batch.positions), split.owners(batch.positions)
    rows = (owners == rank).nonzero()[:, 0]
    index = xp.full_like(owners, -1)  # index of each row among its owner's rows
    for owner in range(split.size):
        index[owners == owner] = xp.arange(int((owners == owner).sum()), device=owners.device)
    wanted = batch.score_rows, batch.best_rows, batch.relay_rows
    scored, best, relayed = (owners[indices] == rank for indices in wanted)
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
        cu_seqlens_q=xp.searchsorted(rows, batch.cu_seqlens_q),
        logits_indices=step.logits.own_rows,
        row_adapters=batch.row_adapters[rows] if batch.adapters else batch.row_adapters,
        score_rows=step.scores.own_rows,
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
    order = owners.argsort(stable=True).argsort()
    return Rejoining(index[wanted[owners == rank]], _counts(owners, size), order)


def _counts(owners: Tensor, size: int) -> tuple[int, ...]:
    """Return the number of entries for each rank."""
    return tuple(namespace(owners).bincount(owners, minlength=size).tolist())


def _pieces(
    batch: ForwardBatch[Tensor],
    split: ContextSplit,
    rank: int,
    window: int,
    owners: Tensor,
    index: Tensor,
    most_states: int,
) -> tuple[Piece, ...]:
    """Split a step into pieces with at most `most_states` states. Every rank splits alike."""
    xp, positions = namespace(batch.positions), batch.positions
    first = (positions - window + 1).clamp(min=0) if window else xp.zeros_like(positions)
    before = (positions // SEGMENT - first // SEGMENT + 1).cumsum(0)
    bounds, taken = [0], 0
    while bounds[-1] < len(before):
        end = max(int(xp.searchsorted(before, taken + most_states, right=True)), bounds[-1] + 1)
        bounds.append(end)
        taken = int(before[end - 1])
    pieces = (xp.arange(start, end, device=owners.device) for start, end in pairwise(bounds))
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
    is_own = owners == rank
    queries: list[Tensor] = []
    order_keys: list[Tensor] = []  # by rank: sort keys of its states by own row and segment
    for peer in range(split.size):
        first, end = split.visible(positions, window, peer)
        asked = is_own & (end > first)
        queries.append(index[asked])
        of_row, segment = _segments(first[asked], end[asked])
        order_keys.append(index[asked][of_row] * _MOST_SEGMENTS + split.segments(segment, peer))
    keys = namespace(rows).cat(order_keys)

    first, end = split.visible(positions, window, rank)
    seen = (end > first).nonzero()[:, 0]
    of_row, _ = _segments(first[seen], end[seen])
    askers = owners[seen]
    mine = index[is_own]
    start = int(mine[0]) if len(mine) else 0
    return Piece(
        own_rows=slice(start, start + len(mine)),
        queries=tuple(queries),
        asked=_counts(askers, split.size),
        arrived=askers.argsort(stable=True).argsort(),
        rows=SegmentRows(
            end[seen] - 1, first[seen], batch.row_chunks[rows[seen]], batch.block_tables
        ),
        answers=tuple((askers[of_row] == peer).nonzero()[:, 0] for peer in range(split.size)),
        answered=tuple(map(len, order_keys)),
        order=keys.argsort(),
        counts=namespace(keys).bincount(keys // _MOST_SEGMENTS - start, minlength=len(mine)),
    )


_MOST_SEGMENTS = 2**32  # upper bound of segments per sequence


def _segments(first: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Return all segments of rows that see keys [first, end), as (row, number), row by row."""
    start = first // SEGMENT
    counts = (end - 1) // SEGMENT - start + 1
    xp = namespace(first)
    rows = xp.arange(len(first), device=first.device).repeat_interleave(counts)
    return rows, start[rows] + xp.arange(len(rows), device=first.device) - (
        counts.cumsum(0) - counts
    )[rows]
