"""Distribution of paged attention over programs, decided on the device once per step, window and
shape of heads.

The host only knows the number of rows N and chunks S of a batch, because lengths may exist on the
device only (CUDA graphs). It allocates arrays and grids that suffice for any lengths, and one small
kernel writes *items*. An item is a tile of rows of one chunk, and the keys that one program walks
for it, as whole splits of `split` absolute positions.

There are one or two kinds of chunks. *Short* chunks (decode, verification) have few enough rows for
one small tile. All others are cut into large tiles. Each kind is a separate launch, because the
height of a tile is fixed in a kernel.

Several items share the keys of a tile if much of the device would otherwise be idle, or if one tile
would take much longer than all others. Each item then stores its result in a workspace, and the
last one merges all in order of the keys. The kernel finds the smallest power of
two of splits per item that keeps the extra items and the workspace within fixed bounds. It is a
power of two and not an exact share, so that one reduction evaluates all candidates. Every program
of the kernel repeats this reduction: it costs less than a second launch and needs no barrier.
(`tl.cdiv` and `tl.zeros` are avoided here, because calls of other kernels' functions are slow in
the interpreter.)
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.batches import ForwardBatch

FIELDS = tl.constexpr(16)  # numbers per item, of which eleven are used: one cache line
# candidates for the splits per item: 1, 2, 4 … and, last, all splits of a tile
SIZES = tl.constexpr(16)
CHUNKS = tl.constexpr(128)  # chunks read together


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a plan for work shared between items.

    Attributes:
        items: Most items beyond one per tile, over all tiles of one kv head.
        row_parts: Most parts of rows in the workspace.
    """

    items: int
    row_parts: int


@dataclass(frozen=True, slots=True)
class Items:
    """Work of one kind of chunks.

    Attributes:
        rows: Most rows per tile.
        capacity: Most items.
        items: int64 [capacity, FIELDS]: (0) offset of the chunk's block table, (1) first row of the
            tile in the batch, (2) number of rows, (3) position of the first row, (4, 5) first split
            and the one after the last, (6) first part of the tile in the workspace, or -1 if this
            item has all keys, (7) this item's first part, (8, 9) parts and items of the tile, (10)
            the tile's counter.
        count: int64 [1], number of items.
        counters: int32 [Bounds.items, kv heads], numbers of finished items, all 0 before and after
            a layer.
    """

    rows: int
    capacity: int
    items: Tensor
    count: Tensor
    counters: Tensor


