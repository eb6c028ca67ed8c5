"""Paged attention for any mix of chunk lengths: launches and the kernel.

One program of the kernel walks the keys of one item for the query heads of one kv head.

The recurrence is online softmax (arXiv:1805.02867, arXiv:2205.14135) over tiles of keys at fixed
absolute positions. The rows of a chunk and the query heads that share a kv head are the lanes of
one matrix. Each lane has its own maximum and rescale. Weights are rounded to the cache's dtype for
the second product.

With `BY_SPLIT`, a row's bits depend only on its context, because every split is walked from
scratch. Its maximum, sum and accumulator are merged into those of earlier splits by `_merge`, from
registers as well as from the workspace. A tile of keys, or a split, that a row does not see leaves
all three unchanged: the rescale is 1, and 0 is added. No operation is contracted
(`enable_fp_fusion=False`); intended fusion is written as `tl.fma`.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

import math
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.cuda.attention_plan import FIELDS, Bounds, Items, plan_items
from nano_inference.ops.cuda.codes import PLAIN, capability_of, decoded, kind_of, scale_of
from nano_inference.ops.cuda.matmul import shared_memory
from nano_inference.ops.cuda.rows import overlapping, scales_within
from nano_inference.ops.interface import AttentionArgs, KvcacheView

KEY_TILE = 64  # keys per step of the recurrence
SPLIT = 256  # keys whose sum may be computed separately
SHORT_LANES = 16  # minimum of tensor cores
# most programs that share keys: more than run simultaneously, for the sake of balance
PROGRAMS_A_PROCESSOR = 4
# most bytes that a program uses in addition to its tiles of keys and values
OTHER_SHARED = 34 * 1024
ROW_PARTS = 2048  # most parts of rows whose keys are shared: 34 MB with 32 heads of 128


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch parameters of a kernel for one kind of chunks. They depend on dtype and head_dim,
    never on the rows.

    Attributes:
        lanes: Rows times query heads of a kv head, per tile.
        num_warps, num_stages: Warps and pipeline stages per program.
    """

    lanes: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Work:
    """Items of one kind, and the parameters and workspace of their kernel. One layer uses the
    workspace at a time.
    """

    items: Items
    tiling: Launch
    parts: Tensor  # float32 [kv heads, most parts of rows, group, D]
    stats: Tensor  # float32 [kv heads, most parts of rows, group, 2]: maximum and sum


@dataclass(slots=True)
class Plan:
    """Attention of one step and window. The first layer, which knows the heads, creates the
    items.
    """

    batch: ForwardBatch
    block_size: int
    window: int
    work: dict[tuple[int, int, int, torch.dtype, bool, bool], list[Work]] = field(
        default_factory=dict
    )


