"""Paged attention in plain torch: the specification. It works row by row, in key tiles at fixed
absolute positions.

A row's arithmetic is the recurrence of online softmax (arXiv:1805.02867) over tiles of `KEY_TILE`
keys, counted from position 0. It does not depend on the row's chunk, batch or block, because rows
are only stacked, never mixed. The recurrence restarts at every multiple of `SEGMENT` keys, and the
states of these segments are merged in order. Segments can therefore be computed separately, on the
rank that holds their keys (`attention_states`), and merged later (`merge_states`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.interface import AttentionArgs, KvcacheView
from nano_inference.parallel.context import SEGMENT, SegmentRows
from nano_inference.sampling.scaling import capped

KEY_TILE = 64
VECTOR = 16  # numbers per vector
ROW_GROUP = 128  # rows processed together: bounds the memory of a long chunk


@dataclass(frozen=True, slots=True)
class KeyTile:
    """One tile of keys for the rows of a group that see some of it. These rows are adjacent, since
    rows are sorted by falling context.
    """

    rows: slice  # rows within the group
    # [rows, KEY_TILE]; lanes that the row does not see point at the last key that it sees
    slots: Tensor
    outside: Tensor  # bool [rows, KEY_TILE]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that are processed together."""

    rows: Tensor  # indices of rows in the batch
    segments: tuple[tuple[KeyTile, ...], ...]  # tiles by segment
    firsts: tuple[int, ...]  # first key of each segment


@dataclass(frozen=True, slots=True)
class StatesPlan:
    """Inputs of `attention_states`: row groups, and the index of each row's states."""

    groups: tuple[RowGroup, ...]
    rows: SegmentRows
    first_states: Tensor  # [M] index of each row's first state
    num_states: int


class SoftmaxState(NamedTuple):
    """State of rows after some keys: highest score, sum of weights, and output before the
    division.
    """

    highest: Tensor  # float32 [..., 1]
    total: Tensor  # float32 [..., 1]
    acc: Tensor  # float32 [..., D]


def plan_attention(batch: ForwardBatch, block_size: int, window: int = 0) -> tuple[RowGroup, ...]:
    """List the slots that each row reads, tile by tile. Layers with the same window share the
    plan.
    """
    positions = batch.positions
    begins = (positions - window + 1).clamp(min=0) if window else torch.zeros_like(positions)
    return _plan(SegmentRows(positions, begins, batch.row_chunks, batch.block_tables), block_size)


def plan_states(rows: SegmentRows, block_size: int) -> StatesPlan:
    """Plan the rows' attention over the keys stored on this rank. Layers with the same window share
    the plan.
    """
    counts = rows.counts
    ends = counts.cumsum(0)
    return StatesPlan(_plan(rows, block_size), rows, ends - counts, int(counts.sum()))


def _plan(rows: SegmentRows, block_size: int) -> tuple[RowGroup, ...]:
    order = torch.argsort(rows.begins, descending=True, stable=True)
    order = order[torch.argsort(rows.positions[order], descending=True, stable=True)]
    return tuple(_group(rows, group, block_size) for group in order.split(ROW_GROUP))