def plan_items(
    batch: ForwardBatch,
    window: int,
    *,
    split: int,
    short: int,
    tile_rows: tuple[int, ...],
    kv_heads: int,
    bounds: Bounds,
    part_is_split: bool,
) -> list[Items]:
    """Plan the items of one or two kinds in one launch.

    Args:
        batch: Batch. Only its tensors on the device are read, and only by the device.
        window: Number of keys that a row sees. 0: all.
        split: Keys per split.
        short: Most rows of a chunk of the first kind, if there are two kinds.
        tile_rows: Most rows per tile, for each kind.
        kv_heads: Number of KV heads in the layers.
        bounds: Limits of each kind.
        part_is_split: If True, each split stores a separate part. Otherwise each item stores one.
    """
    device = batch.cu_seqlens_q.device
    num_rows, num_chunks = len(batch.positions), len(batch.seq_lens)
    # A chunk has at most one partial tile, and no tile is empty.
    most_tiles = [min(num_rows, num_rows // rows + num_chunks) for rows in tile_rows]
    if len(tile_rows) > 1:
        most_tiles[0] = min(num_rows, num_chunks)
        most_tiles[1] = min(most_tiles[1], num_rows // tile_rows[1] + num_rows // (short + 1))
    capacities = [tiles + bounds.items for tiles in most_tiles]
    items = torch.empty((sum(capacities), FIELDS.value), dtype=torch.int64, device=device)
    counts = torch.empty(len(tile_rows), dtype=torch.int64, device=device)
    counters = torch.empty(
        (len(tile_rows), bounds.items, kv_heads), dtype=torch.int32, device=device
    )
    _plan_kernel[(num_chunks, len(tile_rows))](
        batch.cu_seqlens_q,
        batch.seq_lens,
        batch.table_stride,
        batch.block_tables.stride(0),
        items,
        counts,
        counters,
        num_chunks,
        short,
        capacities[0],
        bounds.row_parts,
        KINDS=len(tile_rows),
        ROWS_0=tile_rows[0],
        ROWS_1=tile_rows[-1],
        WINDOW=window,
        SPLIT=split,
        KV_HEADS=kv_heads,
        MOST_ITEMS=bounds.items,
        PART_IS_SPLIT=part_is_split,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return [
        Items(rows, capacity, part, counts[kind : kind + 1], counters[kind])
        for kind, (rows, capacity, part) in enumerate(
            zip(tile_rows, capacities, items.split(capacities), strict=True)
        )
    ]


@triton.jit
def _measure(
    cu_ptr,
    lens_ptr,
    chunk,
    present,
    least,
    most,
    tile_rows,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Return rows, tiles and the most splits per tile of chunks, all 0 for chunks of another
    kind.
    """
    start = tl.load(cu_ptr + chunk, mask=present, other=0).to(tl.int32)
    rows = tl.load(cu_ptr + chunk + 1, mask=present, other=0).to(tl.int32) - start
    context = tl.load(lens_ptr + chunk, mask=present, other=0).to(tl.int32)
    rows = tl.where((rows >= least) & (rows <= most), rows, 0)
    splits = tl.where(rows > 0, (context + SPLIT - 1) // SPLIT, 0)
    if WINDOW > 0:
        # the keys of a tile may begin anywhere in a split
        splits = tl.minimum(splits, (tile_rows + WINDOW + SPLIT - 3) // SPLIT + 1)
    return rows, (rows + tile_rows - 1) // tile_rows, splits


@triton.jit(  # one kernel for all batches
    do_not_specialize=["stride", "num_chunks", "short", "first_capacity", "most_parts"],
    do_not_specialize_on_alignment=[
        "cu_ptr",
        "lens_ptr",
        "stride_ptr",
        "counts_ptr",
        "counters_ptr",
    ],
)
def _plan_kernel(
    cu_ptr,
    lens_ptr,
    stride_ptr,
    stride,
    items_ptr,
    counts_ptr,
    counters_ptr,
    num_chunks,
    short,
    first_capacity,
    most_parts,
    KINDS: tl.constexpr,
    ROWS_0: tl.constexpr,
    ROWS_1: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    KV_HEADS: tl.constexpr,
    MOST_ITEMS: tl.constexpr,
    PART_IS_SPLIT: tl.constexpr,
):
    """Write the items of one chunk if it is of the program's kind. Grid (chunks, kinds)."""
    own = tl.program_id(0)
    kind = tl.program_id(1)
    # Two reductions over the chunks, then the items of one.
    least = 1
    most = 2147483647
    tile_rows = ROWS_0
    if KINDS > 1:
        tile_rows = tl.where(kind == 0, ROWS_0, ROWS_1)
        least = tl.where(kind == 0, 1, short + 1)
        most = tl.where(kind == 0, short, 2147483647)

    # Number of splits per item: the first candidate that fits.
    index = tl.arange(0, SIZES)
    size = (1 << index)[None, :]
    extra = tl.full([SIZES], 0, tl.int64)
    parts = tl.full([SIZES], 0, tl.int64)
    for begin in range(0, num_chunks, CHUNKS):
        chunk = begin + tl.arange(0, CHUNKS)
        rows, tiles, splits = _measure(
            cu_ptr, lens_ptr, chunk, chunk < num_chunks, least, most, tile_rows, WINDOW, SPLIT
        )
        shares = tl.where(
            index[None, :] == SIZES - 1, 1, tl.maximum((splits[:, None] + size - 1) // size, 1)
        )
        left = tl.where(shares > 1, splits[:, None] if PART_IS_SPLIT else shares, 0)
        extra += tl.sum((tiles[:, None] * (shares - 1)).to(tl.int64), 0)
        parts += tl.sum((rows[:, None] * left).to(tl.int64), 0)
    fits = ((extra <= MOST_ITEMS) & (parts <= most_parts)) | (index == SIZES - 1)
    chosen = tl.min(tl.where(fits, index, SIZES - 1), 0)
    per_item = 1 << tl.where(chosen == SIZES - 1, 30, chosen)

    # Totals of the chunks before this one.
    first_item = tl.full([], 0, tl.int64)
    first_part = tl.full([], 0, tl.int64)
    first_counter = tl.full([], 0, tl.int64)
    for begin in range(0, own, CHUNKS):
        chunk = begin + tl.arange(0, CHUNKS)
        rows, tiles, splits = _measure(
            cu_ptr, lens_ptr, chunk, chunk < own, least, most, tile_rows, WINDOW, SPLIT
        )
        shares = tl.maximum((splits + per_item - 1) // per_item, 1)
        left = tl.where(shares > 1, splits if PART_IS_SPLIT else shares, 0)
        first_item += tl.sum((tiles * shares).to(tl.int64), 0)
        first_part += tl.sum((rows * left).to(tl.int64), 0)
        first_counter += tl.sum(tl.where(shares > 1, tiles, 0).to(tl.int64), 0)

    rows, tiles, splits = _measure(
        cu_ptr, lens_ptr, own, True, least, most, tile_rows, WINDOW, SPLIT
    )
    shares = tl.maximum((splits + per_item - 1) // per_item, 1)
    left = splits if PART_IS_SPLIT else shares
    if own == num_chunks - 1:
        tl.store(counts_ptr + kind, first_item + tiles * shares)
    table = own.to(tl.int64) * (tl.load(stride_ptr) if stride_ptr is not None else stride)
    start = tl.load(cu_ptr + own)
    context = tl.load(lens_ptr + own).to(tl.int32)
    items_ptr += (kind * first_capacity + first_item) * FIELDS
    counters_ptr += kind * MOST_ITEMS * KV_HEADS
    for begin in range(0, tiles * shares, CHUNKS):
        item = begin + tl.arange(0, CHUNKS)
        present = item < tiles * shares
        tile = tiles - 1 - item // shares  # the last rows have the most keys and start first
        share = item % shares
        row = tile * tile_rows
        count = tl.minimum(rows - row, tile_rows)
        position = context - rows + row
        lowest = 0 * position
        if WINDOW > 0:
            lowest = tl.maximum(position - WINDOW + 1, 0) // SPLIT
        end = (position + count + SPLIT - 1) // SPLIT
        # items of this tile that have work
        taking = tl.minimum((end - lowest + per_item - 1) // per_item, shares)
        low = lowest + share * per_item
        high = tl.minimum(low + per_item, end)
        counter = first_counter + tile
        out = items_ptr + item * FIELDS
        tl.store(out, table + 0 * item, mask=present)
        tl.store(out + 1, start + row, mask=present)
        tl.store(out + 2, count, mask=present)
        tl.store(out + 3, position, mask=present)
        tl.store(out + 4, low, mask=present)
        tl.store(out + 5, high, mask=present)
        tl.store(out + 6, tl.where(taking > 1, first_part + row * left, -1), mask=present)
        tl.store(out + 7, share * per_item if PART_IS_SPLIT else share, mask=present)
        tl.store(out + 8, end - lowest if PART_IS_SPLIT else taking, mask=present)
        tl.store(out + 9, taking, mask=present)
        tl.store(out + 10, counter, mask=present)
        for head in range(KV_HEADS):
            tl.store(
                counters_ptr + counter * KV_HEADS + head,
                0,
                mask=present & (share == 0) & (taking > 1),
            )
