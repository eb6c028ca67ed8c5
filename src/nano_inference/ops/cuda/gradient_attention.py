"""Attention over the rows of a micro-batch and its gradient, without atomics and without a mask in
memory (arXiv:2205.14135, arXiv:2307.08691).

A micro-batch is a tree of rows: a segment's path begins with rows of earlier segments that it
shares. Of each earlier segment, a path contains the first rows, all up to its branch.

- Forward: a program owns a tile of a segment's rows and walks the keys of its path in order. It
  keeps the logarithm of each row's sum of odds.
- Gradient of queries: a program owns the same rows, walks the same keys, and computes their odds
  again from the logarithm.
- Gradients of keys and values: a program owns a tile of a segment's rows as keys. It walks the
  segments whose paths contain them in their order, and the rows of each in order.

In the first two, tiles of keys are at fixed positions, and a row's bits depend only on its path. In
the third, sums have one order for one micro-batch.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.cuda.attention import LOG2_E, NEVER, walk_tile
from nano_inference.ops.cuda.rows import aligned
from nano_inference.ops.gradients import Attended, AttentionRule, HeadShape, PathRows, Rotated

# fields of a tile of queries: place of its path, first row, rows, first position
QUERY_FIELDS = tl.constexpr(4)
# fields of a tile of keys: first row, rows, first position, first reader, end of the readers
KEY_FIELDS = tl.constexpr(5)
# fields of a reader: first row, rows, first position, keys of the tile that it sees
READER_FIELDS = tl.constexpr(4)


class Tiles(NamedTuple):
    """Sizes of a kernel's tiles, and its launch. They depend on dtype and head_dim only.

    Attributes:
        lanes: Rows times query heads of a kv head.
        keys: Keys.
    """

    lanes: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class TreePaths:
    """Segments of a micro-batch, and the tiles of its kernels.

    Attributes:
        paths: Rows of all paths, int32 on the device.
        segments: Segments, on the host.
    """

    paths: Tensor
    segments: Sequence[PathRows]
    _made: dict[tuple[str, int], tuple[Tensor, ...]] = field(
        default_factory=dict[tuple[str, int], tuple[Tensor, ...]]
    )

    def query_tiles(self, rows: int) -> Tensor:
        """Return the tiles of at most this many queries, int32 [tiles, QUERY_FIELDS]."""
        if ("queries", rows) not in self._made:
            self._made["queries", rows] = self._placed(query_tiles(self.segments, rows))
        return self._made["queries", rows][0]

    def key_tiles(self, keys: int) -> tuple[Tensor, Tensor]:
        """Return the tiles of at most this many keys, int32 [tiles, KEY_FIELDS], and their readers,
        int32 [readers, READER_FIELDS].
        """
        if ("keys", keys) not in self._made:
            self._made["keys", keys] = self._placed(*key_tiles(self.segments, keys))
        tiles, readers = self._made["keys", keys]
        return tiles, readers

    def _placed(self, *tables: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        device = self.paths.device
        return tuple(torch.tensor(table, dtype=torch.int32).to(device) for table in tables)


def tree_paths(segments: Sequence[PathRows], device: torch.device) -> TreePaths:
    """Implement `GradientOps.paths`: only rows of paths go to the device."""
    whole = torch.cat([each.path for each in segments]).to(torch.int32)
    return TreePaths(whole.to(device), segments)


def query_tiles(segments: Sequence[PathRows], rows: int) -> list[tuple[int, ...]]:
    """Divide the rows of segments into tiles of at most `rows`, with `QUERY_FIELDS`."""
    tiles: list[tuple[int, ...]] = []
    offset, start = 0, 0
    for path, num_rows in segments:
        before = len(path) - num_rows
        tiles += [
            (offset, start + first, min(rows, num_rows - first), before + first)
            for first in range(0, num_rows, rows)
        ]
        offset, start = offset + len(path), start + num_rows
    return tiles


def key_tiles(
    segments: Sequence[PathRows], keys: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Divide the rows of segments into tiles of at most `keys`, with `KEY_FIELDS`, and list the
    readers of each tile in order, with `READER_FIELDS`.
    """
    starts = [0, *accumulate(each.num_rows for each in segments)]
    seen = _seen(segments, starts)
    tiles: list[tuple[int, ...]] = []
    readers: list[tuple[int, ...]] = []
    for index, (path, num_rows) in enumerate(segments):
        before = len(path) - num_rows
        for first in range(0, num_rows, keys):
            count, first_reader = min(keys, num_rows - first), len(readers)
            readers += [
                (starts[r], segments[r].num_rows, _before(segments[r]), min(count, some - first))
                for r, some in seen[index]
                if some > first
            ]
            tiles.append((starts[index] + first, count, before + first, first_reader, len(readers)))
    return tiles, readers


