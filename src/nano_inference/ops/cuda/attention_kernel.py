"""The kernel of paged attention: one program walks the keys of one item for the query heads of one
kv head.

The recurrence is that of online softmax (arXiv:1805.02867, arXiv:2205.14135) over tiles of keys at
fixed absolute positions. Rows of a chunk and the query heads that share a kv head lie side by side
as the lanes of one matrix. The maximum and the rescale are a lane's own. Weights are rounded to the
cache's dtype for the second product.

Why a row's bits depend on nothing but its context where `BY_SPLIT`: every split is walked from
scratch. Its maximum, sum and accumulator are merged into those of the splits before it by `_merge`,
whether they come from registers or from the workspace. A tile of keys, or a split, that a row does
not see leaves all three as they are: the rescale is 1, what is added is 0. Nothing is contracted
(`enable_fp_fusion=False`); what is meant to be fused says `tl.fma`.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from nano_inference.ops.cuda.attention_plan import FIELDS

MERGED_LANES = tl.constexpr(8)  # of a tile, merged at once
MERGE_STAGES = tl.constexpr(8)  # parts on their way meanwhile
NEVER = tl.constexpr(float("-inf"))


@triton.jit
def _walk_tile(q, keys, values, visible, highest, total, acc, scale):
    """One tile of keys. Maxima are of the bare products; `scale` holds log2(e), for exp2."""
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
    scores = tl.where(visible, scores, NEVER)
    higher = tl.maximum(highest, tl.max(scores, 1))
    origin = tl.where(higher == NEVER, 0.0, higher)  # nothing seen yet: -inf - -inf is no number
    rescale = tl.exp2((highest - origin) * scale)
    weights = tl.exp2(tl.fma(scores, scale, (-origin * scale)[:, None]))
    total = tl.fma(total, rescale, tl.sum(weights, 1))
    acc = tl.dot(weights.to(values.dtype), values, acc * rescale[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit
def _merge(highest, total, acc, next_highest, next_total, next_acc, scale):
    """What the splits before have and what the next one has, in this order. An empty one changes no
    bits.
    """
    higher = tl.maximum(highest, next_highest)
    origin = tl.where(higher == NEVER, 0.0, higher)
    old, new = tl.exp2((highest - origin) * scale), tl.exp2((next_highest - origin) * scale)
    acc = tl.fma(acc, old[:, None], next_acc * new[:, None])
    return higher, tl.fma(total, old, next_total * new), acc


@triton.jit
def _merge_parts(
    part_ptr,
    stat_ptr,
    out_ptr,
    there,
    num_parts,
    step,
    scale,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    LANES: tl.constexpr,
):
    """Some lanes of a tile whose parts, `step` lanes apart, are all in the workspace: merged in
    order of the keys.

    To take the counter has emptied the first cache, which does not see what other multiprocessors
    write; accumulators pass it by in any case.
    """
    dim = tl.arange(0, PADDED_DIM)[None, :]
    present = there[:, None] & (dim < HEAD_DIM)
    highest = tl.full([LANES], NEVER, tl.float32)
    total = tl.full([LANES], 0.0, tl.float32)
    acc = tl.full([LANES, PADDED_DIM], 0.0, tl.float32)
    for part in tl.range(0, num_parts, num_stages=MERGE_STAGES):
        at = part * step
        next_highest = tl.load(stat_ptr + at * 2, mask=there, other=NEVER, cache_modifier=".cg")
        next_total = tl.load(stat_ptr + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        next_acc = tl.load(
            part_ptr[:, None] + at * HEAD_DIM + dim, mask=present, other=0.0, cache_modifier=".cg"
        )
        highest, total, acc = _merge(highest, total, acc, next_highest, next_total, next_acc, scale)
    acc = acc / tl.where(there, total, 1.0)[:, None]
    tl.store(out_ptr[:, None] + dim, acc.to(out_ptr.dtype.element_ty), mask=present)


@triton.jit(do_not_specialize_on_alignment=["tables_ptr", "units_ptr", "count_ptr", "counters_ptr"])
def attention_kernel(  # noqa: C901 - two ways to walk, two ways to end
    q_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    tables_ptr,
    units_ptr,
    items_ptr,
    count_ptr,
    counters_ptr,
    parts_ptr,
    stats_ptr,
    head_stride,
    most_parts,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    LANES: tl.constexpr,
    KEY_TILE: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BY_SPLIT: tl.constexpr,
):
    """Grid (capacity of the items, kv heads): one item and kv head a program; programs without an
    item end at once.
    """
    if tl.program_id(0) >= tl.load(count_ptr):
        return
    item_ptr = items_ptr + tl.program_id(0).to(tl.int64) * FIELDS
    split, end_split = tl.load(item_ptr + 4).to(tl.int32), tl.load(item_ptr + 5).to(tl.int32)
    if split >= end_split:
        return  # a tile of fewer splits than others of its chunk
    head = tl.program_id(1).to(tl.int64)
    tables_ptr += tl.load(item_ptr)
    first_row = tl.load(item_ptr + 1)
    rows = tl.load(item_ptr + 2).to(tl.int32)
    position = tl.load(item_ptr + 3).to(tl.int32)
    place = tl.load(item_ptr + 6)
    part = tl.load(item_ptr + 7).to(tl.int32)
    keys_ptr += head * head_stride
    values_ptr += head * head_stride

    lane = tl.arange(0, LANES)
    row = lane // GROUP
    there = (row < rows)[:, None]
    dim = tl.arange(0, PADDED_DIM)[None, :]
    inside = dim < HEAD_DIM
    own_head = (first_row + row) * (KV_HEADS * GROUP) + head * GROUP + lane % GROUP
    q = tl.load(q_ptr + own_head[:, None] * HEAD_DIM + dim, mask=there & inside, other=0.0)
    end = position + rows  # keys below it are stored
    # the last key of each lane; those without a row see one too
    seen = tl.minimum(position + row, end - 1)[:, None]
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(position - WINDOW + 1, 0)

    highest = tl.full([LANES], NEVER, tl.float32)
    total = tl.full([LANES], 0.0, tl.float32)
    acc = tl.full([LANES, PADDED_DIM], 0.0, tl.float32)
    if BY_SPLIT:
        all_highest, all_total, all_acc = highest, total, acc
    first_tile = tl.maximum(split * SPLIT_TILES, begin // KEY_TILE)
    end_tile = tl.minimum(end_split * SPLIT_TILES, (end + KEY_TILE - 1) // KEY_TILE)
    for tile in range(first_tile, end_tile):
        key = tile * KEY_TILE + tl.arange(0, KEY_TILE)
        # what lies elsewhere may be anything, and 0 * NaN is NaN
        stored = (key < end) & (key >= begin)
        block = tl.load(tables_ptr + key // BLOCK_SIZE, mask=stored, other=0)
        if units_ptr is not None:
            block = tl.load(units_ptr + block, mask=stored, other=0)
        at = (block * BLOCK_SIZE + key % BLOCK_SIZE)[:, None] * HEAD_DIM + dim
        keys = tl.load(keys_ptr + at, mask=stored[:, None] & inside, other=0.0)
        values = tl.load(values_ptr + at, mask=stored[:, None] & inside, other=0.0)
        visible = key[None, :] <= seen
        if WINDOW > 0:
            visible &= key[None, :] > seen - WINDOW
        highest, total, acc = _walk_tile(q, keys, values, visible, highest, total, acc, scale)
        if BY_SPLIT:  # noqa: SIM102 - known when it is compiled, the other is not
            if (tile + 1) % SPLIT_TILES == 0 or tile + 1 == end_tile:
                if place >= 0:
                    done = part + tile // SPLIT_TILES - split
                    to = ((head * most_parts + place + done * rows + row) * GROUP + lane % GROUP)[
                        :, None
                    ]
                    tl.store(parts_ptr + to * HEAD_DIM + dim, acc, mask=there & inside)
                    tl.store(stats_ptr + to * 2, highest[:, None], mask=there)
                    tl.store(stats_ptr + to * 2 + 1, total[:, None], mask=there)
                else:
                    all_highest, all_total, all_acc = _merge(
                        all_highest, all_total, all_acc, highest, total, acc, scale
                    )
                highest = tl.full([LANES], NEVER, tl.float32)
                total = tl.full([LANES], 0.0, tl.float32)
                acc = tl.full([LANES, PADDED_DIM], 0.0, tl.float32)
    if BY_SPLIT:
        highest, total, acc = all_highest, all_total, all_acc

    if place < 0:
        acc = acc / tl.where(row < rows, total, 1.0)[:, None]
        tl.store(
            out_ptr + own_head[:, None] * HEAD_DIM + dim,
            acc.to(out_ptr.dtype.element_ty),
            mask=there & inside,
        )
        return
    if not BY_SPLIT:
        to = ((head * most_parts + place + part * rows + row) * GROUP + lane % GROUP)[:, None]
        tl.store(parts_ptr + to * HEAD_DIM + dim, acc, mask=there & inside)
        tl.store(stats_ptr + to * 2, highest[:, None], mask=there)
        tl.store(stats_ptr + to * 2 + 1, total[:, None], mask=there)
    # all of this program's parts are on their way before it says that it is done
    tl.debug_barrier()
    counter_ptr = counters_ptr + tl.load(item_ptr + 10) * KV_HEADS + head
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == tl.load(item_ptr + 9) - 1:
        tl.store(counter_ptr, 0)  # for the next layer
        num_parts = tl.load(item_ptr + 8).to(tl.int32)
        for first_lane in range(0, rows * GROUP, MERGED_LANES):
            merged = first_lane + tl.arange(0, MERGED_LANES)
            from_lane = (head * most_parts + place) * GROUP + merged
            to_head = (
                (first_row + merged // GROUP) * (KV_HEADS * GROUP) + head * GROUP + merged % GROUP
            )
            _merge_parts(
                parts_ptr + from_lane * HEAD_DIM,
                stats_ptr + from_lane * 2,
                out_ptr + to_head * HEAD_DIM,
                merged < rows * GROUP,
                num_parts,
                rows.to(tl.int64) * GROUP,
                scale,
                HEAD_DIM,
                PADDED_DIM,
                MERGED_LANES,
            )
