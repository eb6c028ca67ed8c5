"""Adapters on a GPU: products of low rank, grouped by adapter, in two kernels per product.

A step's rows are grouped by adapter once (`GroupedLora.group`): rows with the same adapter share
tiles of `ROWS`, and the last tile of each adapter may be partial. Then every product adds its
adapters in two kernels:

    shrink: scale * A x  -> float32 [segments, N, parts, rank]
    expand: y + B (...)  -> y, rounded once

A row's bits depend only on the row, its adapter and the shapes. The columns of A are cut into
segments at fixed positions, and within a segment products are added in the order of k by the same
instruction for any contents of a tile. The segments' sums are added in order. With few rows each
segment is a separate program, so that a decode step reads A with many SMs. With many rows one
program computes all segments of its tile. Rows without an adapter are in no tile.

Kernels find an adapter's matrices through its table, and a row's adapter by the address of that
table. The host reads nothing, so a captured step works for adapters that are loaded after the
capture: only the addresses are inputs (`Unnamed`). A table has a record for each part of each
product, in the order in which products are first seen (`_Sites`).

If rows are bfloat16 or float16, tensor cores multiply with A and B as sums of two TF32 numbers
(`tf32x3`), which keeps 22 of their 24 bits.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false
# pyright: reportUnreachable=false, reportOperatorIssue=false

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.cuda.rows import aligned
from nano_inference.ops.lora import Adapted, Adapter, LoraPart, Place

ROWS = 16  # rows per tile: one instruction of tensor cores
RANKS = 16  # ranks per program of the first kernel
COLUMNS = 64  # columns per program of the second kernel
DEPTH = 64  # elements of k that are loaded together
LEAST_SEGMENT = 512  # least elements of k per segment
MOST_SEGMENTS = 8  # each is a float32 that every program of the second kernel reads per rank
SPLIT_ROWS = 256  # with more rows, tiles suffice to use all SMs
SPARE_TILES = 8  # partial tiles with their own program; more share programs
BLOCK = 64  # rows that a program of the grouping compares with all others
MOST_PARTS = 4  # places for parts of a product in a table
_RECORD = 8  # words per part in a table: A, B, rank, first column, columns, bits of the scale
_PART_WORDS = tl.constexpr(MOST_PARTS * _RECORD)
_WORDS = tl.constexpr(_RECORD)
_ALIGNED_COLUMNS = 16  # with parts at such columns, four numbers of B are loaded together


class LoraBounds(NamedTuple):
    """Bounds for the adapters of a step. They decide sizes of grids and buffers, but no bit.

    Attributes:
        parts: Maximum number of parts of a product.
        rank: Maximum rank.
        aligned: True if all parts begin and end at columns that are multiples of 16.
    """

    parts: int
    rank: int
    aligned: bool

    @property
    def ranks(self) -> int:
        """Maximum rank, rounded up to whole programs."""
        return -(-self.rank // RANKS) * RANKS


class Unnamed(NamedTuple):
    """The only element of `adapters` in a captured step: each row of `row_adapters` holds the
    address of its adapter's table, or 0.
    """

    bounds: LoraBounds


class Groups(NamedTuple):
    """Rows of a step grouped by adapter: the only element of `adapters` after `GroupedLora.group`.

    Attributes:
        order: int32 [tiles * ROWS]: row of the step at each place.
        tables: int64 [tiles]: address of the table of each tile's adapter.
        counts: int32 [tiles]: rows of each tile.
        num_tiles: int32 [1]: number of tiles. Others are uninitialized.
        programs: Programs that share the tiles.
        bounds: Bounds for the adapters.
        names: Names of the products that any adapter changes. None: unknown.
    """

    order: Tensor
    tables: Tensor
    counts: Tensor
    num_tiles: Tensor
    programs: int
    bounds: LoraBounds
    names: frozenset[str] | None


class _Sites:
    """Numbers of products by name, in the order in which they are first seen."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._next = itertools.count()

    def __len__(self) -> int:
        return max(self._numbers.values(), default=-1) + 1

    def number(self, name: str) -> int:
        """Return the number of a product."""
        known = self._numbers.get(name)
        return self._numbers.setdefault(name, next(self._next)) if known is None else known


