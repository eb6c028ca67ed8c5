"""Attention by `torch.nn.attention.flex_attention`, compiled, directly over the paged KV tensors.

The rows of a step are packed into tiles, each of one sequence. A tile is an entry of the kernel's
batch dimension and names the blocks that it visits (`BlockMask` from the block tables). Work and
memory traffic therefore depend on the tile's own context, not on the size of the cache.
Sixteen sequences at context 512 took 1.2 ms with 10,000 slots and 1.6 ms with 1,600,000 (two Zen 4
cores, float32). An alternative copies the batch's blocks into a compact buffer first, which allows
larger key tiles (0.8 ms). In float32 the copy takes longer than it saves, in bfloat16 it saves a
little. It also repeats a shared prefix for each sequence, and the buffer's length is one more shape
to compile for.

This attention is not schedule-invariant: vendor products and thread counts choose the order of
sums.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from nano_inference.errors import ConfigError
from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.interface import AttentionArgs, KvcacheView, Ops

# Rows per tile: 1 for decodes, 32 for chunks. From 64 on, the CPU kernel packs the whole KV storage
# into another layout in every call (bfloat16 and float16).
WIDE = 32
# a shorter chunk takes one tile per row instead of a mostly empty wide tile
NARROW_BELOW = 8
# The number of tiles is padded to 4, 16, 64 ...: a padding tile visits nothing and is almost free,
# while every new shape takes seconds to compile.
BUCKET_BASE = 4
# one query block per tile: at least its rows times the query heads per key head
QUERY_BLOCK = 1024
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_CUDA_SIZE = 16  # smallest product in Triton


class HeadShape(NamedTuple):
    """Attention shape of one model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float


@dataclass(frozen=True, slots=True)
class Kernel:
    """Parameters that a kernel is compiled for. All its other inputs may change from step to
    step.
    """

    num_tiles: int
    width: int
    heads: HeadShape
    num_blocks: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    num_threads: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of one width, padded to a bucket. There are B tiles of W rows, and block lists have a
    column for every block.

    Blocks of which every row of the tile sees every slot are listed separately, because the kernel
    needs no mask for them.
    """

    rows: Tensor  # [n] rows of the batch
    lanes: Tensor  # [n] index of each row among the B * W lanes of the tiles
    last: Tensor  # int32 [B, W] last position that a row sees, -1 in padding
    below: Tensor  # int32 [B, W] a row sees the positions above this one
    num_partial: Tensor  # int32 [B, 1, 1]
    partial: Tensor  # int32 [B, 1, 1, num_blocks]
    num_full: Tensor  # int32 [B, 1, 1]
    full: Tensor  # int32 [B, 1, 1, num_blocks]


@dataclass(frozen=True, slots=True)
class FlexPlan:
    """Inputs of `attention` derived from a batch and a window."""

    tiles: tuple[Tiles, ...]
    # int32 [num_blocks] position of the first slot of each block of the batch
    block_starts: Tensor
    tails: Tensor  # [t] slots after the last position of each sequence, in its last block


def flex_ops(ops: Ops, num_blocks: int) -> Ops:
    """Return a backend with its attention replaced, for KV tensors of `num_blocks` blocks. Call
    `require_flex` first.
    """
    return replace(
        ops,
        name=f"{ops.name}+flex",
        schedule_invariant=False,
        plan_attention=functools.partial(plan_attention, num_blocks),
        attention=attention,
    )


def require_flex(
    shapes: Sequence[HeadShape],
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Check the values and compile the smallest decode kernel, so that missing requirements show
    before the first step.

    Args:
        shapes: Attention shapes of all models that will run.
        num_blocks: Number of blocks in the KV tensors.
        block_size: Tokens per block.
        dtype: Dtype of queries, keys and values.
        device: Device that holds them.

    Raises:
        ConfigError: flex_attention does not support these values, or does not run on this machine.
    """
    for shape in shapes:
        _check_values(shape, block_size, dtype, device)
    if device.type == "cpu":
        _check_cpu()
    for shape in dict.fromkeys(shapes):
        _try(
            Kernel(
                BUCKET_BASE,
                1,
                shape,
                num_blocks,
                block_size,
                dtype,
                device,
                torch.get_num_threads(),
            )
        )


