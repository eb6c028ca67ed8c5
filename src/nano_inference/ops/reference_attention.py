"""Paged attention in plain torch: the specification. Row by row, in key tiles at fixed absolute positions.

A row's arithmetic is the recurrence of online softmax (arXiv:1805.02867) over tiles of `KEY_TILE` keys counted from
position 0, whatever chunk, batch or block the row stands in; rows are only stacked, never mixed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nano_inference.batch import ForwardBatch
from nano_inference.ops.backend import KvcacheView

KEY_TILE = 64
VECTOR = 16  # numbers
ROW_GROUP = 128  # rows walked together: bounds the memory of a long chunk


@dataclass(frozen=True, slots=True)
class KeyTile:
    """One tile of keys for the rows of a group that see some of it: neighbours, since rows stand by falling context."""

    rows: slice  # of the group
    slots: Tensor  # [rows, KEY_TILE]; a lane outside the row's context points at the row's own slot
    outside: Tensor  # bool [rows, KEY_TILE]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that are walked together."""

    rows: Tensor  # indices of rows in the batch
    tiles: tuple[KeyTile, ...]


def plan_attention(batch: ForwardBatch, block_size: int, window: int = 0) -> tuple[RowGroup, ...]:
    """Which slots each row reads, tile by tile; the same for every layer of one window."""
    contexts = batch.positions + 1
    order = torch.argsort(contexts, descending=True, stable=True)
    groups: list[RowGroup] = []
    for rows in order.split(ROW_GROUP):
        positions = batch.positions[rows]
        first = max(0, int(positions[-1]) - window + 1) // KEY_TILE * KEY_TILE if window else 0
        tiles = [
            _tile(batch, rows, start, block_size, window) for start in range(first, int(positions[0]) + 1, KEY_TILE)
        ]
        groups.append(RowGroup(rows, tuple(tile for tile in tiles if len(tile.slots))))
    return tuple(groups)


def _tile(batch: ForwardBatch, group: Tensor, start: int, block_size: int, window: int) -> KeyTile:
    positions = batch.positions[group]
    end = int((positions >= start).sum())
    begin = int((positions >= start + KEY_TILE - 1 + window).sum()) if window else 0  # these rows are past the tile
    rows, positions = group[begin:end], positions[begin:end]
    keys = torch.arange(start, start + KEY_TILE, device=rows.device)
    outside = keys[None, :] > positions[:, None]
    if window:
        outside |= keys[None, :] <= positions[:, None] - window
    blocks = (keys // block_size).clamp(max=batch.block_tables.shape[1] - 1)
    tables = batch.block_tables[batch.row_chunks[rows]]
    slots = tables[:, blocks] * block_size + keys % block_size
    # Lanes outside never touch memory of others: what lies there may be anything, and 0 * NaN is NaN.
    return KeyTile(slice(begin, end), torch.where(outside, batch.slot_mapping[rows][:, None], slots), outside)


def attention(q: Tensor, view: KvcacheView, layer: int, plan: tuple[RowGroup, ...], scale: float) -> Tensor:
    """Causal attention of q [N, heads, D] over each row's own context; returns [N, heads * D] in q's dtype."""
    num_rows, num_heads, head_dim = q.shape
    out = torch.empty((num_rows, num_heads, head_dim), dtype=q.dtype, device=q.device)
    scaled = q.float() * scale
    for group in plan:
        out[group.rows] = _walk(scaled[group.rows], group, view, layer).to(q.dtype)
    return out.view(num_rows, num_heads * head_dim)


def _walk(q: Tensor, group: RowGroup, view: KvcacheView, layer: int) -> Tensor:
    """Online softmax over the tiles of one group. float32 [rows, heads, D] -> the same shape."""
    num_rows, num_heads, own_dim = q.shape
    extra = -own_dim % VECTOR
    q = functional.pad(q, (0, extra))
    head_dim = own_dim + extra
    highest = total = acc = q.new_empty(0)
    for index, tile in enumerate(group.tiles):
        # [kv heads, rows, KEY_TILE, D], D padded to whole vectors: a remainder's bits depend on the number of threads
        keys, values = (functional.pad(t, (0, extra)) for t in view.gather(layer, tile.slots))
        kv_heads, n = keys.shape[:2]
        if index == 0:
            q = q.view(num_rows, kv_heads, -1, head_dim).transpose(0, 1).contiguous()  # [kv heads, rows, group, D]
            highest = q.new_full(q.shape[:3], -torch.inf)
            total = q.new_zeros(q.shape[:3])
            acc = torch.zeros_like(q)
        per_head, rows = q.shape[2], tile.rows
        flat = q[:, rows].reshape(kv_heads * n, per_head, head_dim)
        scores = torch.bmm(_several(flat), _several(keys.flatten(0, 1)).transpose(1, 2))[: len(flat)].view(
            kv_heads, n, per_head, KEY_TILE
        )
        scores.masked_fill_(tile.outside[None, :, None, :], -torch.inf)
        new_highest = torch.maximum(highest[:, rows], scores.amax(dim=-1))
        rescale = torch.exp(highest[:, rows] - new_highest)
        weights = torch.exp(scores - new_highest[..., None])
        gained = torch.bmm(_several(weights.flatten(0, 1)), _several(values.flatten(0, 1)))[: len(flat)].view(
            kv_heads, n, per_head, head_dim
        )
        total[:, rows] = total[:, rows] * rescale + weights.sum(dim=-1)
        acc[:, rows] = acc[:, rows] * rescale[..., None] + gained
        highest[:, rows] = new_highest
    return (acc / total[..., None]).transpose(0, 1).reshape(num_rows, num_heads, head_dim)[..., :own_dim]


def _several(matrices: Tensor) -> Tensor:
    """At least two: a product of a single matrix would be split between threads, and its bits with it."""
    return matrices.repeat(2, 1, 1) if len(matrices) == 1 else matrices