class _Table(NamedTuple):
    """An adapter's table on the device.

    Attributes:
        words: int64 [sites * MOST_PARTS * _RECORD].
        matrices: Tensors whose addresses it contains.
    """

    words: Tensor
    matrices: list[Tensor]


class GroupedLora:
    """`Ops.lora`, and the adapters of a step in the form that its kernels read.

    An object serves all models of one engine.
    """

    def __init__(self) -> None:
        self._sites = _Sites()

    def lora(self, y: Tensor, x: Tensor, name: str, rows: Adapted) -> Tensor:
        """Implement `Ops.lora`. Rows that are not grouped are grouped first."""
        first = rows.adapters[0]
        groups = first if isinstance(first, Groups) else self._groups(rows)
        if not len(x) or (groups.names is not None and name not in groups.names):
            return y
        return _added(aligned(y), aligned(x), self._sites.number(name), groups)

    def group(self, batch: ForwardBatch) -> ForwardBatch:
        """Return a batch whose rows are grouped by adapter, for the products of one step."""
        return replace(batch, adapters=(self._groups(batch),))

    def addresses(self, adapters: Sequence[Adapter]) -> np.ndarray:
        """Return the addresses of the adapters' tables, int64 [len(adapters)], and 0 for an adapter
        that changes no product of this rank.

        A table is made on first use, and again after products were captured that it lacks.
        """
        names = {name for adapter in adapters for name in adapter.parts}
        for name in sorted(names):  # before the first table is made
            self._sites.number(name)
        tables = (self._table(each).words.data_ptr() if each.parts else 0 for each in adapters)
        return np.array([*tables], dtype=np.int64)

    def _groups(self, rows: Adapted) -> Groups:
        num_rows, first = len(rows.row_adapters), rows.adapters[0]
        if isinstance(first, Unnamed):
            return _grouped(rows.row_adapters, num_rows, first.bounds, None)
        addresses = self.addresses(rows.adapters)
        by_index = _sent(torch.from_numpy(np.append(addresses, 0)), rows.row_adapters.device)
        most_tiles = min(num_rows, num_rows // ROWS + len(rows.adapters))
        names = frozenset(name for adapter in rows.adapters for name in adapter.parts)
        bounds = bounds_of(parts for adapter in rows.adapters for parts in adapter.parts.values())
        return _grouped(by_index[rows.row_adapters], most_tiles, bounds, names)

    def _table(self, adapter: Adapter) -> _Table:
        table: _Table | None = adapter.packed.get(self)
        if table is None or len(table.words) < len(self._sites) * _PART_WORDS.value:
            table = adapter.packed[self] = self._make_table(adapter)
        return table

    def _make_table(self, adapter: Adapter) -> _Table:
        words = np.zeros((len(self._sites), MOST_PARTS, _RECORD), dtype=np.int64)
        matrices: list[Tensor] = []
        for name, parts in adapter.parts.items():
            site = words[self._sites.number(name)]
            for record, (start, a, b, scale) in zip(site, parts, strict=False):
                a, b = aligned(a), aligned(b)
                bits = int(np.float32(scale).view(np.int32))
                record[:6] = a.data_ptr(), b.data_ptr(), len(a), start, b.shape[1], bits
                matrices += (a, b)
            if len(parts) > MOST_PARTS:
                raise NotImplementedError(f"an adapter has {len(parts)} parts of {name}.")
        words_here = _sent(torch.from_numpy(words.reshape(-1)), matrices[0].device)
        return _Table(words_here, matrices)


def bounds_of(products: Iterable[Sequence[LoraPart]]) -> LoraBounds:
    """Return the bounds for adapters with these parts of products."""
    products = list(products)
    parts = [part for product in products for part in product]
    columns = (column for part in parts for column in (part.first, part.b.shape[1]))
    return LoraBounds(
        parts=max(map(len, products), default=1),
        rank=max((len(part.a) for part in parts), default=1),
        aligned=are_aligned(columns),
    )


def are_aligned(columns: Iterable[int]) -> bool:
    """Return True if all first columns and numbers of columns are multiples of 16."""
    return not any(column % _ALIGNED_COLUMNS for column in columns)


def placed(places: Sequence[Place]) -> Callable[[Sequence[Tensor]], int]:
    """Implement `Ops.placed`. The host waits once for the check of all matrices."""

    def write(sources: Sequence[Tensor]) -> int:
        for (out, turned), source in zip(places, sources, strict=True):
            (out.T if turned else out).copy_(source)
        if not places:
            return -1
        finite = torch.stack([out.isfinite().all() for out, _ in places]).tolist()
        return next((index for index, passed in enumerate(finite) if not passed), -1)

    return write


def _sent(words: Tensor, device: torch.device) -> Tensor:
    """Copy words to a device without waiting for it."""
    if device.type == "cuda":
        return words.pin_memory().to(device, non_blocking=True)
    return words.to(device)


def segment_of(depth: int) -> int:
    """Return the elements of k per segment, for products with `depth` columns. It is a multiple of
    `DEPTH` and depends on nothing else.
    """
    segments = max(1, min(MOST_SEGMENTS, depth // LEAST_SEGMENT))
    return triton.cdiv(triton.cdiv(depth, DEPTH), segments) * DEPTH


def _grouped(
    addresses: Tensor, most_tiles: int, bounds: LoraBounds, names: frozenset[str] | None
) -> Groups:
    """Group rows by the address of their adapter's table, int64 [N]. 0 means no adapter."""
    num_rows, device = len(addresses), addresses.device
    ranks = torch.empty(num_rows, dtype=torch.int32, device=device)
    order = torch.empty(most_tiles * ROWS, dtype=torch.int32, device=device)
    tables = torch.empty(most_tiles, dtype=torch.int64, device=device)
    counts = torch.empty(most_tiles, dtype=torch.int32, device=device)
    num_tiles = torch.empty(1, dtype=torch.int32, device=device)
    if num_rows:
        grid = (triton.cdiv(num_rows, BLOCK),)
        _rank_kernel[grid](addresses, ranks, num_rows, BLOCK, enable_fp_fusion=False)
        _tile_kernel[grid](
            addresses, ranks, order, tables, counts, num_tiles, num_rows, ROWS, BLOCK,
            enable_fp_fusion=False,
        )  # fmt: skip
    programs = min(most_tiles, num_rows // ROWS + SPARE_TILES)
    return Groups(order, tables, counts, num_tiles, programs, bounds, names)


def _added(y: Tensor, x: Tensor, site: int, groups: Groups) -> Tensor:
    """Add the adapters of a product to y [N, M], in place."""
    (num_rows, depth), (parts, _, columns_aligned) = x.shape, groups.bounds
    ranks, segment = groups.bounds.ranks, segment_of(depth)
    split = segment < depth and num_rows <= SPLIT_ROWS
    segments = triton.cdiv(depth, segment) if split else 1
    inner = torch.empty((segments, num_rows, parts, ranks), dtype=torch.float32, device=x.device)
    precision = "ieee" if x.dtype == torch.float32 else "tf32x3"
    tiles = groups[:4]
    _shrink_kernel[(groups.programs, parts * (ranks // RANKS), segments)](
        x,
        inner,
        *tiles,
        site,
        num_rows,
        parts,
        ranks,
        depth,
        segment,
        split,
        ROWS,
        RANKS,
        DEPTH,
        precision,
        num_warps=4,
        num_stages=4,
        enable_fp_fusion=False,
    )
    _expand_kernel[(groups.programs, triton.cdiv(y.shape[1], COLUMNS))](
        y,
        inner,
        *tiles,
        site,
        num_rows,
        y.shape[1],
        parts,
        ranks,
        segments,
        columns_aligned,
        ROWS,
        RANKS,
        COLUMNS,
        precision,
        num_warps=4,
        num_stages=2,
        enable_fp_fusion=False,
    )
    return y


@triton.jit(do_not_specialize=["num_rows"])
def _rank_kernel(addresses, ranks, num_rows, BLOCK: tl.constexpr):
    """Count the earlier rows with the same adapter. Grid (blocks of rows,)."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    address = tl.load(addresses + rows, mask=rows < num_rows, other=0)
    rank = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK):
        others = start + tl.arange(0, BLOCK)
        other = tl.load(addresses + others, mask=others < num_rows, other=0)
        same = (other[None, :] == address[:, None]) & (others[None, :] < rows[:, None])
        rank += tl.sum(same.to(tl.int32), axis=1)
    tl.store(ranks + rows, rank, mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def _tile_kernel(
    addresses, ranks, order, tables, counts, num_tiles, num_rows, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the place of each row. Adapters are in the order of their addresses. The first row of a
    tile also writes the tile. Grid (blocks of rows,).
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    address = tl.load(addresses + rows, mask=rows < num_rows, other=0)
    rank = tl.load(ranks + rows, mask=rows < num_rows, other=0)
    tile = rank // ROWS
    group = tl.zeros((BLOCK,), tl.int32)
    total = 0
    for start in range(0, num_rows, BLOCK):
        others = start + tl.arange(0, BLOCK)
        other = tl.load(addresses + others, mask=others < num_rows, other=0)
        other_rank = tl.load(ranks + others, mask=others < num_rows, other=1)
        leads = (other != 0) & (other_rank % ROWS == 0)
        before = leads[None, :] & (other[None, :] < address[:, None])
        tile += tl.sum(before.to(tl.int32), axis=1)
        group += tl.sum((other[None, :] == address[:, None]).to(tl.int32), axis=1)
        total += tl.sum(leads.to(tl.int32), axis=0)
    adapted = address != 0
    tl.store(order + tile * ROWS + rank % ROWS, rows, mask=adapted)
    leads = adapted & (rank % ROWS == 0)
    tl.store(tables + tile, address, mask=leads)
    tl.store(counts + tile, tl.minimum(group - rank, ROWS), mask=leads)
    if tl.program_id(0) == 0:
        tl.store(num_tiles, total)


@triton.jit
def _rows_of(order, counts, tile, ROWS: tl.constexpr):
    """Return the rows of a tile, int64 [ROWS], and a mask of those that exist."""
    places = tl.arange(0, ROWS)
    mask = places < tl.load(counts + tile)
    return tl.load(order + tile * ROWS + places, mask=mask, other=0).to(tl.int64), mask


@triton.jit
def _record_of(tables, tile, site, part):
    """Return the address of a part's record."""
    table = tl.load(tables + tile).to(tl.pointer_type(tl.int64))
    return table + site * _PART_WORDS + part * _WORDS


@triton.jit
def _matrix(record, word: tl.constexpr):
    """Return the address of A (0) or B (1)."""
    return tl.multiple_of(tl.load(record + word).to(tl.pointer_type(tl.float32)), 16)


@triton.jit(do_not_specialize=["site", "num_rows", "parts"])
def _shrink_kernel(
    x,  # [N, K]
    inner,  # float32 [segments, N, parts, ranks]
    order, tables, counts, num_tiles, site, num_rows, parts, ranks,
    K: tl.constexpr, SEGMENT: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
    RANKS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the sums of rows and A. Grid (programs, parts * blocks of ranks, segments or 1)."""
    blocks = ranks // RANKS
    part = tl.program_id(1) // blocks
    rank_places = tl.program_id(1) % blocks * RANKS + tl.arange(0, RANKS)
    ks = tl.arange(0, DEPTH)
    begin = tl.program_id(2) * SEGMENT if SPLIT else 0
    end = tl.minimum(begin + SEGMENT, K) if SPLIT else K
    for tile in range(tl.program_id(0), tl.load(num_tiles), tl.num_programs(0)):
        record = _record_of(tables, tile, site, part)
        rank = tl.load(record + 2)
        if tl.program_id(1) % blocks * RANKS < rank:
            rows, mask = _rows_of(order, counts, tile, ROWS)
            x_start = x + rows[:, None] * K + ks[None, :]
            a_start = _matrix(record, 0) + rank_places[None, :] * K + ks[:, None]
            total = tl.zeros((ROWS, RANKS), tl.float32)
            sums = tl.zeros((ROWS, RANKS), tl.float32)
            for k in range(begin, end, DEPTH):
                x_mask, a_mask = mask[:, None], (rank_places < rank)[None, :]
                if K % DEPTH != 0:
                    x_mask = x_mask & (ks < K - k)[None, :]
                    a_mask = a_mask & (ks < K - k)[:, None]
                x_tile = tl.load(x_start + k, mask=x_mask, other=0.0).to(tl.float32)
                a_tile = tl.load(a_start + k, mask=a_mask, other=0.0)
                sums = tl.dot(x_tile, a_tile, sums, input_precision=PRECISION)
                if not SPLIT and SEGMENT < K:  # noqa: SIM102 (known at compile time)
                    if (k + DEPTH) % SEGMENT == 0:
                        total += sums
                        sums = tl.zeros((ROWS, RANKS), tl.float32)
            if SPLIT or SEGMENT >= K:
                total = sums
            elif tl.cdiv(K, DEPTH) * DEPTH % SEGMENT != 0:
                total += sums
            targets = tl.program_id(2).to(tl.int64) * num_rows + rows
            places = (targets[:, None] * parts + part) * ranks + rank_places[None, :]
            tl.store(inner + places, total, mask=mask[:, None])


@triton.jit(do_not_specialize=["site", "num_rows", "parts"])
def _expand_kernel(
    y,  # [N, M]
    inner,  # float32 [segments, N, parts, ranks]
    order, tables, counts, num_tiles, site, num_rows, num_columns, parts, ranks,
    SEGMENTS: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the products with B to y, and round once. Grid (programs, blocks of columns)."""
    start = tl.program_id(1) * COLUMNS
    columns = start + tl.arange(0, COLUMNS)
    for tile in range(tl.program_id(0), tl.load(num_tiles), tl.num_programs(0)):
        rows, mask = _rows_of(order, counts, tile, ROWS)
        for part in range(parts):
            record = _record_of(tables, tile, site, part)
            rank, first, width = tl.load(record + 2), tl.load(record + 3), tl.load(record + 4)
            if (rank > 0) & (first < start + COLUMNS) & (start < first + width):
                if ALIGNED:
                    first, width = tl.multiple_of(first, 16), tl.multiple_of(width, 16)
                scale = tl.load(record + 5).to(tl.int32).to(tl.float32, bitcast=True)
                inside = (columns >= first) & (columns < first + width)
                sums = tl.zeros((ROWS, COLUMNS), tl.float32)
                for rank_start in range(0, rank, RANKS):
                    ranks_here = rank_start + tl.arange(0, RANKS)
                    known = mask[:, None] & (ranks_here < rank)[None, :]
                    factors = tl.zeros((ROWS, RANKS), tl.float32)
                    sources = (rows[:, None] * parts + part) * ranks + ranks_here[None, :]
                    segment_start = inner
                    for _ in tl.static_range(SEGMENTS):
                        factors += tl.load(segment_start + sources, mask=known, other=0.0)
                        segment_start += num_rows.to(tl.int64) * parts * ranks
                    b_start = _matrix(record, 1) + ranks_here[:, None] * width
                    b_mask = (ranks_here < rank)[:, None] & inside[None, :]
                    b_tile = tl.load(b_start + (columns - first)[None, :], mask=b_mask, other=0.0)
                    sums = tl.dot(factors * scale, b_tile, sums, input_precision=PRECISION)
                y_start = y + rows[:, None] * num_columns + columns[None, :]
                y_mask = mask[:, None] & inside[None, :]
                before = tl.load(y_start, mask=y_mask, other=0.0).to(tl.float32)
                tl.store(y_start, (before + sums).to(y.dtype.element_ty), mask=y_mask)