def _before(segment: PathRows) -> int:
    """Return the position of a segment's first row."""
    return len(segment.path) - segment.num_rows


def _seen(segments: Sequence[PathRows], starts: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return the readers of each segment: (segment, number of first rows on its path)."""
    seen: list[list[tuple[int, int]]] = [[] for _ in segments]
    for reader, segment in enumerate(segments):
        owners = np.searchsorted(starts, segment.path.numpy(), side="right") - 1
        for owner, count in zip(*np.unique(owners, return_counts=True), strict=True):
            seen[int(owner)].append((reader, int(count)))
    return seen


def attend(parts: Rotated, shape: HeadShape, paths: TreePaths, rule: AttentionRule) -> Attended:
    """Implement `GradientOps.attend` in one launch."""
    queries = parts.queries
    tiles = _tiles("attend", shape, queries.dtype)
    items = paths.query_tiles(tiles.lanes // shape.group)
    out = torch.empty_like(queries)
    levels = torch.empty((len(queries), shape.heads), dtype=torch.float32, device=queries.device)
    _attend_kernel[(len(items), shape.kv_heads)](
        *map(aligned, parts), rule.sinks, out, levels, items, paths.paths, *_scales(rule),
        **_constants(shape, rule, tiles),
    )  # fmt: skip
    return Attended(out, levels)


def attend_gradient(
    parts: Rotated,
    shape: HeadShape,
    paths: TreePaths,
    rule: AttentionRule,
    attended: Attended,
    d_out: Tensor,
    wants_sinks: bool,
) -> tuple[Rotated, Tensor | None]:
    """Return the gradients of `parts` as `GradientOps.attend_gradient`, and the rows whose sum is
    that of the sinks, float32 [N, heads], if it is wanted.
    """
    assert attended.levels is not None
    inputs = *map(aligned, parts), aligned(d_out), attended.levels
    gradients = Rotated(
        *(torch.empty(part.shape, dtype=torch.float32, device=d_out.device) for part in parts)
    )
    products = torch.empty_like(attended.levels)  # one for each row's output and its gradient
    tiles = _tiles("queries", shape, d_out.dtype)
    items = paths.query_tiles(tiles.lanes // shape.group)
    _query_gradient_kernel[(len(items), shape.kv_heads)](
        *inputs, attended.out, products, gradients.queries, items, paths.paths, *_scales(rule),
        rule.scale, **_constants(shape, rule, tiles),
    )  # fmt: skip
    tiles = _tiles("keys", shape, d_out.dtype)
    items, readers = paths.key_tiles(tiles.keys)
    _key_gradient_kernel[(len(items), shape.kv_heads)](
        *inputs, products, gradients.keys, gradients.values, items, readers, *_scales(rule),
        rule.scale, **_constants(shape, rule, tiles),
    )  # fmt: skip
    if not wants_sinks or rule.sinks is None:
        return gradients, None
    odds = torch.exp2(rule.sinks * math.log2(math.e) - attended.levels)
    return gradients, -odds * products


def _scales(rule: AttentionRule) -> tuple[float, float | None, float | None]:
    """Return the factor of scores (or of capped scores) as powers of 2, the cap, and the factor of
    products in the power of a tanh.
    """
    log2_e = math.log2(math.e)
    if not rule.cap:
        return log2_e * rule.scale, None, None
    return log2_e, rule.cap, 2 * log2_e * rule.scale / rule.cap


def _constants(shape: HeadShape, rule: AttentionRule, tiles: Tiles) -> dict[str, int | bool]:
    return {
        "KV_HEADS": shape.kv_heads,
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "PADDED_DIM": max(16, triton.next_power_of_2(shape.head_dim)),
        "LANES": tiles.lanes,
        "KEYS": tiles.keys,
        "WINDOW": rule.window,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        "enable_fp_fusion": False,
    }


# (kernel, padded head, float32) -> tiles
_TILES = {
    ("attend", 64, False): Tiles(64, 64, 4, 2),
    ("attend", 128, False): Tiles(64, 32, 4, 2),
    ("attend", 256, False): Tiles(64, 32, 8, 2),
    ("queries", 64, False): Tiles(64, 64, 8, 2),
    ("queries", 128, False): Tiles(64, 64, 8, 2),
    ("queries", 256, False): Tiles(32, 32, 8, 1),
    ("keys", 64, False): Tiles(64, 64, 8, 1),
    ("keys", 128, False): Tiles(32, 64, 8, 1),
    ("keys", 256, False): Tiles(32, 32, 8, 1),
    ("attend", 64, True): Tiles(16, 32, 4, 1),
    ("attend", 128, True): Tiles(16, 16, 4, 1),
    ("attend", 256, True): Tiles(16, 16, 8, 1),
    ("queries", 64, True): Tiles(16, 16, 4, 1),
    ("queries", 128, True): Tiles(16, 16, 8, 1),
    ("queries", 256, True): Tiles(16, 16, 8, 1),
    ("keys", 64, True): Tiles(16, 16, 4, 1),
    ("keys", 128, True): Tiles(16, 32, 8, 1),
    ("keys", 256, True): Tiles(16, 16, 8, 1),
}


def _tiles(kernel: str, shape: HeadShape, dtype: torch.dtype) -> Tiles:
    head = max(64, triton.next_power_of_2(shape.head_dim))
    tiles = _TILES[kernel, head, dtype == torch.float32]
    return tiles._replace(lanes=max(tiles.lanes, triton.next_power_of_2(shape.group)))


@triton.jit
def _odds(left, right, visible, level, scale, cap, slope):
    """Return the odds of keys over the sum of all of a row, 0 if invisible, and the slope of the
    cap (1 without one). Of `left` and `right`, one holds queries, the other keys.
    """
    scores = tl.dot(left, tl.trans(right), input_precision="ieee")
    steepness = 1.0
    if cap is not None:
        scores = cap - 2 * cap / (1 + tl.exp2(scores * slope))  # as in `walk_tile`
        steepness = 1 - (scores / cap) * (scores / cap)
    return tl.where(visible, tl.exp2(scores * scale - level), 0.0), steepness


@triton.jit
def _lanes_of(first_row, rows, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr):
    """Return the row of each lane in its tile, whether it exists, and its place among all heads of
    all rows, int64.
    """
    lane = tl.arange(0, LANES)
    row = lane // GROUP
    there = (row < rows) & (lane < LANES // GROUP * GROUP)
    head = tl.program_id(1).to(tl.int64) * GROUP + lane % GROUP
    return row, there, (first_row + row).to(tl.int64) * (KV_HEADS * GROUP) + head


@triton.jit
def _first_key(position, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """Return the first key of the first tile that a row at this position sees."""
    first = 0 * position
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0) // KEYS * KEYS
    return first


@triton.jit
def _keys_at(rows, KV_HEADS: tl.constexpr):
    """Return the places of this program's kv head among those of all rows, int64."""
    return rows.to(tl.int64) * KV_HEADS + tl.program_id(1)


@triton.jit
def _attend_kernel(
    q_ptr, keys_ptr, values_ptr, sinks_ptr, out_ptr, levels_ptr, items_ptr, paths_ptr,
    scale, cap, slope,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    LANES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Attend with the rows of one tile. Grid (tiles of queries, kv heads)."""
    item_ptr = items_ptr + tl.program_id(0) * QUERY_FIELDS
    paths_ptr += tl.load(item_ptr)
    first_row, rows, position = (
        tl.load(item_ptr + 1), tl.load(item_ptr + 2), tl.load(item_ptr + 3),
    )  # fmt: skip
    row, there, at = _lanes_of(first_row, rows, KV_HEADS, GROUP, LANES)
    dim = tl.arange(0, PADDED_DIM)[None, :]
    inside = dim < HEAD_DIM
    present = there[:, None] & inside
    q = tl.load(q_ptr + at[:, None] * HEAD_DIM + dim, mask=present, other=0.0)
    last = (position + tl.minimum(row, rows - 1))[:, None]
    highest = tl.full([LANES], NEVER, tl.float32)
    total = tl.full([LANES], 0.0, tl.float32)
    acc = tl.full([LANES, PADDED_DIM], 0.0, tl.float32)
    for first in range(_first_key(position, KEYS, WINDOW), position + rows, KEYS):
        key = first + tl.arange(0, KEYS)
        stored = key < position + rows
        key_at = _keys_at(tl.load(paths_ptr + key, mask=stored, other=0), KV_HEADS)
        key_at = key_at[:, None] * HEAD_DIM + dim
        keys = tl.load(keys_ptr + key_at, mask=stored[:, None] & inside, other=0.0)
        values = tl.load(values_ptr + key_at, mask=stored[:, None] & inside, other=0.0)
        visible = key[None, :] <= last
        if WINDOW > 0:
            visible &= key[None, :] > last - WINDOW
        highest, total, acc = walk_tile(
            q, keys, None, None, values, None, None, visible, highest, total, acc, scale, cap, slope
        )
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + tl.program_id(1) * GROUP + tl.arange(0, LANES) % GROUP)
        total += tl.exp2(sink * LOG2_E - highest * scale)
    acc = acc / total[:, None]
    tl.store(out_ptr + at[:, None] * HEAD_DIM + dim, acc.to(out_ptr.dtype.element_ty), mask=present)
    tl.store(levels_ptr + at, highest * scale + tl.log2(total), mask=there)


@triton.jit
def _query_gradient_kernel(
    q_ptr, keys_ptr, values_ptr, d_out_ptr, levels_ptr, out_ptr, products_ptr, d_q_ptr, items_ptr,
    paths_ptr, scale, cap, slope, factor,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    LANES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Differentiate with respect to the queries of one tile, and store the product of each output
    and its gradient. Grid (tiles of queries, kv heads).
    """
    item_ptr = items_ptr + tl.program_id(0) * QUERY_FIELDS
    paths_ptr += tl.load(item_ptr)
    first_row, rows, position = (
        tl.load(item_ptr + 1), tl.load(item_ptr + 2), tl.load(item_ptr + 3),
    )  # fmt: skip
    row, there, at = _lanes_of(first_row, rows, KV_HEADS, GROUP, LANES)
    dim = tl.arange(0, PADDED_DIM)[None, :]
    inside = dim < HEAD_DIM
    present = there[:, None] & inside
    heads = at[:, None] * HEAD_DIM + dim
    d_out = tl.load(d_out_ptr + heads, mask=present, other=0.0)
    out = tl.load(out_ptr + heads, mask=present, other=0.0)
    product = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), axis=1)
    tl.store(products_ptr + at, product, mask=there)
    q = tl.load(q_ptr + heads, mask=present, other=0.0)
    level = tl.load(levels_ptr + at, mask=there, other=0.0)[:, None]
    last = (position + tl.minimum(row, rows - 1))[:, None]
    d_q = tl.full([LANES, PADDED_DIM], 0.0, tl.float32)
    for first in range(_first_key(position, KEYS, WINDOW), position + rows, KEYS):
        key = first + tl.arange(0, KEYS)
        stored = key < position + rows
        key_at = _keys_at(tl.load(paths_ptr + key, mask=stored, other=0), KV_HEADS)
        key_at = key_at[:, None] * HEAD_DIM + dim
        keys = tl.load(keys_ptr + key_at, mask=stored[:, None] & inside, other=0.0)
        values = tl.load(values_ptr + key_at, mask=stored[:, None] & inside, other=0.0)
        visible = key[None, :] <= last
        if WINDOW > 0:
            visible &= key[None, :] > last - WINDOW
        odds, steepness = _odds(q, keys, visible, level, scale, cap, slope)
        d_odds = tl.dot(d_out, tl.trans(values), input_precision="ieee")
        d_scores = odds * (d_odds - product[:, None]) * steepness
        d_q = tl.dot(d_scores.to(keys.dtype), keys, d_q, input_precision="ieee")
    tl.store(d_q_ptr + heads, d_q * factor, mask=present)


