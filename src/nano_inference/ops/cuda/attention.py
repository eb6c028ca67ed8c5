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
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.cuda.attention_plan import FIELDS, Bounds, Items, plan_items
from nano_inference.ops.cuda.codes import PLAIN, capability_of, decoded, kind_of, scale_of
from nano_inference.ops.cuda.matmul import shared_memory
from nano_inference.ops.cuda.rows import overlapping, scales_within, units_of
from nano_inference.ops.interface import AttentionArgs, KvcacheView

KEY_TILE = 64  # keys per step of the recurrence
WIDE_KEY_TILE = 32  # the same for wide heads
SPLIT = 256  # keys whose sum may be computed separately
SHORT_LANES = 16  # minimum of tensor cores
WIDE_LANES = 32  # lanes of a tile then; half of them if splits are walked from scratch
# most programs that share keys: more than run simultaneously, for the sake of balance
PROGRAMS_A_PROCESSOR = 4
# most bytes that a program uses in addition to its tiles of keys and values
OTHER_SHARED, WIDE_SHARED = 34 * 1024, 50 * 1024  # the second for wide heads
ROW_PARTS = 2048  # most parts of rows whose keys are shared: 34 MB with 32 heads of 128
WORKSPACE = 128 * 1024 * 1024  # most bytes of these parts


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


class HeadShape(NamedTuple):
    """Heads of a layer, as far as plan and kernels depend on them.

    Attributes:
        tiles: Tiles of query heads: one for each KV head, or several that share the latents.
        group: Query heads of a tile.
        width: Numbers per query, and per key in the cache.
        unread: First numbers of a key that belong to no value (`AttentionArgs.unread`). More than
            0: values are the rest of the keys.
        dtype: Dtype of queries and results.
        coded: True if keys and values are codes.
        indirect: True if a map gives the units of blocks.
    """

    tiles: int
    group: int
    width: int
    unread: int
    dtype: torch.dtype
    coded: bool = False
    indirect: bool = False

    @property
    def value(self) -> int:
        """Numbers per value and result."""
        return self.width - self.unread

    def key_bytes(self, key_tile: int) -> int:
        """Return the bytes of a tile of keys and values in shared memory."""
        unread = triton.next_power_of_2(self.unread) if self.unread else 0
        value = triton.next_power_of_2(self.value)
        numbers = value + unread if self.unread else 2 * value
        return key_tile * numbers * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Work:
    """Items of one kind, and the parameters and workspace of their kernel. One layer uses the
    workspace at a time.
    """

    items: Items
    tiling: Launch
    parts: Tensor  # float32 [tiles of heads, most parts of rows, group, numbers of a value]
    stats: Tensor  # float32 [tiles of heads, most parts of rows, group, 2]: maximum and sum

    @property
    def row_parts(self) -> int:
        """Most parts of rows in the workspace."""
        return self.parts.shape[1]


