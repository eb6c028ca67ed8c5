"""Paged attention for any mix of chunk lengths."""
# pyright: reportCallIssue=false

import math
from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from nano_inference.batch import ForwardBatch
from nano_inference.ops.backend import KvcacheView
from nano_inference.ops.cuda.attention_kernel import attention_kernel
from nano_inference.ops.cuda.attention_plan import Bounds, Items, plan_items
from nano_inference.ops.cuda.matmul import shared_memory

KEY_TILE = 64  # keys of one step of the recurrence
SPLIT = 256  # keys whose sum may be computed on its own
SHORT_LANES = 16  # what tensor cores take at least
# that keys are shared for, at most: more than fit at once, for the sake of balance
PROGRAMS_A_PROCESSOR = 4
OTHER_SHARED = 34 * 1024  # bytes that a program takes beside its tiles of keys and values, at most
ROW_PARTS = 2048  # of rows whose keys are shared: 34 MB with 32 heads of 128


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a kernel is launched for one kind of chunks. It depends on dtype and head_dim, never on
    the rows.

    Attributes:
        lanes: rows times query heads of a kv head, in one tile.
        num_warps, num_stages: of the program.
    """

    lanes: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Work:
    """Items of one kind and how they are computed; the workspace is for a layer at a time."""

    items: Items
    tiling: Tiling
    parts: Tensor  # float32 [kv heads, most parts of rows, group, D]
    stats: Tensor  # float32 [kv heads, most parts of rows, group, 2]: maximum and sum


@dataclass(slots=True)
class Plan:
    """Attention of one step and window. The items are made at the first layer, which knows the
    heads.
    """

    batch: ForwardBatch
    block_size: int
    window: int
    work: dict[tuple[int, int, int, torch.dtype, bool], list[Work]] = field(default_factory=dict)


class Attention:
    """Attention of one backend; what the law asks for is decided once.

    Args:
        batch_invariant: a row has the same bits whatever it is computed with: one tiling for decode
            and prefill, each split walked from scratch. Else decode has small tiles, and only what
            is shared is walked in parts.
        key_tile, split, row_parts: other sizes, for tests. A split is a whole number of tiles.
        shared_items: how many items there may be beyond one a tile, for a kv head; None: what the
            device can use.
        architecture: of the GPU, 80 for 8.x; None: of that one where the tensors are.
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
    ) -> None:
        self.batch_invariant = batch_invariant
        self._key_tile, self._split, self._row_parts, self._shared_items = (
            key_tile,
            split,
            row_parts,
            shared_items,
        )
        self._architecture = architecture

    def plan(self, batch: ForwardBatch, block_size: int, window: int = 0) -> Plan:
        """See `Ops.plan_attention`. It waits for nothing that is on the device, and can be captured
        in a graph.
        """
        return Plan(batch, block_size, window)

    def attend(self, q: Tensor, view: KvcacheView, layer: int, plan: Plan, scale: float) -> Tensor:
        """See `Ops.attention`. Rows beyond `cu_seqlens_q[-1]` are padding: their results mean
        nothing.
        """
        num_rows, num_heads, head_dim = q.shape
        unit, place = view.storage.places[layer]
        # [kv heads, units, block_size, D]
        keys, values = view.storage.keys[place], view.storage.values[place]
        kv_heads = keys.shape[0]
        out = q.new_empty((num_rows, num_heads * head_dim))
        unit_map = view.storage.unit_map
        shape = (kv_heads, num_heads // kv_heads, head_dim, keys.dtype, unit_map is not None)
        if shape not in plan.work:
            plan.work[shape] = self._work(plan, *shape, q.device)
        units = unit_map.units()[unit] if unit_map is not None else None
        for work in plan.work[shape]:
            attention_kernel[(work.items.capacity, kv_heads)](
                q.contiguous(),
                keys,
                values,
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
                scale * math.log2(math.e),
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
                num_warps=work.tiling.num_warps,
                num_stages=work.tiling.num_stages,
                enable_fp_fusion=False,
            )
        return out

    def _work(
        self,
        plan: Plan,
        kv_heads: int,
        group: int,
        head_dim: int,
        dtype: torch.dtype,
        indirect: bool,
        device: torch.device,
    ) -> list[Work]:
        batch = plan.batch
        single_rows = len(batch.positions) == len(batch.seq_lens)
        tilings = self._tilings(
            group, head_dim, dtype, device, indirect=indirect, single_rows=single_rows
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
        # One workspace for both kinds: they run one after the other.
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
        indirect: bool,
        single_rows: bool,
    ) -> list[Tiling]:
        """Of short chunks and of others; or one for all.

        Tall tiles have the larger matrix instructions of sm_90, whose bits differ from those of
        small tiles. So `batch_invariant` has tiles in between for all: a decode row still waits for
        memory and not for products, and prefill is slower.
        """
        least = triton.next_power_of_2(group)  # a row's heads lie in one tile
        if dtype == torch.float32:  # no tensor cores: for comparisons, not for speed
            return [Tiling(max(SHORT_LANES, least), 4, _stages(1, indirect=indirect))]
        buffer = 2 * self._key_tile * triton.next_power_of_2(head_dim) * dtype.itemsize
        # heads of 256 on a card for games
        two = 2 if 2 * buffer + OTHER_SHARED <= shared_memory(device) else 1
        if self.batch_invariant:
            return [
                Tiling(max(32, least), 4 if head_dim <= 128 else 8, _stages(two, indirect=indirect))
            ]
        short = Tiling(
            max(SHORT_LANES, least), 4, _stages(two if head_dim > 64 else 3, indirect=indirect)
        )
        if single_rows:
            return [short]
        architecture = self._architecture
        if architecture is None:
            architecture = (
                10 * torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 90
            )
        # its products are under way while others go on: Triton adds a buffer of its own
        if architecture == 90:
            return [
                short,
                Tiling(max(64, least), 4 if head_dim <= 128 else 8, _stages(1, indirect=indirect)),
            ]
        tall = 64 if two == 2 else 32
        return [
            short,
            Tiling(max(tall, least), 8, _stages(2 if head_dim <= 128 else 1, indirect=indirect)),
        ]


def _stages(buffers: int, *, indirect: bool) -> int:
    """Stages that give so many tiles of keys and values in shared memory, of which all but one are
    on their way.

    Triton shares its stages between the loads that a load waits for: the block table, and the map
    of units.
    """
    return 3 + (buffers - 1) * (3 if indirect else 2)