@triton.jit
def _key_gradient_kernel(
    q_ptr, keys_ptr, values_ptr, d_out_ptr, levels_ptr, products_ptr, d_keys_ptr, d_values_ptr,
    items_ptr, readers_ptr, scale, cap, slope, factor,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    LANES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Differentiate with respect to the keys and values of one tile. Grid (tiles of keys, kv
    heads).
    """
    item_ptr = items_ptr + tl.program_id(0) * KEY_FIELDS
    first_key, num_keys, position = (
        tl.load(item_ptr), tl.load(item_ptr + 1), tl.load(item_ptr + 2),
    )  # fmt: skip
    dim = tl.arange(0, PADDED_DIM)[None, :]
    inside = dim < HEAD_DIM
    key = tl.arange(0, KEYS)
    stored = (key < num_keys)[:, None] & inside
    key_at = _keys_at(first_key + key, KV_HEADS)[:, None] * HEAD_DIM + dim
    keys = tl.load(keys_ptr + key_at, mask=stored, other=0.0)
    values = tl.load(values_ptr + key_at, mask=stored, other=0.0)
    d_keys = tl.full([KEYS, PADDED_DIM], 0.0, tl.float32)
    d_values = tl.full([KEYS, PADDED_DIM], 0.0, tl.float32)
    ROWS: tl.constexpr = LANES // GROUP
    for reader in range(tl.load(item_ptr + 3), tl.load(item_ptr + 4)):
        reader_ptr = readers_ptr + reader * READER_FIELDS
        start, num_rows, start_position, seen = (
            tl.load(reader_ptr), tl.load(reader_ptr + 1), tl.load(reader_ptr + 2),
            tl.load(reader_ptr + 3),
        )  # fmt: skip
        begin = tl.maximum(position - start_position, 0)
        end = num_rows
        if WINDOW > 0:
            end = tl.minimum(end, position + seen - 1 + WINDOW - start_position)
        for first in range(begin, end, ROWS):
            row, there, at = _lanes_of(start + first, end - first, KV_HEADS, GROUP, LANES)
            heads = at[:, None] * HEAD_DIM + dim
            present = there[:, None] & inside
            q = tl.load(q_ptr + heads, mask=present, other=0.0)
            d_out = tl.load(d_out_ptr + heads, mask=present, other=0.0)
            level = tl.load(levels_ptr + at, mask=there, other=0.0)[None, :]
            product = tl.load(products_ptr + at, mask=there, other=0.0)[None, :]
            last = (start_position + first + row)[None, :]
            places = (position + key)[:, None]
            visible = (key < seen)[:, None] & (places <= last) & there[None, :]
            if WINDOW > 0:
                visible &= places > last - WINDOW
            odds, steepness = _odds(keys, q, visible, level, scale, cap, slope)
            d_values = tl.dot(odds.to(d_out.dtype), d_out, d_values, input_precision="ieee")
            d_odds = tl.dot(values, tl.trans(d_out), input_precision="ieee")
            d_scores = odds * (d_odds - product) * steepness
            d_keys = tl.dot(d_scores.to(q.dtype), q, d_keys, input_precision="ieee")
    tl.store(d_keys_ptr + key_at, d_keys * factor, mask=stored)
    tl.store(d_values_ptr + key_at, d_values, mask=stored)