@dataclass(slots=True)
class Plan:
    """Attention of one step and window. The first layer, which knows the heads, creates the
    items.
    """

    batch: ForwardBatch
    block_size: int
    window: int
    work: dict[HeadShape, list[Work]] = field(default_factory=dict)


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
        scale, sinks, cap, _ = scores
        num_rows, num_heads, head_dim = q.shape
        keys, values = view.lie(layer)  # [kv heads, units, block_size, row width]
        out = q.new_empty((num_rows, num_heads * head_dim))
        shape = _shape_of(q, view, len(keys), scores, self._wide_lanes(q.dtype))
        if shape not in plan.work:
            plan.work[shape] = self._work(plan, shape, q.device)
        key_tile = self._key_tile_of(shape, q.device)
        for work in plan.work[shape]:
            capacity = work.items.capacity
            attention_kernel[
                (capacity * shape.tiles,) if shape.unread else (capacity, shape.tiles)
            ](
                q.contiguous(),
                keys,
                values,
                scales_within(keys, view),
                scales_within(values, view),
                sinks,
                out,
                plan.batch.block_tables,
                units_of(view, layer),
                work.items.items,
                work.items.count,
                work.items.counters,
                work.parts,
                work.stats,
                keys.stride(0) if len(keys) == shape.tiles else 0,
                work.row_parts,
                math.log2(math.e) * (1.0 if cap else scale),
                cap or None,
                2 * math.log2(math.e) * scale / cap if cap else None,
                TILES=shape.tiles,
                GROUP=shape.group,
                HEAD_DIM=head_dim,
                UNREAD=shape.unread,
                PADDED_UNREAD=max(16, triton.next_power_of_2(shape.unread)),
                PADDED_DIM=max(16, triton.next_power_of_2(shape.value)),
                LANES=work.tiling.lanes,
                KEY_TILE=key_tile,
                SPLIT_TILES=self._split // key_tile,
                BLOCK_SIZE=plan.block_size,
                BLOCK_STRIDE=keys.stride(1),
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

    def _wide_lanes(self, dtype: torch.dtype) -> int:
        """Return the lanes of a tile of wide heads. More would spill registers, which hold two
        results of each lane with batch invariance.
        """
        few = self.batch_invariant or dtype == torch.float32
        return WIDE_LANES // 2 if few else WIDE_LANES

    def _key_tile_of(self, shape: HeadShape, device: torch.device) -> int:
        """Return the keys per step of the recurrence, which depend on the heads and the card."""
        is_float32 = shape.dtype == torch.float32
        # larger tiles of keys spill registers, except with the tiles of rows of batch invariance
        most = 256 if self.batch_invariant or is_float32 else 128
        if shape.value <= most:
            return self._key_tile
        tile = min(self._key_tile, SHORT_LANES if is_float32 else WIDE_KEY_TILE)
        fits = shape.key_bytes(tile) + WIDE_SHARED <= shared_memory(device)
        return tile if fits else max(tile // 2, SHORT_LANES)

    def _work(self, plan: Plan, shape: HeadShape, device: torch.device) -> list[Work]:
        batch = plan.batch
        single_rows = len(batch.positions) == len(batch.seq_lens)
        tilings = self._tilings(shape, device, single_rows=single_rows)
        shared = self._shared_items
        if shared is None:
            processors = (
                torch.cuda.get_device_properties(device).multi_processor_count
                if device.type == "cuda"
                else 2
            )
            shared = triton.cdiv(PROGRAMS_A_PROCESSOR * processors, shape.tiles)
        a_row = shape.tiles * shape.group * shape.value * torch.float32.itemsize
        row_parts = max(1, min(self._row_parts, WORKSPACE // a_row))
        kinds = plan_items(
            batch,
            plan.window,
            split=self._split,
            short=tilings[0].lanes // shape.group,
            tile_rows=tuple(tiling.lanes // shape.group for tiling in tilings),
            kv_heads=shape.tiles,
            bounds=Bounds(shared, row_parts),
            part_is_split=self.batch_invariant,
        )
        # one workspace for both kinds, which run one after the other
        lanes = (shape.tiles, row_parts, shape.group)
        parts = torch.empty((*lanes, shape.value), dtype=torch.float32, device=device)
        stats = torch.empty((*lanes, 2), dtype=torch.float32, device=device)
        return [
            Work(items, tiling, parts, stats) for items, tiling in zip(kinds, tilings, strict=True)
        ]

    def _tilings(
        self, shape: HeadShape, device: torch.device, *, single_rows: bool
    ) -> list[Launch]:
        """Return the launch parameters of short chunks and of others, or a single one for all.

        Tall tiles use the larger matrix instructions of sm_90, whose bits differ from those of
        small tiles. With `batch_invariant`, all chunks therefore have tiles of a medium height: a
        decode row still waits for memory and not for products, and prefill is slower.
        """
        head_dim, indirect = shape.value, shape.indirect
        least = triton.next_power_of_2(shape.group)  # a row's heads are in one tile
        if shape.dtype == torch.float32:  # no tensor cores: for comparisons, not for speed
            num_warps = 16 if head_dim > 256 else 4
            return [Launch(max(SHORT_LANES, least), num_warps, _stages(1, indirect=indirect))]
        buffer = shape.key_bytes(self._key_tile_of(shape, device))
        # head_dim 256 on a consumer GPU
        two = 2 if 2 * buffer + OTHER_SHARED <= shared_memory(device) else 1
        if head_dim > 256:
            lanes = max(self._wide_lanes(shape.dtype), least)
            return [Launch(lanes, 8, _stages(two, indirect=indirect))]
        if self.batch_invariant:
            # codes take registers until they are decoded
            num_warps = 4 if head_dim <= 128 and not shape.coded else 8
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


def _shape_of(
    q: Tensor, view: KvcacheView, kv_heads: int, scores: AttentionArgs, most: int
) -> HeadShape:
    """Return the shape of a layer's heads. If all heads share one key that is also the value, they
    are cut into equal tiles of at most `most` heads.
    """
    num_heads, head_dim = q.shape[1:]
    unread, tiles = (scores.unread, kv_heads) if view.values is view.keys else (0, kv_heads)
    if unread:
        tiles = next(
            count for count in range(1, num_heads + 1)
            if num_heads % count == 0 and num_heads // count <= most
        )  # fmt: skip
    indirect = view.unit_map is not None
    group, coded = num_heads // tiles, view.format.coded
    return HeadShape(tiles, group, head_dim, unread, q.dtype, coded, indirect)


def _stages(buffers: int, *, indirect: bool) -> int:
    """Return the stages that give this many tiles of keys and values in shared memory, all but one
    of them in flight.

    Triton also divides its stages between the loads that another load waits for: the block table,
    and the map of units.
    """
    return 3 + (buffers - 1) * (3 if indirect else 2)


MERGE_STAGES = tl.constexpr(8)  # parts in flight during a merge
NEVER = tl.constexpr(float("-inf"))
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def walk_tile(
    q, keys, other_q, other_keys, values, key_scales, value_scales, visible, highest, total, acc,
    scale, cap, slope,
):  # fmt: skip
    """Process one tile of keys. Maxima are of the unscaled products, or of capped scores. `scale`
    includes log2(e), for exp2. Codes are multiplied as they are: scales of keys are factors of
    scores, and those of values of weights. Products of numbers that belong to no value, the other
    ones, are added first.
    """
    if other_q is not None:
        scores = tl.dot(other_q, tl.trans(other_keys), input_precision="ieee")
        scores = tl.dot(q, tl.trans(keys), scores, input_precision="ieee")
    else:
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
    VALUE_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    LANES: tl.constexpr,
):
    """Merge some lanes of a tile, part by part in order of the keys. All parts are in the
    workspace, `step` lanes apart.

    The atomic operation on the counter has invalidated the L1 cache, which does not see writes of
    other multiprocessors. Loads of parts bypass it in any case.
    """
    dim = tl.arange(0, PADDED_DIM)[None, :]
    present = there[:, None] & (dim < VALUE_DIM)
    highest = tl.full([LANES], NEVER, tl.float32)
    total = tl.full([LANES], 0.0, tl.float32)
    acc = tl.full([LANES, PADDED_DIM], 0.0, tl.float32)
    for part in tl.range(0, num_parts, num_stages=MERGE_STAGES):
        at = part * step
        next_highest = tl.load(stat_ptr + at * 2, mask=there, other=NEVER, cache_modifier=".cg")
        next_total = tl.load(stat_ptr + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        next_acc = tl.load(
            part_ptr[:, None] + at * VALUE_DIM + dim, mask=present, other=0.0, cache_modifier=".cg"
        )
        highest, total, acc = _merge(highest, total, acc, next_highest, next_total, next_acc, scale)
    if sink_ptr is not None:
        acc = _finish(highest, total, acc, tl.load(sink_ptr), scale)
    else:
        acc = acc / tl.where(there, total, 1.0)[:, None]
    tl.store(out_ptr[:, None] + dim, acc.to(out_ptr.dtype.element_ty), mask=present)


@triton.jit
def _tile_of_heads(TILES: tl.constexpr, UNREAD: tl.constexpr):
    """Return the program's tile of heads."""
    return tl.program_id(0) % TILES if UNREAD > 0 else tl.program_id(1)


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
    TILES: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    UNREAD: tl.constexpr,
    PADDED_UNREAD: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    LANES: tl.constexpr,
    KEY_TILE: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    BY_SPLIT: tl.constexpr,
    OVERLAPS: tl.constexpr,
    CODES: tl.constexpr,
):
    """Process one item and tile of heads per program. Grid (capacity of the items, tiles of heads).
    Programs without an item end immediately. If values are the keys without their first UNREAD
    numbers, the tiles read the same keys: they are neighbors in a grid of one dimension.
    """
    if OVERLAPS:  # programs without an item wait too: the end of this kernel tells of all before it
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    item = tl.program_id(0) // TILES if UNREAD > 0 else tl.program_id(0)
    if item >= tl.load(count_ptr):
        return
    item_ptr = items_ptr + item.to(tl.int64) * FIELDS
    split, end_split = tl.load(item_ptr + 4).to(tl.int32), tl.load(item_ptr + 5).to(tl.int32)
    if split >= end_split:
        return  # a tile with fewer splits than others of its chunk
    head = _tile_of_heads(TILES, UNREAD).to(tl.int64)
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
    VALUE_DIM: tl.constexpr = HEAD_DIM - UNREAD
    inside = dim < VALUE_DIM
    own_head = (first_row + row) * (TILES * GROUP) + head * GROUP + lane % GROUP
    q = tl.load(q_ptr + own_head[:, None] * HEAD_DIM + UNREAD + dim, mask=there & inside, other=0.0)
    other_q = None
    if UNREAD > 0:
        other = tl.arange(0, PADDED_UNREAD)[None, :]
        other_q = tl.load(
            q_ptr + own_head[:, None] * HEAD_DIM + other, mask=there & (other < UNREAD), other=0.0
        )
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
        first = block * BLOCK_STRIDE
        other_keys = None
        if UNREAD > 0:
            at = (first + key % BLOCK_SIZE * HEAD_DIM)[:, None]
            keys = tl.load(keys_ptr + at + UNREAD + dim, mask=stored[:, None] & inside, other=0.0)
            other_keys = tl.load(
                keys_ptr + at + other, mask=stored[:, None] & (other < UNREAD), other=0.0
            )
            values = keys
            key_scales, value_scales = None, None
        elif CODES == PLAIN:
            at = (first + key % BLOCK_SIZE * HEAD_DIM)[:, None] + dim
            keys = tl.load(keys_ptr + at, mask=stored[:, None] & inside, other=0.0)
            values = tl.load(values_ptr + at, mask=stored[:, None] & inside, other=0.0)
            key_scales, value_scales = None, None
        else:
            # a block of a head: the codes of its tokens, then their scales
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
        highest, total, acc = walk_tile(
            q,
            keys,
            other_q,
            other_keys,
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
                    tl.store(parts_ptr + to * VALUE_DIM + dim, acc, mask=there & inside)
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
            at = _tile_of_heads(TILES, UNREAD) * GROUP + tl.arange(0, LANES) % GROUP
            acc = _finish(highest, total, acc, tl.load(sinks_ptr + at), scale)
        else:
            acc = acc / tl.where(row < rows, total, 1.0)[:, None]
        tl.store(
            out_ptr + own_head[:, None] * HEAD_DIM + UNREAD + dim,
            acc.to(out_ptr.dtype.element_ty),
            mask=there & inside,
        )
        return
    if not BY_SPLIT:
        to = ((head * most_parts + place + part * rows + row) * GROUP + lane % GROUP)[:, None]
        tl.store(parts_ptr + to * VALUE_DIM + dim, acc, mask=there & inside)
        tl.store(stats_ptr + to * 2, highest[:, None], mask=there)
        tl.store(stats_ptr + to * 2 + 1, total[:, None], mask=there)
    # all of this program's parts are written before it counts itself as done
    tl.debug_barrier()
    counter_ptr = counters_ptr + tl.load(item_ptr + 10) * TILES + head
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == tl.load(item_ptr + 9) - 1:
        tl.store(counter_ptr, 0)  # for the next layer
        num_parts = tl.load(item_ptr + 8).to(tl.int32)
        MERGED_LANES: tl.constexpr = 8 if PADDED_DIM <= 256 else 4
        for first_lane in range(0, rows * GROUP, MERGED_LANES):
            merged = first_lane + tl.arange(0, MERGED_LANES)
            from_lane = (head * most_parts + place) * GROUP + merged
            to_head = (
                (first_row + merged // GROUP) * (TILES * GROUP) + head * GROUP + merged % GROUP
            )
            _merge_parts(
                parts_ptr + from_lane * VALUE_DIM,
                stats_ptr + from_lane * 2,
                None
                if sinks_ptr is None
                else sinks_ptr + _tile_of_heads(TILES, UNREAD) * GROUP + merged % GROUP,
                out_ptr + to_head * HEAD_DIM + UNREAD,
                merged < rows * GROUP,
                num_parts,
                rows.to(tl.int64) * GROUP,
                scale,
                VALUE_DIM,
                PADDED_DIM,
                MERGED_LANES,
            )