def _check_values(
    shape: HeadShape, block_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    if dtype not in DTYPES:
        raise ConfigError(
            f"attention='flex' supports float32, bfloat16 and float16; got dtype={dtype}."
        )
    if shape.num_heads // shape.num_kv_heads * WIDE > QUERY_BLOCK:
        raise ConfigError(
            f"attention='flex' supports up to {QUERY_BLOCK // WIDE} query heads per key head, but "
            f"this model has {shape.num_heads} for {shape.num_kv_heads}; use "
            "attention='reference'."
        )
    if device.type != "cuda":
        return
    if shape.head_dim < MIN_CUDA_SIZE:
        raise ConfigError(
            f"attention='flex' on CUDA requires head_dim >= {MIN_CUDA_SIZE}; got "
            f"head_dim={shape.head_dim}. Use attention='reference'."
        )
    if block_size < MIN_CUDA_SIZE or block_size & (block_size - 1):
        raise ConfigError(
            "attention='flex' on CUDA requires a block_size that is a power of two and at least "
            f"{MIN_CUDA_SIZE}; got {block_size}."
        )


def _check_cpu() -> None:
    """Check the CPU and the compiler before compiling. A kernel that an earlier process left on
    disk would hide a missing compiler.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    if sys.platform == "darwin" or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        raise ConfigError(
            f"attention='flex' on a CPU requires AVX2 and does not run on macOS; this machine is "
            f"{sys.platform} with {torch.backends.cpu.get_cpu_capability()}. Use "
            "attention='reference'."
        )
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigError(
            "attention='flex' on a CPU requires a C++ compiler, and torch.compile found none: "
            "install g++, set the environment variable CXX, or use attention='reference'."
        ) from error


def _try(kernel: Kernel) -> None:
    """Compile a kernel, and check its result for one row over a whole block and half of another."""
    heads, device, size = kernel.heads, kernel.device, kernel.block_size
    random = torch.Generator().manual_seed(0)
    held = min(2, kernel.num_blocks)  # blocks of the row's sequence, in reverse order in memory
    num_seen = (held - 1) * size + (size + 1) // 2

    def stored() -> tuple[Tensor, Tensor]:
        """Return the rows of the sequence in order, [slots, kv heads, D], and KV memory that holds
        them. The rest of the memory is uninitialized.

        Slots after the row hold large numbers.
        """
        rows = torch.randn((held * size, heads.num_kv_heads, heads.head_dim), generator=random)
        rows[num_seen:] *= 64
        rows = rows.to(kernel.dtype)
        memory = torch.empty(
            (heads.num_kv_heads, kernel.num_blocks * size, heads.head_dim),
            dtype=kernel.dtype,
            device=device,
        )
        blocks = rows.view(held, size, heads.num_kv_heads, heads.head_dim).flip(0)
        memory[:, : held * size] = blocks.flatten(0, 1).transpose(0, 1).to(device)
        return rows, memory

    (keys, all_keys), (values, all_values) = stored(), stored()
    q = torch.randn((1, heads.num_heads, heads.head_dim), generator=random).to(kernel.dtype)
    lanes = torch.full((kernel.num_tiles, kernel.width), -1, dtype=torch.int32)
    lists = torch.zeros((kernel.num_tiles, 1, 1, kernel.num_blocks), dtype=torch.int32)
    counts = torch.zeros((kernel.num_tiles, 1, 1), dtype=torch.int32)
    last, full, num_partial, num_full = lanes.clone(), lists.clone(), counts.clone(), counts.clone()
    last[0, 0], full[0, 0, 0, 0], num_partial[0], num_full[0] = num_seen - 1, held - 1, 1, held - 1
    starts = torch.zeros(kernel.num_blocks, dtype=torch.int32)
    starts[0] = (held - 1) * size
    row = torch.zeros(1, dtype=torch.int64)
    tiles = Tiles(
        *(part.to(device) for part in (row, row, last, lanes, num_partial, lists, num_full, full))
    )
    try:
        got = _attend(
            q.to(device), all_keys, all_values, tiles, starts.to(device), size, heads.scale
        )
    except RuntimeError as error:  # torch's compilation errors are RuntimeErrors too
        reason = " ".join(str(error).split("\n\n")[0].split())
        raise ConfigError(
            f"attention='flex' does not compile here ({reason}); use attention='reference'."
        ) from error
    wide = [part.double().transpose(0, 1) for part in (q, keys[:num_seen], values[:num_seen])]
    expected = functional.scaled_dot_product_attention(
        wide[0], wide[1], wide[2], scale=heads.scale, enable_gqa=True
    ).transpose(0, 1)
    # With torch 2.13 and AVX2, masks are wrong in blocks of 8, 24, 40 ... slots.
    if not torch.allclose(got.double().cpu(), expected, rtol=0, atol=0.05):
        raise ConfigError(
            f"attention='flex' computes wrong values here with block_size={size} (torch "
            f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}); use a block_size "
            "that is a multiple of 16, or attention='reference'."
        )


# -- planning --------------------------------------------------------------------------------------


@torch.inference_mode()
def plan_attention(
    num_blocks: int, batch: ForwardBatch, block_size: int, window: int = 0
) -> FlexPlan:
    """Pack the rows into tiles and list the blocks that each tile visits. The batch's tables are
    read on the host.
    """
    device = batch.positions.device
    bounds, tables, seq_lens = (
        t.cpu() for t in (batch.cu_seqlens_q, batch.block_tables, batch.seq_lens)
    )
    lengths = bounds.diff()
    groups = ((lengths < NARROW_BELOW, 1), (lengths >= NARROW_BELOW, WIDE))
    tiles = tuple(
        _pack(
            mask.nonzero()[:, 0],
            width,
            bounds,
            seq_lens,
            tables,
            num_blocks,
            block_size,
            window,
            device,
        )
        for mask, width in groups
        if bool(mask.any())
    )
    places = torch.arange(tables.shape[1])
    in_use = places < -(-seq_lens[:, None] // block_size)
    block_starts = torch.zeros(num_blocks, dtype=torch.int32)
    # All sequences that share a slot have it at the same position: its key was rotated for that
    # position when it was stored.
    block_starts[tables[in_use]] = (places * block_size).int().expand_as(tables)[in_use]
    behind = seq_lens[:, None] + torch.arange(block_size)
    last_index = (seq_lens - 1) // block_size
    last_block = tables.gather(1, last_index[:, None])
    tails = (last_block * block_size + behind % block_size)[
        behind < (last_index[:, None] + 1) * block_size
    ]
    return FlexPlan(tiles, block_starts.to(device), tails.to(device))


def _pack(
    chunks: Tensor,
    width: int,
    bounds: Tensor,
    seq_lens: Tensor,
    tables: Tensor,
    num_blocks: int,
    block_size: int,
    window: int,
    device: torch.device,
) -> Tiles:
    """Cut chunks into tiles of up to `width` rows. Shapes [T] below have one entry per tile, before
    padding.
    """
    lengths = bounds.diff()[chunks]
    counts = -(-lengths // width)
    chunk = chunks.repeat_interleave(counts)  # [T]
    offset = (
        torch.arange(len(chunk)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    ) * width
    length = (bounds.diff()[chunk] - offset).clamp(max=width)
    first = seq_lens[chunk] - bounds.diff()[chunk] + offset  # position of the tile's first row
    final = first + length - 1
    lane = torch.arange(width)
    real = lane < length[:, None]  # [T, W]
    last = torch.where(real, first[:, None] + lane, -1)

    begin = (first - window + 1).clamp(min=0) // block_size if window else torch.zeros_like(first)
    end = final // block_size + 1
    full_begin = -(-(final - window + 1).clamp(min=0) // block_size) if window else begin
    full_end = torch.maximum((first + 1) // block_size, full_begin)
    full_begin, full_end = torch.minimum(full_begin, end), torch.minimum(full_end, end)
    spans = torch.arange(int((end - begin).max()))
    before = (full_begin - begin)[:, None]
    around = torch.where(spans < before, begin[:, None] + spans, full_end[:, None] + spans - before)
    within = full_begin[:, None] + spans

    num_tiles = _bucket(len(chunk))
    padding = num_tiles - len(chunk)

    def listed(places: Tensor) -> Tensor:
        # [B, 1, 1, num_blocks]; the kernel reads the first num_partial or num_full entries of a
        # list
        blocks = torch.zeros((num_tiles, num_blocks), dtype=torch.int32, device=device)
        named = tables[chunk[:, None], places.clamp(max=tables.shape[1] - 1)].int()[:, :num_blocks]
        blocks[: len(chunk), : named.shape[1]] = named.to(device)
        return blocks[:, None, None]

    def counted(count: Tensor) -> Tensor:
        return functional.pad(count, (0, padding)).int().to(device)[:, None, None]

    def lanes(values: Tensor) -> Tensor:
        return functional.pad(values, (0, 0, 0, padding), value=-1).int().to(device)

    return Tiles(
        rows=(bounds[chunk] + offset)[:, None].add(lane)[real].to(device),
        lanes=real.flatten().nonzero()[:, 0].to(device),
        last=lanes(last),
        below=lanes(last - window if window else torch.full_like(last, -1)),
        num_partial=counted((end - begin) - (full_end - full_begin)),
        partial=listed(around),
        num_full=counted(full_end - full_begin),
        full=listed(within),
    )


def _bucket(num_tiles: int) -> int:
    size = BUCKET_BASE
    while size < num_tiles:
        size *= 4
    return size


# -- attending -------------------------------------------------------------------------------------


@torch.inference_mode()
def attention(
    q: Tensor, view: KvcacheView, layer: int, plan: object, scores: AttentionArgs
) -> Tensor:
    """Compute attention of q [N, heads, D] over each row's own context. Return [N, heads * D] in
    q's dtype.

    Zeroes the free slots after each sequence in its last block, which is private because the
    sequence is writing to it. The kernel multiplies the contents of these slots by a probability of
    zero, and 0 * NaN is NaN. All other slots of a tile were written by its own sequence, or by one
    with the same prefix.
    """
    plan = cast("FlexPlan", plan)
    keys, values = view.stored(layer)
    zeros = keys.new_zeros((len(plan.tails), keys.shape[0], keys.shape[2]))
    view.write(layer, plan.tails, zeros, zeros)
    out = torch.empty_like(q)
    for tiles in plan.tiles:
        out[tiles.rows] = _attend(
            q[tiles.rows], keys, values, tiles, plan.block_starts, view.block_size, scores.scale
        )
    return out.view(len(q), -1)


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tiles: Tiles,
    block_starts: Tensor,
    block_size: int,
    scale: float,
) -> Tensor:
    """Compute attention for the rows of some tiles: q [n, heads, D] -> the same shape."""
    _, num_heads, head_dim = q.shape
    num_tiles, width = tiles.last.shape
    heads = HeadShape(num_heads, keys.shape[0], head_dim, scale)
    threads = torch.get_num_threads()
    attend = _compiled(
        Kernel(num_tiles, width, heads, len(block_starts), block_size, q.dtype, q.device, threads)
    )
    packed = q.new_zeros((num_tiles * width, num_heads, head_dim))
    packed[tiles.lanes] = q
    out = attend(
        packed.view(num_tiles, width, num_heads, head_dim).transpose(1, 2),
        keys[None],
        values[None],
        tiles.last,
        tiles.below,
        block_starts,
        (tiles.num_partial, tiles.partial, tiles.num_full, tiles.full),
    )
    return out.transpose(1, 2).reshape(num_tiles * width, num_heads, head_dim)[tiles.lanes]


@functools.cache
def _compiled(kernel: Kernel) -> Callable[..., Tensor]:
    """Return the kernel of one bucket, compiled at its first call and shared by the engines of a
    process.
    """
    num_slots, block_size = kernel.num_blocks * kernel.block_size, kernel.block_size
    # One partition. With several, torch uses its CPU kernel for single rows, which gives partitions
    # without keys a highest score of 0. If all scores are far below 0, that kernel returns 0 (torch
    # 2.13).
    options: Any = {"PARTITION_SIZE": num_slots} if kernel.device.type == "cpu" else {}

    def attend(
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        last: Tensor,
        below: Tensor,
        block_starts: Tensor,
        lists: tuple[Tensor, Tensor, Tensor, Tensor],
    ) -> Tensor:
        def visible(tile: Tensor, head: Tensor, row: Tensor, slot: Tensor) -> Tensor:
            # no check of the slot's owner: a tile's lists only hold blocks of its own sequence
            position = block_starts[slot // block_size] + slot % block_size
            return (position <= last[tile, row]) & (position > below[tile, row])

        mask = BlockMask.from_kv_blocks(
            *lists,
            BLOCK_SIZE=(QUERY_BLOCK, block_size),
            mask_mod=visible,
            seq_lengths=(kernel.width, num_slots),
            compute_q_blocks=False,
        )
        out = flex_attention(
            q,
            keys,
            values,
            block_mask=mask,
            scale=kernel.heads.scale,
            enable_gqa=True,
            kernel_options=options,
        )
        assert isinstance(out, Tensor)
        return out

    # Dynamo stores compiled graphs with the code object, eight at most, so every bucket has its own
    # code object.
    code = attend.__code__.replace(co_name=f"attend_{kernel.num_tiles}x{kernel.width}")
    renamed = FunctionType(code, attend.__globals__, code.co_name, None, attend.__closure__)
    # The CPU kernel has one buffer per thread that it was compiled for. The disk cache of torch
    # 2.11 and 2.12 would return it to a process with more threads. This option makes the number of
    # threads part of the cache key.
    return torch.compile(
        renamed, dynamic=False, fullgraph=True, options={"cpp.threads": kernel.num_threads}
    )