def _group(rows: SegmentRows, group: Tensor, block_size: int) -> RowGroup:
    if not len(group):
        return RowGroup(group, (), ())
    first = int(rows.begins[group].min()) // KEY_TILE * KEY_TILE
    by_segment: dict[int, list[KeyTile]] = {}
    for start in range(first, int(rows.positions[group[0]]) + 1, KEY_TILE):
        tile = _tile(rows, group, start, block_size)
        if len(tile.slots):
            by_segment.setdefault(start // SEGMENT * SEGMENT, []).append(tile)
    return RowGroup(group, tuple(tuple(tiles) for tiles in by_segment.values()), tuple(by_segment))


def _tile(rows: SegmentRows, group: Tensor, start: int, block_size: int) -> KeyTile:
    end = int((rows.positions[group] >= start).sum())
    begin = int((rows.begins[group] >= start + KEY_TILE).sum())  # the window starts after the tile
    group = group[begin:end]
    positions = rows.positions[group]
    keys = torch.arange(start, start + KEY_TILE, device=group.device)
    outside = keys[None, :] > positions[:, None]
    outside |= keys[None, :] < rows.begins[group][:, None]
    # Lanes outside must not read memory of other sequences: it may contain anything, and 0 * NaN is
    # NaN.
    keys = torch.where(outside, positions[:, None], keys[None, :])
    blocks = rows.block_tables[rows.row_chunks[group]].gather(1, keys // block_size)
    return KeyTile(slice(begin, end), blocks * block_size + keys % block_size, outside)


def attention(
    q: Tensor,
    view: KvcacheView,
    layer: int,
    plan: object,
    scores: AttentionArgs,
) -> Tensor:
    """Implement `Ops.attention`: q [N, heads, D] over each row's own context. Return [N, heads * D]
    in q's dtype.
    """
    num_rows, num_heads, head_dim = q.shape
    out = torch.empty((num_rows, num_heads, head_dim), dtype=q.dtype, device=q.device)
    scaled = q.float() * scores.scale
    for group in cast("tuple[RowGroup, ...]", plan):
        shape = (len(group.rows), num_heads)
        whole = _nothing(scaled.new_empty((*shape, head_dim)))
        for rows, _, segment in _walk(scaled[group.rows], group, view, layer, scores.cap):
            for tensor, merged in zip(
                whole, _merge(SoftmaxState(*(t[rows] for t in whole)), segment), strict=True
            ):
                tensor[rows] = merged
        out[group.rows] = _finish(whole, scores.sinks).to(q.dtype)
    return out.view(num_rows, num_heads * head_dim)


def attention_states(
    q: Tensor,
    view: KvcacheView,
    layer: int,
    plan: object,
    scores: AttentionArgs,
) -> Tensor:
    """Compute the states of rows q [M, heads, D] in each segment stored on this rank: float32
    [states, heads, 2 + D], row by row.
    """
    plan = cast("StatesPlan", plan)
    states = torch.empty((plan.num_states, q.shape[1], 2 + q.shape[2]), device=q.device)
    scaled = q.float() * scores.scale
    for group in plan.groups:
        for rows, first, state in _walk(scaled[group.rows], group, view, layer, scores.cap):
            members = group.rows[rows]
            nth = first // SEGMENT - plan.rows.begins[members] // SEGMENT
            states[plan.first_states[members] + nth] = torch.cat(state, dim=-1)
    return states


def merge_states(
    states: Tensor, counts: Tensor, dtype: torch.dtype, sinks: Tensor | None = None
) -> Tensor:
    """Merge all states of N rows [states, heads, 2 + D], `counts` [N] per row in order of keys,
    with the sinks of their heads.
    """
    firsts = counts.cumsum(0) - counts

    def nth(rows: Tensor, number: int) -> SoftmaxState:
        return SoftmaxState(
            *states[firsts[rows] + number].split([1, 1, states.shape[2] - 2], dim=-1)
        )

    rows = torch.arange(len(counts), device=states.device)
    whole = nth(rows, 0)
    for number in range(1, int(counts.max()) if len(counts) else 0):
        rows = (counts > number).nonzero()[:, 0]
        merged = _merge(SoftmaxState(*(tensor[rows] for tensor in whole)), nth(rows, number))
        whole = SoftmaxState(
            *(tensor.index_copy(0, rows, new) for tensor, new in zip(whole, merged, strict=True))
        )
    return _finish(whole, sinks).to(dtype).flatten(1)


def _finish(whole: SoftmaxState, sinks: Tensor | None) -> Tensor:
    """Return the output [rows, heads, D] of states over all keys. Sinks [heads] are the last term
    of the sum.
    """
    if sinks is None:
        return whole.acc / whole.total
    # infinite if a sink is far above all scores: then the output is 0
    return whole.acc / (whole.total + torch.exp(sinks[:, None] - whole.highest))


def _nothing(acc: Tensor) -> SoftmaxState:
    """Return the state of rows that have seen no key."""
    return SoftmaxState(
        acc.new_full((*acc.shape[:-1], 1), -torch.inf),
        acc.new_zeros((*acc.shape[:-1], 1)),
        acc.zero_(),
    )


def _merge(before: SoftmaxState, segment: SoftmaxState) -> SoftmaxState:
    """Add a segment's state to the state before it. The first segment is taken unchanged."""
    highest = torch.maximum(before.highest, segment.highest)
    a, b = torch.exp(before.highest - highest), torch.exp(segment.highest - highest)
    first = before.highest == -torch.inf
    total, acc = (
        torch.where(first, new, old * a + new * b)
        for old, new in zip(before[1:], segment[1:], strict=True)
    )
    return SoftmaxState(highest, total, acc)


def _walk(
    q: Tensor, group: RowGroup, view: KvcacheView, layer: int, cap: float
) -> Iterator[tuple[slice, int, SoftmaxState]]:
    """Yield for each segment the rows of float32 q [rows, heads, D] that see some of it, its first
    key, and the rows' states.
    """
    num_heads, own_dim = q.shape[1:]
    q = functional.pad(q, (0, -own_dim % VECTOR))
    for first, tiles in zip(group.firsts, group.segments, strict=True):
        rows = slice(min(tile.rows.start for tile in tiles), max(tile.rows.stop for tile in tiles))
        highest, total, acc = _segment(q[rows], tiles, rows.start, view, layer, cap)
        state = SoftmaxState(highest[..., None], total[..., None], acc[..., :own_dim])
        yield (
            rows,
            first,
            SoftmaxState(*(t.transpose(0, 1).reshape(t.shape[1], num_heads, -1) for t in state)),
        )


def _segment(
    q: Tensor,
    tiles: tuple[KeyTile, ...],
    start: int,
    view: KvcacheView,
    layer: int,
    cap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute online softmax of q [rows, heads, D] over the tiles of one segment. Return highest
    scores and totals [kv heads, rows, group], and outputs [kv heads, rows, group, D].
    """
    num_rows, _, head_dim = q.shape
    highest = total = acc = q.new_empty(0)
    for index, tile in enumerate(tiles):
        # [kv heads, rows, KEY_TILE, D], D padded to whole vectors: the bits of a remainder depend
        # on the number of threads
        keys, values = (
            functional.pad(t, (0, head_dim - t.shape[-1])) for t in view.gather(layer, tile.slots)
        )
        kv_heads, n = keys.shape[:2]
        if index == 0:
            # [kv heads, rows, group, D]
            q = q.view(num_rows, kv_heads, -1, head_dim).transpose(0, 1).contiguous()
            highest = q.new_full(q.shape[:3], -torch.inf)
            total = q.new_zeros(q.shape[:3])
            acc = torch.zeros_like(q)
        per_head, rows = q.shape[2], slice(tile.rows.start - start, tile.rows.stop - start)
        flat = q[:, rows].reshape(kv_heads * n, per_head, head_dim)
        scores = torch.bmm(_several(flat), _several(keys.flatten(0, 1)).transpose(1, 2))[
            : len(flat)
        ].view(kv_heads, n, per_head, KEY_TILE)
        if cap:
            scores = capped(scores, cap)
        scores.masked_fill_(tile.outside[None, :, None, :], -torch.inf)
        new_highest = torch.maximum(highest[:, rows], scores.amax(dim=-1))
        rescale = torch.exp(highest[:, rows] - new_highest)
        weights = torch.exp(scores - new_highest[..., None])
        gained = torch.bmm(_several(weights.flatten(0, 1)), _several(values.flatten(0, 1)))[
            : len(flat)
        ].view(kv_heads, n, per_head, head_dim)
        total[:, rows] = total[:, rows] * rescale + weights.sum(dim=-1)
        acc[:, rows] = acc[:, rows] * rescale[..., None] + gained
        highest[:, rows] = new_highest
    return highest, total, acc


def _several(matrices: Tensor) -> Tensor:
    """Return at least two matrices: the product of a single matrix would be split between threads,
    which changes its bits.
    """
    return matrices.repeat(2, 1, 1) if len(matrices) == 1 else matrices