class Attention:
    """Attention of one backend, with or without batch invariance.

    Args:
        batch_invariant: If True, a row has the same bits in every batch: decode and prefill share
            one tiling, and each split is walked from scratch. Otherwise decode has small tiles, and
            only shared keys are walked in parts.
        key_tile, split, row_parts: Other sizes, for tests. A split is a whole number of tiles.
        shared_items: Most items beyond one per tile, for a kv head. None: derived from the device.
        architecture: Architecture of the GPU, 80 for 8.x. None: that of the tensors' device.
        overlaps: If True, each kernel starts while its predecessor runs (sm_90 and later).
    """

    def __init__(
        self,
        *,
        batch_invariant: bool,
        key_tile: int = KEY_TILE,
        split: int = SPLIT,
        row_parts: int = ROW_PARTS,
        shared_items: int | None = None,
        architecture: int | None = None,
        overlaps: bool = False,
    ) -> None:
        self.batch_invariant = batch_invariant
        self._key_tile, self._split, self._row_parts, self._shared_items = (
            key_tile,
            split,
            row_parts,
            shared_items,
        )
        self._architecture = architecture
        self._overlaps = overlaps

    def plan(self, batch: ForwardBatch, block_size: int, window: int = 0) -> Plan:
        """Implement `Ops.plan_attention`. It does not wait for the device, and can be captured in a
        graph.
        """
        return Plan(batch, block_size, window)

    def attend(
        self,
        q: Tensor,
        view: KvcacheView,
        layer: int,
        plan: Plan,
        scores: AttentionArgs,
    ) -> Tensor:
        """Implement `Ops.attention`. Rows beyond `cu_seqlens_q[-1]` are padding, with undefined
        results.
        """
        scale, sinks, cap = scores
        num_rows, num_heads, head_dim = q.shape
        unit, index = view.places[layer]
        # [kv heads, units, block_size, row width]
        keys, values = view.keys[index], view.values[index]
        kv_heads, coded = keys.shape[0], view.format.coded
        out = q.new_empty((num_rows, num_heads * head_dim))
        unit_map = view.unit_map
        shape = (kv_heads, num_heads // kv_heads, head_dim, q.dtype, coded, unit_map is not None)
        if shape not in plan.work:
            plan.work[shape] = self._work(plan, *shape, q.device)
        units = unit_map.units()[unit] if unit_map is not None else None
        for work in plan.work[shape]:
            attention_kernel[(work.items.capacity, kv_heads)](
                q.contiguous(),
                keys,
                values,
                scales_within(keys, view),
                scales_within(values, view),
                sinks,
                out,
                plan.batch.block_tables,
                units,
                work.items.items,
                work.items.count,
                work.items.counters,
                work.parts,
                work.stats,
                keys.stride(0),
                self._row_parts,
                math.log2(math.e) * (1.0 if cap else scale),
                cap or None,
                2 * math.log2(math.e) * scale / cap if cap else None,
                KV_HEADS=kv_heads,
                GROUP=num_heads // kv_heads,
                HEAD_DIM=head_dim,
                PADDED_DIM=max(16, triton.next_power_of_2(head_dim)),
                LANES=work.tiling.lanes,
                KEY_TILE=self._key_tile,
                SPLIT_TILES=self._split // self._key_tile,
                BLOCK_SIZE=plan.block_size,
                WINDOW=plan.window,
                BY_SPLIT=self.batch_invariant,
                OVERLAPS=self._overlaps,
                CODES=kind_of(view.format.codes, self._capability(q.device)),
                num_warps=work.tiling.num_warps,
                num_stages=work.tiling.num_stages,
                enable_fp_fusion=False,
                **overlapping(self._overlaps),
            )
        return out

    def _work(
        self,
        plan: Plan,
        kv_heads: int,
        group: int,
        head_dim: int,
        dtype: torch.dtype,
        coded: bool,
        indirect: bool,
        device: torch.device,
    ) -> list[Work]:
        batch = plan.batch
        single_rows = len(batch.positions) == len(batch.seq_lens)
        tilings = self._tilings(
            group, head_dim, dtype, device, coded=coded, indirect=indirect, single_rows=single_rows
        )
        shared = self._shared_items
        if shared is None:
            processors = (
                torch.cuda.get_device_properties(device).multi_processor_count
                if device.type == "cuda"
                else 2
            )
            shared = triton.cdiv(PROGRAMS_A_PROCESSOR * processors, kv_heads)
        kinds = plan_items(
            batch,
            plan.window,
            split=self._split,
            short=tilings[0].lanes // group,
            tile_rows=tuple(tiling.lanes // group for tiling in tilings),
            kv_heads=kv_heads,
            bounds=Bounds(shared, self._row_parts),
            part_is_split=self.batch_invariant,
        )
        # one workspace for both kinds, which run one after the other
        lanes = (kv_heads, self._row_parts, group)
        parts = torch.empty((*lanes, head_dim), dtype=torch.float32, device=device)
        stats = torch.empty((*lanes, 2), dtype=torch.float32, device=device)
        return [
            Work(items, tiling, parts, stats) for items, tiling in zip(kinds, tilings, strict=True)
        ]

    def _tilings(
        self,
        group: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        coded: bool = False,
        indirect: bool,
        single_rows: bool,
    ) -> list[Launch]:
        """Return the launch parameters of short chunks and of others, or a single one for all.

        Tall tiles use the larger matrix instructions of sm_90, whose bits differ from those of
        small tiles. With `batch_invariant`, all chunks therefore have tiles of a medium height: a
        decode row still waits for memory and not for products, and prefill is slower.
        """
        least = triton.next_power_of_2(group)  # a row's heads are in one tile
        if dtype == torch.float32:  # no tensor cores: for comparisons, not for speed
            return [Launch(max(SHORT_LANES, least), 4, _stages(1, indirect=indirect))]
        buffer = 2 * self._key_tile * triton.next_power_of_2(head_dim) * dtype.itemsize
        # head_dim 256 on a consumer GPU
        two = 2 if 2 * buffer + OTHER_SHARED <= shared_memory(device) else 1
        if self.batch_invariant:
            # codes take registers until they are decoded
            num_warps = 4 if head_dim <= 128 and not coded else 8
            return [Launch(max(32, least), num_warps, _stages(two, indirect=indirect))]
        short = Launch(
            max(SHORT_LANES, least), 4, _stages(two if head_dim > 64 else 3, indirect=indirect)
        )
        if single_rows:
            return [short]
        # products of sm_90 are asynchronous, and Triton adds a buffer for them
        if self._capability(device) == 90:
            return [
                short,
                Launch(max(64, least), 4 if head_dim <= 128 else 8, _stages(1, indirect=indirect)),
            ]
        tall = 64 if two == 2 else 32
        return [
            short,
            Launch(max(tall, least), 8, _stages(2 if head_dim <= 128 else 1, indirect=indirect)),
        ]

    def _capability(self, device: torch.device) -> int:
        """Return ten times the major number of the compute capability."""
        if self._architecture is not None:
            return self._architecture
        return capability_of(device)


def _stages(buffers: int, *, indirect: bool) -> int:
    """Return the stages that give this many tiles of keys and values in shared memory, all but one
    of them in flight.

    Triton also divides its stages between the loads that another load waits for: the block table,
    and the map of units.
    """
    return 3 + (buffers - 1) * (3 if indirect else 2)


MERGED_LANES = tl.constexpr(8)  # lanes of a tile merged together
MERGE_STAGES = tl.constexpr(8)  # parts in flight during a merge
NEVER = tl.constexpr(float("-inf"))
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _walk_tile(
    q, keys, values, key_scales, value_scales, visible, highest, total, acc, scale, cap, slope
):
    """Process one tile of keys. Maxima are of the unscaled products, or of capped scores. `scale`
    includes log2(e), for exp2. Codes are multiplied as they are: scales of keys are factors of
    scores, and those of values of weights.
    """
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
    if key_scales is not None:
        scores = scores * key_scales[None, :]
    if cap is not None:
        # cap * tanh(scaled scores / cap); an infinite power gives the cap
        scores = cap - 2 * cap / (1 + tl.exp2(scores * slope))
    scores = tl.where(visible, scores, NEVER)
    higher = tl.maximum(highest, tl.max(scores, 1))
    origin = tl.where(higher == NEVER, 0.0, higher)  # nothing seen yet: -inf - -inf is NaN
    rescale = tl.exp2((highest - origin) * scale)
    weights = tl.exp2(tl.fma(scores, scale, (-origin * scale)[:, None]))
    total = tl.fma(total, rescale, tl.sum(weights, 1))
    if value_scales is not None:
        weights = weights * value_scales[None, :]
    acc = tl.dot(weights.to(values.dtype), values, acc * rescale[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit
def _merge(highest, total, acc, next_highest, next_total, next_acc, scale):
    """Merge the state of earlier splits and the state of the next one, in this order. An empty one
    changes no bits.
    """
    higher = tl.maximum(highest, next_highest)
    origin = tl.where(higher == NEVER, 0.0, higher)
    old, new = tl.exp2((highest - origin) * scale), tl.exp2((next_highest - origin) * scale)
    acc = tl.fma(acc, old[:, None], next_acc * new[:, None])
    return higher, tl.fma(total, old, next_total * new), acc


@triton.jit
def _finish(highest, total, acc, sink, scale):
    """Return the output. The sum's last term is the sink's, whose score is not scaled. The term is
    infinite if the sink is far above all scores: then the output is 0.
    """
    return acc / (total + tl.exp2(sink * LOG2_E - highest * scale))[:, None]


@triton.jit
def _merge_parts(
    part_ptr,
    stat_ptr,
    sink_ptr,
    out_ptr,
    there,
    num_parts,
    step,
    scale,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    LANES: tl.constexpr,
):
    """Merge some lanes of a tile, part by part in order of the keys. All parts are in the
    workspace, `step` lanes apart.

    The atomic operation on the counter has invalidated the L1 cache, which does not see writes of
    other multiprocessors. Loads of parts bypass it in any case.
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
    if sink_ptr is not None:
        acc = _finish(highest, total, acc, tl.load(sink_ptr), scale)
    else:
        acc = acc / tl.where(there, total, 1.0)[:, None]
    tl.store(out_ptr[:, None] + dim, acc.to(out_ptr.dtype.element_ty), mask=present)


@triton.jit(
    do_not_specialize_on_alignment=[
        *("tables_ptr", "units_ptr", "sinks_ptr", "count_ptr", "counters_ptr")
    ]
)
def attention_kernel(  # noqa: C901 - two ways to walk, two ways to end
    q_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    sinks_ptr,
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
    cap,
    slope,
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
    OVERLAPS: tl.constexpr,
    CODES: tl.constexpr,
):
    """Process one item and kv head per program. Grid (capacity of the items, kv heads). Programs
    without an item end immediately.
    """
    if OVERLAPS:  # programs without an item wait too: the end of this kernel tells of all before it
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if tl.program_id(0) >= tl.load(count_ptr):
        return
    item_ptr = items_ptr + tl.program_id(0).to(tl.int64) * FIELDS
    split, end_split = tl.load(item_ptr + 4).to(tl.int32), tl.load(item_ptr + 5).to(tl.int32)
    if split >= end_split:
        return  # a tile with fewer splits than others of its chunk
    head = tl.program_id(1).to(tl.int64)
    tables_ptr += tl.load(item_ptr)
    first_row = tl.load(item_ptr + 1)
    rows = tl.load(item_ptr + 2).to(tl.int32)
    position = tl.load(item_ptr + 3).to(tl.int32)
    place = tl.load(item_ptr + 6)
    part = tl.load(item_ptr + 7).to(tl.int32)
    keys_ptr += head * head_stride
    values_ptr += head * head_stride
    if CODES != PLAIN:
        key_scales_ptr += head * (head_stride // 4)
        value_scales_ptr += head * (head_stride // 4)

    lane = tl.arange(0, LANES)
    row = lane // GROUP
    there = (row < rows)[:, None]
    dim = tl.arange(0, PADDED_DIM)[None, :]
    inside = dim < HEAD_DIM
    own_head = (first_row + row) * (KV_HEADS * GROUP) + head * GROUP + lane % GROUP
    q = tl.load(q_ptr + own_head[:, None] * HEAD_DIM + dim, mask=there & inside, other=0.0)
    end = position + rows  # keys below it are stored
    # last key of each lane (lanes without a row see one too)
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
        # other memory may contain anything, and 0 * NaN is NaN
        stored = (key < end) & (key >= begin)
        block = tl.load(tables_ptr + key // BLOCK_SIZE, mask=stored, other=0)
        if units_ptr is not None:
            block = tl.load(units_ptr + block, mask=stored, other=0)
        if CODES == PLAIN:
            at = (block * BLOCK_SIZE + key % BLOCK_SIZE)[:, None] * HEAD_DIM + dim
            keys = tl.load(keys_ptr + at, mask=stored[:, None] & inside, other=0.0)
            values = tl.load(values_ptr + at, mask=stored[:, None] & inside, other=0.0)
            key_scales, value_scales = None, None
        else:
            # a block of a head: the codes of its tokens, then their scales
            first = block * (BLOCK_SIZE * (HEAD_DIM + 4))
            at = (first + key % BLOCK_SIZE * HEAD_DIM)[:, None] + dim
            keys = tl.load(keys_ptr + at, mask=stored[:, None] & inside, other=0)
            values = tl.load(values_ptr + at, mask=stored[:, None] & inside, other=0)
            keys, values = decoded(keys, q.dtype, CODES), decoded(values, q.dtype, CODES)
            place_of = (first + BLOCK_SIZE * HEAD_DIM) // 4 + key % BLOCK_SIZE
            key_scales = scale_of(tl.load(key_scales_ptr + place_of, mask=stored, other=0.0), CODES)
            value_scales = scale_of(
                tl.load(value_scales_ptr + place_of, mask=stored, other=0.0), CODES
            )
        visible = key[None, :] <= seen
        if WINDOW > 0:
            visible &= key[None, :] > seen - WINDOW
        highest, total, acc = _walk_tile(
            q,
            keys,
            values,
            key_scales,
            value_scales,
            visible,
            highest,
            total,
            acc,
            scale,
            cap,
            slope,
        )
        if BY_SPLIT:  # noqa: SIM102 - a compile-time condition, unlike the next one
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
        if sinks_ptr is not None:
            # computed again, since keeping `head` and `lane` would occupy registers
            at = tl.program_id(1) * GROUP + tl.arange(0, LANES) % GROUP
            acc = _finish(highest, total, acc, tl.load(sinks_ptr + at), scale)
        else:
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
    # all of this program's parts are written before it counts itself as done
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
                None
                if sinks_ptr is None
                else sinks_ptr + tl.program_id(1) * GROUP + merged % GROUP,
                out_ptr + to_head * HEAD_DIM,
                merged < rows * GROUP,
                num_parts,
                rows.to(tl.int64) * GROUP,
                scale,
                HEAD_DIM,
                PADDED_DIM,
                MERGED_LANES,
            )
