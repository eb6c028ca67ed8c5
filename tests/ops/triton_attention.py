"""Sequences in paged memory, NaN outside the readable slots, and batches of their rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_inference.device.kv_tensors import KVStorage
from nano_inference.models.spec.layers import LayerSpec
from nano_inference.ops.batches import ForwardBatch, Rows, batch_of_rows
from nano_inference.ops.cuda.attention import Attention
from nano_inference.ops.interface import AttentionArgs
from nano_inference.ops.kv_codes import KvCodes, KvFormat
from nano_inference.ops.reference import attention as reference_attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYER = 1  # this layer is the first one in units of the second kind


class Piece(NamedTuple):
    """Rows [start, end) of sequence `seq`. All earlier rows are already stored."""

    seq: int
    start: int
    end: int


@dataclass(frozen=True)
class Heads:
    """Head counts and sizes of one layer."""

    group: int = 2
    kv_heads: int = 2
    dim: int = 16
    dtype: torch.dtype = torch.float32
    has_sinks: bool = False
    cap: float = 0.0
    codes: KvCodes | None = None  # of keys and values
    unread: int = 0  # first numbers of a key, if the others are its value

    @property
    def scores(self) -> tuple[Any, ...]:
        """Return the arguments of `attend` from the scale on. Sinks per query head range from far
        above to far below the scores.
        """
        many = self.group * self.kv_heads
        sinks = torch.linspace(200, -40, many, device=DEVICE) if self.has_sinks else None
        return self.scale, sinks, self.cap, self.unread

    @property
    def scale(self) -> float:
        return self.dim**-0.5


@dataclass(frozen=True)
class Memory:
    """Memory layout of the blocks."""

    block_size: int = 16
    units: bool = False  # a map gives the unit of each layer's block
    beside: int = 0  # numbers a token of another layer in the same unit
    padding: tuple[int, int] = (0, 0)  # rows and chunks that only pad a graph
    strided: bool = False  # only the device has the lengths of the block table's rows
    seed: int = 0


class Rows3(NamedTuple):
    """One sequence: q [length, heads, D], k and v [length, kv heads, D]."""

    q: Tensor
    k: Tensor
    v: Tensor


def draw(lengths: Sequence[int], heads: Heads, seed: int = 0) -> list[Rows3]:
    generator = torch.Generator().manual_seed(seed)
    numbers = (heads.kv_heads * heads.group, heads.kv_heads, heads.kv_heads)
    return [
        Rows3(
            *(
                torch.randn(n, many, heads.dim, generator=generator).to(DEVICE, heads.dtype)
                for many in numbers
            )
        )
        for n in lengths
    ]


def place(
    seqs: Sequence[Rows3], pieces: Sequence[Piece], heads: Heads, window: int, memory: Memory
) -> tuple[Tensor, ForwardBatch, KVStorage]:
    """Return the rows' queries, their batch, and a storage that holds the keys and values they may
    read.
    """
    generator = torch.Generator().manual_seed(memory.seed)
    size = memory.block_size
    needed = [
        -(-max(p.end for p in pieces if p.seq == seq) // size)
        for seq in sorted({p.seq for p in pieces})
    ]
    num_blocks = sum(needed) + 3
    free = torch.randperm(num_blocks, generator=generator).tolist()
    tables = {
        seq: [free.pop() for _ in range(n)]
        for seq, n in zip(sorted({p.seq for p in pieces}), needed, strict=True)
    }
    units = None
    num_units = num_blocks
    if memory.units:
        num_units = 2 * num_blocks
        units = torch.randperm(num_units, generator=generator).view(2, num_blocks).to(DEVICE)
    form = KvFormat(heads.dtype, heads.codes)
    shape: tuple[int, ...]
    shape = (1 if memory.units else 2, heads.kv_heads, num_units, size, form.width(heads.dim))
    kinds: tuple[LayerSpec, ...] = ()
    if memory.beside:
        kinds = (LayerSpec(heads.kv_heads, heads.dim, False, LAYER, 0),) * 2
        shape = (num_units, (memory.beside + kinds[0].kept) * size)
    junk = -1 if form.coded else math.nan  # a scale of such bytes is NaN
    view = object.__new__(KVStorage)
    keys, values = (torch.full(shape, junk, dtype=form.stored, device=DEVICE) for _ in range(2))
    vars(view).update(
        block_size=size,
        keys=keys,
        values=keys if heads.unread else values,
        places=[(0, 0), (int(memory.units), memory.beside or int(not memory.units))],
        unit_map=None if units is None else SimpleNamespace(units=lambda: units),
        format=form,
        _kinds=kinds,
    )
    view._layers = [view._lie(layer) for layer in range(2)]  # pyright: ignore[reportPrivateUsage]
    batch = batch_of_rows(
        [Rows([0] * (p.end - p.start), p.start, tables[p.seq]) for p in pieces], size
    )
    for piece in pieces:
        first = max(0, piece.start - window + 1) if window else 0
        seen = torch.arange(first, piece.end)
        slots = (torch.tensor(tables[piece.seq])[seen // size] * size + seen % size).to(DEVICE)
        view.write(
            LAYER, slots, seqs[piece.seq].k[first : piece.end], seqs[piece.seq].v[first : piece.end]
        )
    q = torch.cat([seqs[p.seq].q[p.start : p.end] for p in pieces])
    tensors = {
        name: getattr(batch, name).to(DEVICE)
        for name in ("positions", "slot_mapping", "row_chunks")
    }
    tensors |= {
        name: getattr(batch, name).to(DEVICE)
        for name in ("block_tables", "cu_seqlens_q", "seq_lens")
    }
    return q, replace(batch, **tensors), view


def padded(q: Tensor, batch: ForwardBatch, memory: Memory) -> tuple[Tensor, ForwardBatch]:
    """Return the same batch in a graph for more rows and chunks."""
    rows, chunks = memory.padding
    batch = replace(
        batch,
        positions=torch.nn.functional.pad(batch.positions, (0, rows)),
        slot_mapping=torch.nn.functional.pad(batch.slot_mapping, (0, rows), value=-1),
        row_chunks=torch.nn.functional.pad(batch.row_chunks, (0, rows)),
        cu_seqlens_q=torch.nn.functional.pad(
            batch.cu_seqlens_q, (0, chunks), value=int(batch.cu_seqlens_q[-1])
        ),
        seq_lens=torch.nn.functional.pad(batch.seq_lens, (0, chunks)),
        block_tables=torch.nn.functional.pad(batch.block_tables, (0, 0, 0, chunks)),
    )
    q = torch.cat([q, q.new_full((rows, *q.shape[1:]), math.nan)])
    if memory.strided:
        lines, columns = batch.block_tables.shape
        wide = torch.full((lines, columns + 5), -1_000_000_000, device=DEVICE)
        wide[:, :columns] = batch.block_tables
        stride = torch.tensor([columns + 5], device=DEVICE)
        batch = replace(
            batch, block_tables=wide.flatten()[:lines].view(lines, 1), table_stride=stride
        )
    return q, batch


def attend(
    attention: Attention,
    seqs: Sequence[Rows3],
    pieces: Sequence[Piece],
    heads: Heads,
    window: int = 0,
    memory: Memory = Memory(),
) -> Tensor:
    """Return the attention of the pieces' rows [N, heads * D]."""
    q, batch, view = place(seqs, pieces, heads, window, memory)
    wider, batch = padded(q, batch, memory)
    result = attention.attend(
        *(wider, view, LAYER, attention.plan(batch, memory.block_size, window)),
        AttentionArgs(*heads.scores),
    )
    assert result.shape == (len(wider), q.shape[1] * q.shape[2])
    assert result.dtype == q.dtype
    return read(result[: len(q)], heads)


def read(result: Tensor, heads: Heads) -> Tensor:
    """Return the numbers of an attention's output that are read."""
    return result.unflatten(1, (-1, heads.dim))[:, :, heads.unread :].flatten(1)


def reference(
    seqs: Sequence[Rows3],
    pieces: Sequence[Piece],
    heads: Heads,
    window: int = 0,
    memory: Memory = Memory(),
) -> Tensor:
    """Return the specification's result for the same rows."""
    q, batch, view = place(seqs, pieces, heads, window, memory)
    plan = reference_attention.plan_attention(batch, memory.block_size, window)
    out = reference_attention.attention(q, view, LAYER, plan, AttentionArgs(*heads.scores))
    return read(out, heads)
